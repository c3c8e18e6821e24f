"""Last state of each run that has ended, kept for a while for `penstock state` and other programs.

When a run ends, its workers and their states are lost, except states fetched lately, which are still in memory. The one
of the highest step, usually the job's own last checkpoint, is written to disk. So training is not delayed, and the kept
state is exactly the one that the job saved. Pure: the service writes and reads the states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.appliance.core.state_query import BoxState, StateQuery
from penstock.appliance.journal.snapshot_store import ClosedRun
from penstock.proto.errors import StateUnavailableError
from penstock.proto.v1 import coordinator_pb2 as pb

CLOSED_S = 7 * 86400.0
"""Seconds for which a last state is kept: a week, so that it outlasts a weekend."""
CLOSED_BYTES = 256 << 20
"""Most bytes of all last states, outside the budget of snapshots; the oldest are dropped first."""
MEMORY_CLOSED_BYTES = 16 << 20
"""The same for a coordinator that keeps its cluster state in memory: the job that it is part of still has its state."""
CLOSED_RUNS = 1000


class ClosedRuns:
    """Index of the kept states. `found`: those in the database at the start; `wall`: seconds since the Unix epoch;
    `limit`: most bytes of all, if less than CLOSED_BYTES."""

    def __init__(self, found: Iterable[ClosedRun], wall: Callable[[], float], limit: int = CLOSED_BYTES) -> None:
        self._limit = min(limit, CLOSED_BYTES)
        self._kept = {one.run: one for one in found}
        self._wall = wall

    def superfluous(self, new: ClosedRun) -> list[str] | None:
        """Return the runs whose states must go, for `new` or for age; None if `new` alone is too large to be kept."""
        if new.size > self._limit:
            return None
        dropped, free_bytes, free_runs = [], self._limit - new.size, CLOSED_RUNS - 1
        for one in sorted(self._kept.values(), key=lambda one: one.wall_s, reverse=True):
            if one.run == new.run:
                continue
            free_bytes, free_runs = free_bytes - one.size, free_runs - 1
            if free_bytes < 0 or free_runs < 0 or not self._is_fresh(one):
                dropped.append(one.run)
        return dropped

    def add(self, new: ClosedRun, gone: Iterable[str]) -> None:
        """Add a state that was written to disk, where those of the runs `gone` were removed."""
        for run in gone:
            self._kept.pop(run, None)
        self._kept[new.run] = new

    def get(self, run: str) -> ClosedRun | None:
        one = self._kept.get(run)
        return one if one is not None and self._is_fresh(one) else None

    def find(self, request: pb.FetchStateRequest) -> ClosedRun | None:
        """Return the kept state of the run and attempt, if any. Raises StateUnavailableError for another step."""
        one = self.get(request.run)
        if one is None or request.attempt not in (0, one.attempt):
            return None
        if not request.newest and request.step != one.step:
            raise StateUnavailableError(
                f"step must be {one.step} for run {one.run}, which has ended, got {request.step}"
            )
        return one

    def _is_fresh(self, one: ClosedRun) -> bool:
        return self._wall() - one.wall_s < CLOSED_S


def parts_of(query: StateQuery) -> list[bytes]:
    """Return a complete state as serialised messages, one for each slot."""
    return [
        pb.StatePart(record=record, data=data, position=None if index else state.position).SerializeToString()
        for _, state in sorted(query.boxes.items())
        for index, (record, data) in enumerate(state.records)
    ]


def boxes_of(parts: Iterable[bytes]) -> list[BoxState]:
    """Return the states of a run's boxes from the messages of `parts_of`."""
    boxes: list[BoxState] = []
    for data in parts:
        part = pb.StatePart.FromString(data)
        if part.HasField("position"):
            boxes.append(BoxState([], part.position))
        boxes[-1].records.append((part.record, part.data))
    return boxes
