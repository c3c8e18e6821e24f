"""Recent state queries: operators' fetches, and checkpoints of jobs, whose ranks' requests count as one."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.proto.v1 import coordinator_pb2 as pb

MOST = 64
"""Entries kept, over all runs."""
TOGETHER_S = 60.0
"""Seconds within which requests for the same step count as one checkpoint."""
_ERROR = 400


OPERATOR = "operator"
"""Caller of a request that is not from a training job."""


@dataclass
class StateFetch:
    """One request for a state, or several for the same step."""

    run: str
    attempt: int
    at: float
    message: pb.StateFetch

    def key(self) -> tuple[object, ...]:
        """Requests of one checkpoint have the same key."""
        message = self.message
        return self.run, self.attempt, message.step, message.asker == OPERATOR, bool(message.error)


class RecentQueries:
    """List of the latest requests. `clock`: monotonic; `wall`: seconds since the Unix epoch."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._done: deque[StateFetch] = deque(maxlen=MOST)

    @contextmanager
    def noted(self, request: pb.FetchStateRequest) -> Iterator[StateFetch]:
        """Return a context that adds a request once answered, with the error that ended it, also a lost connection."""
        caller = f"box {request.progress.box}" if request.HasField("progress") else OPERATOR
        message = pb.StateFetch(asker=caller, wall_s=self._wall(), step=request.step, askers=1)
        fetch = StateFetch(request.run, request.attempt, self._clock(), message)
        try:
            yield fetch
        except (GeneratorExit, asyncio.CancelledError):
            message.error = "the caller disconnected"
            raise
        except BaseException as error:
            message.error = str(error)[:_ERROR] or type(error).__name__
            raise
        finally:
            message.seconds = self._clock() - fetch.at
            if not request.aggregate_blob:  # an aggregation fetches no state: the caller has the states already
                self._enter(fetch)

    def _enter(self, fetch: StateFetch) -> None:
        for known in reversed(self._done):
            if fetch.key() == known.key() and fetch.at - known.at <= TOGETHER_S:
                known.message.askers += 1
                known.message.seconds = max(known.message.seconds, fetch.message.seconds)
                return
        self._done.append(fetch)

    def messages(self) -> dict[str, list[pb.StateFetch]]:
        """Return run -> its requests for a status reply, oldest first."""
        by_run: defaultdict[str, list[pb.StateFetch]] = defaultdict(list)
        for fetch in self._done:
            by_run[fetch.run].append(fetch.message)
        return by_run
