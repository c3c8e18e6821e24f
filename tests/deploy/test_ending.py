"""Signals that end a command."""

from __future__ import annotations

import signal

import pytest

from penstock.deploy.console.signals import signals_as_errors


@pytest.mark.parametrize("nohup", [False, True])
def test_closed_terminal_ends_command_but_nohup(nohup: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        if nohup:
            with signals_as_errors(InterruptedError):
                signal.raise_signal(signal.SIGHUP)
        else:
            with pytest.raises(InterruptedError), signals_as_errors(InterruptedError):
                signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if nohup else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


class Finalized:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_error_swallowed_by_finalizer_is_reraised() -> None:
    again = signals_as_errors(InterruptedError)
    check = again.__enter__()
    Finalized()
    with pytest.raises(InterruptedError):
        check()
    with pytest.raises(InterruptedError):
        again.__exit__(None, None, None)
