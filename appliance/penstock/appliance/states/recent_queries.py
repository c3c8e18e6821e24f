"""The states that were asked for lately: a training job's checkpoints, and what operators looked at.

Every rank of a job asks for the same step when it saves. They are one entry, with the number of those who asked.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.appliance.states.state_query import StateQuery
from penstock.proto.v1 import coordinator_pb2 as pb

MOST = 64
"""Entries that are remembered, of all runs."""
TOGETHER_S = 60.0
"""Askers of one step within this time are ranks that save the same checkpoint."""
_ERROR = 400


OPERATOR = "operator"


@dataclass
class StateFetch:
    """One state that was asked for."""

    run: str
    attempt: int
    asker: str
    at: float
    wall_s: float
    step: int
    seconds: float = 0.0
    bytes: int = 0
    error: str = ""
    askers: int = 1

    def of(self, gathering: StateQuery) -> None:
        """What was asked for, by numbers: the request may have said "the newest"."""
        self.attempt, self.step = gathering.attempt, gathering.step

    def is_with(self, other: StateFetch) -> bool:
        """Of the same checkpoint."""
        same = (self.run, self.attempt, self.step) == (other.run, other.attempt, other.step)
        return same and (self.asker == OPERATOR) == (other.asker == OPERATOR) and bool(self.error) == bool(other.error)


class RecentQueries:
    """`clock`, `wall`: as in recent_events.py."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._done: deque[StateFetch] = deque(maxlen=MOST)

    @contextmanager
    def noted(self, request: pb.FetchStateRequest) -> Iterator[StateFetch]:
        """While it is answered. What ends it is noted, too; an asker that went away had no state."""
        asker = f"box {request.progress.box}" if request.HasField("progress") else OPERATOR
        fetch = StateFetch(request.run, request.attempt, asker, self._clock(), self._wall(), request.step)
        try:
            yield fetch
        except (GeneratorExit, asyncio.CancelledError):
            fetch.error = "the asker went away"
            raise
        except BaseException as error:
            fetch.error = str(error)[:_ERROR] or type(error).__name__
            raise
        finally:
            fetch.seconds = self._clock() - fetch.at
            if not request.aggregate_blob:  # that is a part of what a training job does with a state that it has got
                self._enter(fetch)

    def _enter(self, fetch: StateFetch) -> None:
        for known in reversed(self._done):
            if fetch.is_with(known) and fetch.at - known.at <= TOGETHER_S:
                known.askers += 1
                known.seconds = max(known.seconds, fetch.seconds)
                return
        self._done.append(fetch)

    def messages(self) -> dict[str, list[pb.StateFetch]]:
        """By run, oldest first."""
        by_run: defaultdict[str, list[pb.StateFetch]] = defaultdict(list)
        for fetch in self._done:
            message = pb.StateFetch(
                step=fetch.step,
                asker=fetch.asker,
                wall_s=fetch.wall_s,
                seconds=fetch.seconds,
                bytes=fetch.bytes,
                error=fetch.error,
                askers=fetch.askers,
            )
            by_run[fetch.run].append(message)
        return by_run
