"""Signals that would end a process, turned into exceptions so that the process can clean up first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["ending_signals", "signals_as_errors"]


def ending_signals() -> list[signal.Signals]:
    """Return SIGTERM, and SIGHUP unless it is ignored."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if kept else [signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def signals_as_errors(error: Callable[[signal.Signals], BaseException]) -> Iterator[Callable[[], None]]:
    """Turn SIGTERM and SIGHUP (unless ignored, as under nohup) into an exception within the context, as Ctrl-C is.

    Python drops an exception that a signal handler raises during a finalizer or a weak reference's callback, so the end
    of the context raises it again. A loop, which does not reach this end, must call the function that the context
    yields.
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
