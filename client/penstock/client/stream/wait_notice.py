"""Lines on standard error about why a training job waits: to open a run, for its first batch, or for a slot without a
worker. Without them a job on a busy machine looks like one that hangs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from penstock.proto.v1 import coordinator_pb2 as pb

FIRST_S = 2.0
LEAST_S, MOST_S = 10.0, 60.0
"""Limits of the seconds between two lines; within them, the next is due when the time waited has doubled."""

STAGES: dict[int, str] = {
    pb.FORK_SERVER: "import of torch in the fork server",
    pb.INPUT_FN: "call of input_fn",
    pb.RESTORE: "restore of its state",
    pb.FIRST_BATCH: "first batch of its loader",
}


def say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed


class WaitNotice:
    """Writer of these lines. Its clock starts when the object is created."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, write: Callable[[str], None] = say) -> None:
        self._clock, self._write = clock, write
        self._since = clock()
        self._waited_s: float | None = None
        """Seconds waited when the clock was paused; None while it runs."""
        self._next_s = FIRST_S

    @property
    def due(self) -> float:
        return self._since + self._next_s

    def pause(self) -> None:
        """Stop the clock until `resume`, while the training job does not wait."""
        if self._waited_s is None:
            self._waited_s = self._clock() - self._since

    def resume(self) -> None:
        if self._waited_s is not None:
            self._since, self._waited_s = self._clock() - self._waited_s, None

    def tell(self, what: str, why: str) -> None:
        """Write the line "waiting for WHAT (WHY, N s)" if it is due."""
        waited_s = self._clock() - self._since
        if waited_s >= self._next_s:
            self._next_s = waited_s + min(max(waited_s, LEAST_S), MOST_S)
            self._write(f"penstock: waiting for {what} ({why}, {waited_s:.0f} s)")
