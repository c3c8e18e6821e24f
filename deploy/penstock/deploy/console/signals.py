"""Signals that would end a process at once, where it has something to put in order first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["ending", "raised"]


def ending() -> list[signal.Signals]:
    """The signals that end this process: SIGTERM, and SIGHUP where whoever started it does not have it ignored."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if kept else [signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def raised(error: Callable[[signal.Signals], BaseException]) -> Iterator[Callable[[], None]]:
    """SIGTERM and SIGHUP (a closed terminal) are raised as this error inside, as Ctrl-C is as KeyboardInterrupt. Under
    nohup, which ignores SIGHUP, it stays ignored.

    Python drops an error that is raised while a finalizer or a weak reference's callback runs. So it is raised again at
    the end, and by calling what this gives, for who goes round in a loop.
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
