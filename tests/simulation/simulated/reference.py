"""Expected stream of every box, computed beforehand: the input of a run, and each box's record and batch at each step.

The input is uneven on purpose: a slot's epochs have lengths of their own, some of them none at all, and the training
loop leaves some passes early. What is delivered is a function of this plan alone, whatever happens to processes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from penstock.proto.state.position import Position

__all__ = ["Batch", "BoxPlan", "RunPlan"]

_PASSES = 5
"""Lengths repeat after so many."""


@dataclass(frozen=True)
class Batch:
    """Batch that holds only its own origin."""

    slot: int
    epoch: int
    index: int
    """Number in its epoch, from 1."""
    total: int
    """Number in the slot's whole run, from 1."""
    mixed_from: tuple[int, ...] = field(default=(), compare=False)
    """Steps from which on the mixture changes, as far as the runner knows."""


@dataclass
class BoxPlan:
    """Whole life of one box without a fault."""

    number: int
    steps: int
    """Number of steps that it takes."""
    abandoned: frozenset[int]
    """Steps after which it leaves its epoch."""
    saves: frozenset[int]
    """Steps at which it asks for the state of the run."""
    lengths: list[list[int]]
    """Slot -> the length of its epochs."""
    records: list[Position] = field(default_factory=list)
    """Step -> where the box stands right after it."""
    batches: list[Batch] = field(default_factory=list)
    """Step - 1 -> its batch."""
    ends: list[dict[int, int]] = field(default_factory=list)
    """Slot -> epoch -> its total where that epoch ended for it."""

    def length(self, slot: int, epoch: int) -> int:
        return self.lengths[slot][epoch % _PASSES]

    def play(self) -> None:
        """Fills in what follows from the rest."""
        at = Position.start(len(self.lengths))
        self.ends = [{} for _ in self.lengths]
        self.records = [at.copy()]
        while at.step < self.steps:
            if at.step in self.abandoned and any(at.delivered):
                self._end_all(at)
                at.abandon_epoch()
            slot = at.turn
            if at.delivered[slot] == self.length(slot, at.epoch):
                self.ends[slot][at.epoch] = at.total[slot]
                at.exhaust()
                continue
            at.deliver()
            self.batches.append(Batch(slot, at.epoch, at.delivered[slot], at.total[slot]))
            self.records.append(at.copy())

    def _end_all(self, at: Position) -> None:
        for slot in range(len(self.lengths)):
            self.ends[slot].setdefault(at.epoch, at.total[slot])

    def on_path(self, slot: int, epoch: int, total: int) -> bool:
        """The loop was, or will be, at this place of the slot: it does not lie beyond where an epoch was left."""
        end = self.ends[slot].get(epoch)
        began = self.ends[slot].get(epoch - 1, 0) if epoch else 0
        return began <= total and (end is None or total <= end)

    def usable(self, slot: int, start: tuple[int, int], place: tuple[int, int]) -> bool:
        """Return whether a runner that resumes at `place` may start from `start`. Both are (epoch, total).

        It replays across the natural end of an epoch, but across one that was left early only if that is where the loop
        stands, and never from beyond it.
        """
        if start > place or start[1] > place[1] or not self.on_path(slot, *start):
            return False
        passes = range(start[0], place[0])
        return all(self._natural(slot, epoch) or self.ends[slot].get(epoch) == place[1] for epoch in passes)

    def _natural(self, slot: int, epoch: int) -> bool:
        end = self.ends[slot].get(epoch)
        began = self.ends[slot].get(epoch - 1, 0) if epoch else 0
        return end is not None and end - began == self.length(slot, epoch)


@dataclass
class RunPlan:
    ordinal: int
    workers: int
    """Slots of each box."""
    retention: int
    boxes: list[BoxPlan]
    opens_at: float
    step_s: float
    """Seconds that the training loop spends on a step."""
    collective: bool
    """No box goes on before all have taken the same step. Only then do loops leave passes early or end before others:
    the state at a step that a box has not taken yet takes for granted that it goes on as it is."""

    @property
    def name(self) -> str:
        return f"job/{self.ordinal}"

    @property
    def slots(self) -> int:
        return self.workers * len(self.boxes)


def plan_run(rng: random.Random, ordinal: int, boxes: int, workers: int) -> RunPlan:
    steps, collective = rng.randint(8, 24), boxes == 1 or rng.random() < 0.7
    plans = []
    for number in range(boxes):
        lengths = [[rng.choice((0, 1, 2, 3, 4, 5, 6, 8)) for _ in range(_PASSES)] for _ in range(workers)]
        if rng.random() < 0.5:
            lengths = [[max(5, length) for length in passes] for passes in lengths]
        lengths[rng.randrange(workers)] = [max(1, length) for length in lengths[0]]  # no epoch is empty
        own = max(4, steps - rng.choice((0, 0, 0, 3))) if collective else steps
        abandoned = frozenset(rng.sample(range(1, own), rng.choice((0, 0, 1, 2)))) if collective else frozenset()
        saves = frozenset(rng.sample(range(1, own + 1), rng.choice((0, 1, 2))))
        plan = BoxPlan(number, own, abandoned, saves, lengths)
        plan.play()
        plans.append(plan)
    retention = rng.choice((2, 4, 8, 64))
    opens_at, step_s = rng.choice((0.0, 0.0, 2.0)), rng.choice((0.02, 0.1, 0.3))
    return RunPlan(ordinal, workers, retention, plans, opens_at, step_s, collective)
