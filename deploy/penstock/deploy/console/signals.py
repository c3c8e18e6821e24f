"""Signals that would end a process at once, turned into errors where it must clean up first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["ending", "raised"]


def ending() -> list[signal.Signals]:
    """Return the signals that end this process: SIGTERM, and SIGHUP unless it is ignored."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if kept else [signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def raised(error: Callable[[signal.Signals], BaseException]) -> Iterator[Callable[[], None]]:
    """Raise SIGTERM and SIGHUP (a closed terminal) as this error inside, as Ctrl-C is raised as KeyboardInterrupt.
    Under nohup, which ignores SIGHUP, it stays ignored.

    Python drops an error that is raised while a finalizer or a weak reference's callback runs. So it is raised again
    at the end, and by calling what this yields, for callers that loop.
    """
    told: list[signal.Signals] = []

    def end(number: int, frame: FrameType | None) -> None:
        told.append(signal.Signals(number))
        again()

    def again() -> None:
        if told:
            raise error(told[0])

    before = {number: signal.signal(number, end) for number in ending()}
    try:
        yield again
        again()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
