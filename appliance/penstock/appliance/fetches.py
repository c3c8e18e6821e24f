"""The states that were asked for lately: a training job's checkpoints, and what operators looked at.

Every rank of a job asks for the same step when it saves. They are one entry, with the number of those who asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.proto.v1 import coordinator_pb2 as pb

MOST = 64
"""Entries that are remembered, of all runs."""
TOGETHER_S = 60.0
"""Askers of one step within this time are ranks that save the same checkpoint."""
_ERROR = 400


@dataclass
class Fetch:
    """One state that was asked for."""

    run: str
    attempt: int
    asker: str
    at: float
    wall_s: float
    step: int = 0
    seconds: float = 0.0
    bytes: int = 0
    error: str = ""
    askers: int = 1

    @property
    def key(self) -> tuple[str, int, int, bool, bool]:
        return self.run, self.attempt, self.step, self.asker == OPERATOR, bool(self.error)


OPERATOR = "operator"


class Fetches:
    """`clock`, `wall`: as in events.py."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._done: deque[Fetch] = deque(maxlen=MOST)

    def begin(self, request: pb.FetchStateRequest) -> Fetch:
        """An asker has come. Say how it went with `end`."""
        asker = f"box {request.progress.box}" if request.HasField("progress") else OPERATOR
        return Fetch(request.run, request.attempt, asker, self._clock(), self._wall(), request.step)

    def end(self, fetch: Fetch, error: str = "") -> None:
        fetch.seconds, fetch.error = self._clock() - fetch.at, error[:_ERROR]
        for known in reversed(self._done):
            if known.key == fetch.key and fetch.at - known.at <= TOGETHER_S:
                known.askers += 1
                known.seconds = max(known.seconds, fetch.seconds)
                return
        self._done.append(fetch)

    def messages(self, run: str) -> list[pb.StateFetch]:
        """Oldest first."""
        return [
            pb.StateFetch(
                step=fetch.step,
                asker=fetch.asker,
                wall_s=fetch.wall_s,
                seconds=fetch.seconds,
                bytes=fetch.bytes,
                error=fetch.error,
                askers=fetch.askers,
            )
            for fetch in self._done
            if fetch.run == run
        ]
