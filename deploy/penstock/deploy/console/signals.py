"""Signals that would end a process, turned into exceptions so that the process can clean up first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["ending_signals", "signals_as_errors"]


def ending_signals() -> list[signal.Signals]:
    """Return the signals that would end this process: SIGTERM, and SIGHUP unless it is ignored."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if kept else [signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def signals_as_errors(error: Callable[[signal.Signals], BaseException]) -> Iterator[Callable[[], None]]:
    """Turn SIGTERM and SIGHUP (a closed terminal) into an exception within the context, as Python turns Ctrl-C into
    KeyboardInterrupt. Under nohup, SIGHUP stays ignored. `error`: returns the exception for a signal.

    Python drops an exception that a signal handler raises while a finalizer or the callback of a weak reference runs.
    So the end of the context raises it again. A loop within the context would not reach this end: it must call the
    function that the context yields, which raises the exception if a signal has come.
    """
    received: list[signal.Signals] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        again()

    def again() -> None:
        if received:
            raise error(received[0])

    before = {number: signal.signal(number, end) for number in ending_signals()}
    try:
        yield again
        again()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
