"""Schedule of checkpoint steps, made from an executor's argument `checkpoint_steps`.

    checkpoint_steps      the checkpoint steps
    None or 0             none
    N                     each step that is a multiple of N, and the executor's last
    iterable              the steps in it; it may contain ranges
    callable              the steps for which the function returns True

Steps are absolute, so a resumed run has the same checkpoint steps as one that was never stopped."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.proto.errors import InvalidArgumentError

CheckpointSteps = int | Iterable[int | range] | Callable[[int], bool] | None

HORIZON = 256
MIN_AHEAD = 2
"""Fewest future checkpoint steps to announce: at each a worker takes a snapshot, which needs no replay."""
MOST_REQUESTED = 1365
"""A third of what a runner accepts (`producer.MOST_WANTED`), because earlier requests may still be open."""


def checked_int(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return an int. Raises InvalidArgumentError out of bounds, and TypeError for other types."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value.__index__())
    if number < least:
        raise InvalidArgumentError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise InvalidArgumentError(f"{name} must be at most {most}, got {number}")
    return number


@dataclass(frozen=True)
class CheckpointSchedule:
    every: int = 0
    steps: tuple[int, ...] = ()
    """Single steps, in ascending order."""
    ranges: tuple[range, ...] = ()
    predicate: Callable[[int], bool] | None = None
    and_last: bool = field(default=False)
    """The last step of the executor's loop is a checkpoint step too."""

    @classmethod
    def of(cls, steps: CheckpointSteps) -> CheckpointSchedule:
        if steps is None:
            return cls()
        if callable(steps):
            return cls(predicate=steps)
        if hasattr(steps, "__index__") or isinstance(steps, float | str | bytes):
            if not isinstance(steps, bool) and steps == 0:
                return cls()
            return cls(every=checked_int("checkpoint_steps", steps), and_last=True)
        if isinstance(steps, range):
            steps = (steps,)
        single, ranges = set(), []
        for entry in steps:
            if isinstance(entry, range):
                if len(entry) and min(entry[0], entry[-1]) < 1:
                    raise InvalidArgumentError(f"checkpoint_steps must be steps >= 1, got {entry}: steps count from 1")
                ranges.append(entry if entry.step > 0 else entry[::-1])
            else:
                single.add(checked_int("a step in checkpoint_steps", entry))
        return cls(steps=tuple(sorted(single)), ranges=tuple(ranges))

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int):
            return False
        if self.every:
            return step % self.every == 0
        if self.predicate is not None:
            return bool(self.predicate(step))
        index = bisect_right(self.steps, step)
        return (index > 0 and self.steps[index - 1] == step) or any(step in entry for entry in self.ranges)

    def after(self, step: int) -> int | None:
        """Return the next checkpoint step; None if a function returns False for the next HORIZON steps."""
        if self.every:
            return (step // self.every + 1) * self.every
        if self.predicate is not None:
            return next((later for later in range(step + 1, step + 1 + HORIZON) if self.predicate(later)), None)
        index = bisect_right(self.steps, step)
        candidates = [self.steps[index]] if index < len(self.steps) else []
        for entry in self.ranges:
            index = max(0, -(-(step + 1 - entry.start) // entry.step))
            if index < len(entry):
                candidates.append(entry[index])
        return min(candidates, default=None)

    def ahead(self, step: int, last: int | None, horizon: int) -> list[int]:
        """Return the steps to announce now: those within `horizon` steps, and further ones up to MIN_AHEAD."""
        steps: list[int] = []
        upcoming: int | None = step
        while upcoming is not None:
            upcoming = self.after(upcoming)
            if last is not None and (upcoming is None or upcoming >= last):
                upcoming = last if upcoming == last or (self.and_last and step < last) else None
            if upcoming is None or (upcoming > step + horizon and len(steps) >= MIN_AHEAD):
                break
            steps.append(upcoming)
            if upcoming == last:
                break
        return steps


def requests_of(pairs: list[int]) -> list[int]:
    """Return those announced steps for which snapshots are requested, at most MOST_REQUESTED: the first after each
    batch, and if these are too many, those of the next batches. A state at another step is made from the snapshot
    before it.

    `pairs`: flat, ascending, as the result: step, number of the slot's last batch up to it."""
    if len(pairs) <= 2 * MOST_REQUESTED:
        return pairs
    each = max(1, MOST_REQUESTED // len(set(pairs[1::2])))
    kept: list[int] = []
    taken: Counter[int] = Counter()
    for step, total in zip(pairs[::2], pairs[1::2], strict=True):
        taken[total] += 1
        if taken[total] <= each:
            kept += (step, total)
    return kept[: 2 * MOST_REQUESTED]
