"""Signals that would end a process, turned into exceptions where the process must clean up first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["ending", "raised"]


def ending() -> list[signal.Signals]:
    """Return the signals that would end this process: SIGTERM, and SIGHUP unless it is ignored."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if kept else [signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def raised(error: Callable[[signal.Signals], BaseException]) -> Iterator[Callable[[], None]]:
    """Turn SIGTERM and SIGHUP (a closed terminal) into an exception within the context, as Python turns Ctrl-C into
    KeyboardInterrupt. Under nohup, SIGHUP stays ignored. `error`: function that returns the exception for a signal.

    Python drops an exception that is raised while a finalizer or the callback of a weak reference runs. So the
    exception is raised again at the end of the context, and by the function that the context yields. A caller with a
    loop must call this function in each round.
    """
    received: list[signal.Signals] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        again()

    def again() -> None:
        if received:
            raise error(received[0])

    before = {number: signal.signal(number, end) for number in ending()}
    try:
        yield again
        again()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
