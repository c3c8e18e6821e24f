"""Signals that would end a process at once, where it has something to put in order first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["raised"]


@contextlib.contextmanager
def raised(error: Callable[[signal.Signals], BaseException]) -> Iterator[None]:
    """SIGTERM and SIGHUP (a closed terminal) are raised as this error inside, as Ctrl-C is as KeyboardInterrupt."""

    def end(number: int, frame: FrameType | None) -> None:
        raise error(signal.Signals(number))

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
