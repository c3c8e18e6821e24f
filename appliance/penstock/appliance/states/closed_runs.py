"""The last state of each run that has ended, kept for a while: what `penstock state` and programs of others still find.

While a run is open its workers have its states. When it ends they are free at once, and the states gone with them, but
for the one that was asked for last, usually by the job's own last checkpoint: its answer is still in memory then, and
is written beside the snapshots. It costs training nothing, and says exactly what the job saved.

Pure: it says what is kept and what may go, the service writes and reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.appliance.model.limits import Limits
from penstock.appliance.states.state_query import BoxState, StateQuery
from penstock.proto.errors import StateUnavailableError
from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["ClosedRun", "ClosedRuns", "boxes_of", "parts_of"]


@dataclass(frozen=True)
class ClosedRun:
    """The state that is kept of a run."""

    run: str
    attempt: int
    step: int
    wall_s: float
    """When the run ended, seconds since the epoch."""
    size: int
    """Bytes of its parts."""


class ClosedRuns:
    """
    Args:
        found: what the store holds.
        wall: seconds since the epoch.
    """

    def __init__(self, found: Iterable[ClosedRun], limits: Limits, wall: Callable[[], float]) -> None:
        self._kept = {one.run: one for one in found}
        self._limits = limits
        self._wall = wall

    def of(self, gathering: StateQuery, parts: list[bytes]) -> ClosedRun:
        """What is kept of a run that ends now."""
        size = sum(map(len, parts))
        return ClosedRun(gathering.run, gathering.attempt, gathering.step, self._wall(), size)

    def superfluous(self, new: ClosedRun) -> list[str] | None:
        """The runs whose states go when `new` comes; None: it is too large to be kept itself."""
        limits = self._limits
        if new.size > limits.closed_bytes:
            return None
        go, room, places = [], limits.closed_bytes - new.size, limits.closed_runs - 1
        for one in sorted(self._kept.values(), key=lambda one: one.wall_s, reverse=True):
            if one.run == new.run:
                continue
            room, places = room - one.size, places - 1
            if room < 0 or places < 0 or not self._is_fresh(one):
                go.append(one.run)
        return go

    def add(self, new: ClosedRun, gone: Iterable[str]) -> None:
        """It is on disk, and those are not any more."""
        for run in gone:
            self._kept.pop(run, None)
        self._kept[new.run] = new

    def get(self, run: str) -> ClosedRun | None:
        one = self._kept.get(run)
        return one if one is not None and self._is_fresh(one) else None

    def find(self, request: pb.FetchStateRequest) -> ClosedRun | None:
        """The state that answers the request about a closed run; None: none is kept. StateUnavailableError: it is of
        another step."""
        one = self.get(request.run)
        if one is None or request.attempt not in (0, one.attempt):
            return None
        if not request.newest and request.step != one.step:
            raise StateUnavailableError(
                f"the state of run {one.run} at step {request.step} cannot be had: the run is closed, and only the one "
                f"that it asked for last is kept, at step {one.step}"
            )
        return one

    def _is_fresh(self, one: ClosedRun) -> bool:
        return self._wall() - one.wall_s < self._limits.closed_s


def parts_of(gathering: StateQuery) -> list[bytes]:
    """A complete state, as messages of a record with all its data."""
    return [
        pb.StatePart(record=record, data=data, position=None if index else state.position).SerializeToString()
        for _, state in sorted(gathering.boxes.items())
        for index, (record, data) in enumerate(state.records)
    ]


def boxes_of(parts: Iterable[bytes]) -> list[BoxState]:
    """The way back."""
    boxes: list[BoxState] = []
    for data in parts:
        part = pb.StatePart.FromString(data)
        if part.HasField("position"):
            boxes.append(BoxState([], part.position))
        boxes[-1].records.append((part.record, part.data))
    return boxes
