"""Attempts that `penstock replay` takes a step from, and what it says if there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.deploy.replay.plan import _snapshot, attempt_of
from penstock.proto.errors import StateUnavailableError
from penstock.proto.v1 import coordinator_pb2 as pb


def history(attempt: int, begun: int, last: int, *, settled: bool = True) -> pb.History:
    """Return the history of an attempt that began at step `begun` and reported step `last`."""
    made = pb.History(attempt=attempt, settled=settled)
    made.opening.start.step = begun
    made.known.add(step=last)
    return made


HISTORIES = [history(1, 10, 30), history(2, 20, 25), history(3, 25, 25)]


@pytest.mark.parametrize(("step", "attempt"), [(25, 2), (30, 1), (15, 1), (21, 2)])
def test_newest_attempt_with_the_step_is_taken(step: int, attempt: int) -> None:
    assert attempt_of(HISTORIES, 0, step).attempt == attempt


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (10, "must be at least 11, the oldest step of box 0 that the coordinator still has, got 10. For older"),
        (31, "(steps 11 to 30 of attempt 1, 21 to 25 of attempt 2), got 31"),
    ],
)
def test_steps_that_were_not_delivered(step: int, says: str) -> None:
    with pytest.raises(StateUnavailableError) as caught:
        attempt_of(HISTORIES, 0, step)
    assert says in caught.value.message


def test_a_slot_starts_from_a_snapshot_before_the_position() -> None:
    kept = pb.History()
    slot = kept.slots.add()
    for epoch, total in ((0, 3), (0, 9), (1, 12)):
        slot.snapshots.add(epoch=epoch, total=total, size=1)

    def found(epoch: int, total: int, abandoned: dict[int, int]) -> int | None:
        position: Any = SimpleNamespace(epoch=epoch, total=[total])
        header = _snapshot(kept, 0, position, abandoned)
        return None if header is None else header.total

    assert [found(0, 5, {}), found(1, 11, {}), found(2, 20, {})] == [3, 9, 12]
    assert [found(1, 11, {0: 4}), found(2, 20, {0: 4}), found(2, 20, {1: 4})] == [None, 12, None]
