"""Ways to a position within an epoch of a pure loader, as decisions over values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.proto.state.codec import decode_state
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.epoch_goal import EpochGoal
from penstock.worker.loader.restart_plan import NEAR
from penstock.worker.loader.restart_points import RestartPoint, StreamPosition


def point(epoch: int, began: int, total: int, *, start: bool = False, spent_s: float = 0.0) -> RestartPoint:
    """Return a restart point whose state cannot be compared with `==`."""
    state = None if start else {"image": np.zeros(3)}
    return RestartPoint(
        StreamPosition(epoch, total - began, total, 10 * total), state, b"r", b"" if start else None, spent_s=spent_s
    )


def at(goal: EpochGoal) -> list[tuple[int, int, bool]]:
    return [(way.epoch, way.total, way.is_epoch_start) for way in goal.ways]


# ---- a runner that takes a slot over


BEGAN = 300
OTHERS = [point(1, 0, 0, start=True), point(1, 0, 200), point(1, 0, 300), point(3, 700, 700, start=True)]
"""Restart points of the epochs before and after the one that began after batch 300; 300 is the last of epoch 1."""


@given(
    st.integers(0, 400),
    st.sets(st.integers(1, 400)),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 3.0, float("inf")]),
    st.randoms(use_true_random=False),
)
def test_ways_lead_through_one_epoch(
    delivered: int, taken: set[int], start: bool, replay_s: float, random: Any
) -> None:
    """Each batch takes 0.01 s. Points beyond the position are of a runner that was ahead of the loop."""
    inside = [point(2, BEGAN, BEGAN + count, spent_s=count / 100) for count in taken]
    points = [*OTHERS, *inside, *([point(2, BEGAN, BEGAN, start=True)] if start else [])]
    random.shuffle(points)
    goal = EpochGoal.within(2, BEGAN + delivered, BEGAN, points, chain=7, replay_s=replay_s)
    assert (goal.epoch, goal.total, goal.chain, goal.next_digest, goal.ends) == (2, BEGAN + delivered, 7, 0, False)
    *snapshots, beginning = goal.ways
    assert beginning.position.as_list() == [2, 0, BEGAN, 10 * BEGAN], "the beginning needs no data"
    assert beginning.is_epoch_start
    assert beginning.state is None
    behind = sorted(count for count in taken if count < delivered)
    if replay_s == float("inf") or not behind or behind[-1] / 100 < replay_s:
        assert not snapshots
    for snapshot in snapshots:
        assert snapshot.total - BEGAN in behind
        near = delivered - (snapshot.total - BEGAN)
        assert near >= NEAR or (behind[-1] - (snapshot.total - BEGAN)) / 100 >= replay_s - 1e-9


@pytest.mark.parametrize("total", [300, 301, 500])
def test_a_state_of_another_topology_is_the_beginning(total: int) -> None:
    """Nothing else leads to the middle of an epoch that other workers began. It may have been sent twice."""
    points = [point(2, BEGAN, BEGAN), point(2, BEGAN, BEGAN), point(2, BEGAN, 400, spent_s=9.0)]
    goal = EpochGoal.within(2, total, BEGAN, points, replay_s=2.0)
    assert at(goal) == ([(2, 400, False)] if total == 500 else []) + [(2, BEGAN, False)]


# ---- a planned move


@pytest.mark.parametrize(
    ("loop_waits", "replay_s", "total", "expected"),
    [
        (False, 2.0, 500, [(2, 405, False), (2, BEGAN, True)]),  # as after a loss
        (True, 2.0, 500, [(2, 510, False), (2, BEGAN, True)]),  # beyond the loop, which will come there
        (True, math.inf, 500, [(2, BEGAN, True)]),
        (False, math.inf, 500, [(2, BEGAN, True)]),
    ],
)
def test_a_target_prepares(loop_waits: bool, replay_s: float, total: int, expected: list[Any]) -> None:
    points = [point(1, 0, 200), point(2, BEGAN, 405, spent_s=9.0), point(2, BEGAN, 510, spent_s=11.0)]
    goal = EpochGoal.prepared(points, total, loop_waits=loop_waits, replay_s=replay_s)
    assert goal is not None
    assert at(goal) == expected
    assert (goal.epoch, goal.total, goal.prepares) == (2, max(total, expected[0][1]), True)


# ---- a resume


def saved(part_of: RestartPoint, delivered: int, total: int, *, live: bool = True, **fields: Any) -> EpochGoal:
    assignment = records_pb2.WorkerAssignment(slot=1)
    slots = [records_pb2.SlotPosition(), records_pb2.SlotPosition(delivered=delivered, total=total)]
    assignment.start.CopyFrom(records_pb2.BoxPosition(epoch=2, live=[0, 1] if live else [0], slots=slots))
    part: Any = decode_state(part_of.encode())
    return EpochGoal.saved(assignment, part | {"chain": 7, "next_digest": 8, "samples": 55} | fields)


def test_a_save_names_its_own_way() -> None:
    """It has chosen the snapshot, with what it knew of the time."""
    goal = saved(point(2, 300, 305), 10, 310)
    assert at(goal) == [(2, 305, False), (2, 300, True)]
    assert (goal.total, goal.chain, goal.next_digest, goal.ends) == (310, 7, 8, False)
    assert at(saved(point(2, 300, 300, start=True), 10, 310)) == [(2, 300, True)]
    assert at(saved(point(2, 300, 310), 10, 310)) == [(2, 310, False), (2, 300, True)], "the next batch shows it"
    at_end = saved(point(2, 300, 305), 10, 310, next_epoch=True)
    assert (at_end.ends, at_end.next_digest) == (True, 0), "8 is the first of the next epoch"


@pytest.mark.parametrize(
    ("part_of", "delivered", "live", "epoch"),
    [
        (point(2, 310, 310, start=True), 0, True, 2),
        (point(1, 0, 200), 0, True, 2),  # a snapshot of the epoch before says how many batches it had
        (point(2, 300, 305), 10, False, 3),  # this slot had ended the epoch already
    ],
)
def test_a_save_between_epochs_needs_no_state(part_of: RestartPoint, delivered: int, live: bool, epoch: int) -> None:
    goal = saved(part_of, delivered, 310, live=live)
    assert goal == replace(EpochGoal.beginning(epoch, 310, 55), chain=goal.chain, next_digest=8 if live else 0)


def test_every_way_knows_all_quarantined_batches() -> None:
    """A later snapshot names those that were quarantined after an earlier one was taken."""
    skips = ((2, 302, 1),)
    points = [replace(point(2, 300, 305), skips=()), replace(point(2, 300, 390, spent_s=9.0), skips=skips)]
    goal = EpochGoal.within(2, 400, 300, points, replay_s=2.0)
    assert [way.skips for way in goal.ways] == [skips] * len(goal.ways)
