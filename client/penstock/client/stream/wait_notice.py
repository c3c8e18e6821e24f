"""A line on standard error about what a training job waits for until its first batch: nothing if that comes soon.

A first batch takes a fraction of a second on an idle machine, and many seconds on a busy one or where no worker is
free. Without a word a job that waits looks like one that hangs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["WaitNotice"]

FIRST_S = 2.0
"""Seconds of waiting before the first line."""
LEAST_S, MOST_S = 10.0, 60.0
"""Bounds of the seconds between two lines; between them the time waited so far doubles."""


def _print(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed


class WaitNotice:
    """Time waited so far, and the lines about it. It begins to count at once.

    Args:
        clock: seconds, monotonic.
        write: takes a line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, write: Callable[[str], None] = _print) -> None:
        self._clock, self._write = clock, write
        self._since = clock()
        self._waited_s: float | None = None
        """Seconds waited before it was paused; None: it counts."""
        self._next_s = FIRST_S

    @property
    def due(self) -> float:
        """Time of the clock at which the next line is due, if the wait lasts."""
        return self._since + self._next_s

    def pause(self) -> None:
        """Stop counting until `resume`: the training job does something else."""
        if self._waited_s is None:
            self._waited_s = self._clock() - self._since

    def resume(self) -> None:
        """Count on after `pause`."""
        if self._waited_s is not None:
            self._since, self._waited_s = self._clock() - self._waited_s, None

    def tell(self, what: str, why: str) -> None:
        """Write "waiting for WHAT (WHY, N s)", if a line is due."""
        waited_s = self._clock() - self._since
        if waited_s >= self._next_s:
            self._next_s = waited_s + min(max(waited_s, LEAST_S), MOST_S)
            self._write(f"penstock: waiting for {what} ({why}, {waited_s:.0f} s)")
