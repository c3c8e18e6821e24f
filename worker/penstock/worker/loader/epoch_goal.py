"""Plan for a pure loader: the position in an epoch to reach before its first new batch, at a resume and when its runner
is replaced. travel.py carries it out.

Each way leads through one epoch: from a snapshot, or from its beginning, which needs no data. What is made again is
compared with what was delivered. A wrong way is given up for the next; the beginning is the last, so if it is wrong
too, the loader is not deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from penstock.proto.v1 import records_pb2
from penstock.worker.loader.restart_plan import REPLAY_S, worth_restoring
from penstock.worker.loader.restart_points import RestartPoint, StreamPosition


@dataclass(frozen=True)
class EpochGoal:
    """Position in an epoch: after the slot's batch `total`, counted over all epochs."""

    epoch: int
    total: int
    ways: tuple[RestartPoint, ...]
    """Ways to try, the best first; the last is the epoch's beginning, or the state with which the launch began in
    it."""
    chain: int = 0
    """Hash that the epoch's batches so far must have (position.py, `linked`); 0 = any."""
    next_digest: int = 0
    """Digest that the next batch of the epoch must have; 0 = any."""
    ends: bool = False
    prepares: bool = False
    """True if another runner still serves this position. The loop's Hello then names the position to go on to."""
    seeds: tuple[int, ...] = ()
    """Hashes of the states in which input_fn must leave the loader's generators; none = any."""

    @classmethod
    def beginning(cls, epoch: int, total: int, samples: int) -> EpochGoal:
        """total, samples: the slot's batches and samples before it."""
        return cls(epoch, total, (RestartPoint(StreamPosition(epoch, 0, total, samples), None, b"", b""),))

    @classmethod
    def within(
        cls,
        epoch: int,
        total: int,
        began: int,
        points: Iterable[RestartPoint],
        chain: int = 0,
        *,
        replay_s: float,
    ) -> EpochGoal:
        """Return a position in an epoch that began after batch `began`, by the best of its `points`
        (`worth_restoring`)."""
        kept = sorted(points, key=lambda point: (point.epoch, point.total))
        samples = next((point.position.samples for point in reversed(kept) if point.total <= began), 0)
        inside = [point for point in kept if point.epoch == epoch and began <= point.total <= total]
        # a state that came from another topology is the only beginning of its epoch
        beginning = [point for point in inside if point.total == began and not point.is_epoch_start][-1:]
        snapshot = worth_restoring(inside, total, None, replay_s)
        ways = [] if snapshot is None or snapshot.total == began else [snapshot]
        ways += beginning or cls.beginning(epoch, began, samples).ways
        skips = tuple({skip for point in inside for skip in point.skips})  # also those that were learned later
        seeds = next((point.seeds for point in reversed(kept) if point.seeds), ())
        return cls(epoch, total, tuple(replace(way, skips=skips) for way in ways), chain, seeds=seeds)

    @classmethod
    def prepared(
        cls, points: Iterable[RestartPoint], total: int, *, loop_waits: bool, replay_s: float
    ) -> EpochGoal | None:
        """Return the position up to which a migration's target replays while the old runner serves; None if none can be
        reached. total: the slot's batches that the loop has taken at least.

        A replay from far back never catches up with a loop that waits for each batch. So the target then restores the
        newest snapshot, and keeps close behind until it has been compared, unless `replay_s` forbids that for long.
        """
        kept = sorted(points, key=lambda point: (point.epoch, point.total))
        newest = next((point for point in reversed(kept) if point.total <= total), None)
        if newest is None:
            return None
        epoch, began = newest.epoch, newest.began
        goal = cls.within(epoch, total, began, kept, replay_s=math.inf if loop_waits else replay_s)
        if loop_waits:
            inside = [point for point in kept if (point.epoch, point.began) == (epoch, began) and point.total > began]
            inside = [point for point in inside if replay_s - point.spent_s <= REPLAY_S]
            ways = tuple(replace(point, skips=goal.ways[-1].skips) for point in inside[-1:])
            goal = replace(
                goal, total=max(total, *(way.total for way in ways)) if ways else total, ways=ways + goal.ways
            )
        return replace(goal, prepares=True)

    @classmethod
    def saved(cls, assignment: records_pb2.WorkerAssignment, part: dict[str, Any]) -> EpochGoal:
        start, slot = assignment.start, assignment.start.slots[assignment.slot]
        point, over = RestartPoint.of(part), assignment.slot not in start.live
        origin = point.epoch == start.epoch and not point.is_epoch_start
        ends = bool(part.get("next_epoch"))
        if over or not (slot.delivered or origin):
            goal = replace(cls.beginning(start.epoch + over, slot.total, part.get("samples", 0)), seeds=point.seeds)
            return goal if over or ends else replace(goal, next_digest=part.get("next_digest", 0))
        began = slot.total - slot.delivered
        # the save has chosen its snapshot
        goal = cls.within(start.epoch, slot.total, began, [point], part["chain"], replay_s=0.0)
        if began < point.total == slot.total and not point.is_epoch_start:  # the next batch shows whether it is right
            goal = replace(goal, ways=(point, *goal.ways))
        return replace(goal, next_digest=0 if ends else part.get("next_digest", 0), ends=ends)
