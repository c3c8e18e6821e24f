"""Which signals end a command."""

from __future__ import annotations

import signal

import pytest

from penstock.deploy.ending import raised


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_a_command_unless_nohup_was_asked(nohup: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        with raised(InterruptedError):
            if nohup:
                signal.raise_signal(signal.SIGHUP)
            else:
                with pytest.raises(InterruptedError):
                    signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if nohup else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
