"""Who this process streams for: what `current_assignment()` answers inside a user's input_fn.

A runner sets it once, before it calls input_fn; the training job sets it around the local instances that it builds of a
loader. Elsewhere the answer is neutral: the only worker of the only box, so that an input_fn runs anywhere.

It is a plain module global, not a context variable: input_fn may start threads, and a new thread begins with an empty
context. Whether anyone asked is kept in a byte of shared memory, for the one who asks is often a worker process that
torch's DataLoader forked, and the runner must hear of it: an input that never asks streams the whole data set from
every worker, which deserves a warning.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from penstock.proto.errors import InvalidArgumentError

__all__ = [
    "NEUTRAL",
    "Assignment",
    "Seat",
    "assigned",
    "current_assignment",
    "exchange",
    "get_streaming_batch_size",
    "looked_at",
    "mark_looked_at",
    "set_assignment",
    "stands_aside",
    "step_aside",
    "step_back",
]


@dataclass(frozen=True)
class Assignment:
    """One worker's place among all that stream for a run."""

    box: int
    """The accelerator box that this worker feeds, in [0, num_boxes)."""
    num_boxes: int
    slot: int
    """This worker's number among those of its box, in [0, num_workers_per_box)."""
    num_workers_per_box: int
    seed: int
    """The run's seed, the same on all workers: shuffle a list with it and then take your share."""
    first_step: int
    """Number of the first step of the box that is still to come, from 1. Larger than 1 after a resume."""

    @property
    def global_worker_id(self) -> int:
        """This worker's number among all, in [0, total_num_workers)."""
        return self.box * self.num_workers_per_box + self.slot

    @property
    def total_num_workers(self) -> int:
        return self.num_boxes * self.num_workers_per_box


NEUTRAL = Assignment(box=0, num_boxes=1, slot=0, num_workers_per_box=1, seed=0, first_step=1)
"""What current_assignment() answers outside a worker."""

_current = NEUTRAL
_alone = replace(NEUTRAL)
"""What those are told who must not divide anything; not NEUTRAL itself, for that means that there is no run."""
_looked = mmap.mmap(-1, 1)  # shared with forked children


def current_assignment() -> Assignment:
    """The place of the worker that runs this code; a neutral one (worker 0 of 1, seed 0) outside a worker.

    For sharding inside input_fn: `data[a.global_worker_id :: a.total_num_workers]` with `a = current_assignment()`.
    """
    _looked[0] = 1
    return _current


def get_streaming_batch_size(effective_batch_size: int, global_rank: int | None = None) -> int:
    """Return a worker's part of the global batch: its box's, for each of a box's batches is made by one worker.

    The first boxes get a row more where the global batch cannot be divided evenly. Outside a worker it is all of it.

    Args:
        effective_batch_size: rows of all boxes' batches together, at least one for each box.
        global_rank: global_worker_id of the worker; None: of this one.

    Raises:
        TypeError: no integer.
        InvalidArgumentError: fewer rows than boxes, or no such worker.
    """
    if isinstance(effective_batch_size, bool) or not isinstance(effective_batch_size, int):
        raise TypeError(f"effective_batch_size must be an integer, got {effective_batch_size!r}")
    here = current_assignment()
    if effective_batch_size < here.num_boxes:
        raise InvalidArgumentError(
            f"effective_batch_size must be at least the number of boxes, {here.num_boxes}, got {effective_batch_size}: "
            "each box needs a row"
        )
    if global_rank is not None and not 0 <= global_rank < here.total_num_workers:
        raise InvalidArgumentError(f"global_rank must be in [0, {here.total_num_workers}), got {global_rank}")
    box = here.box if global_rank is None else global_rank // here.num_workers_per_box
    share, rest = divmod(effective_batch_size, here.num_boxes)
    return share + (box < rest)


def set_assignment(assignment: Assignment) -> None:
    """Set this process's place, as a runner does; nobody has looked at it yet."""
    global _current, _looked
    _current = assignment
    _looked = mmap.mmap(-1, 1)  # not the one that came with the fork server's memory: all of its children have that


@contextmanager
def assigned(assignment: Assignment) -> Iterator[None]:
    """Take a place for a while; the earlier one, and whether it was looked at, come back after."""
    global _current, _looked
    before = _current, _looked
    set_assignment(assignment)
    try:
        yield
    finally:
        _current, _looked = before


Seat = tuple[Assignment, mmap.mmap]
"""A place, and the mark of whether it was looked at."""


def exchange(seat: Seat | None) -> Seat:
    """Put another's place here, None for one that is yet to be set; returns the one that was here. For a process in
    which several workers take turns."""
    global _current, _looked
    before = _current, _looked
    _current, _looked = seat if seat is not None else (NEUTRAL, mmap.mmap(-1, 1))
    return before


def step_aside() -> Assignment:
    """From now on whoever asks is told that it is the only worker of the only box. Returns the place to `step_back` to.
    Whether anybody looked stays as it is."""
    global _current, _alone
    before = _current
    if (_alone.seed, _alone.first_step) != (before.seed, before.first_step):
        _alone = replace(NEUTRAL, seed=before.seed, first_step=before.first_step)
    _current = _alone
    return before


def step_back(place: Assignment) -> None:
    """Take the place again that `step_aside` returned."""
    global _current
    _current = place


def stands_aside() -> bool:
    """Whether those who ask now are told that they are alone."""
    return _current is _alone


def looked_at() -> bool:
    """Whether this process, or one that it forked, asked for its assignment since it was set."""
    return _looked[0] == 1


def mark_looked_at() -> None:
    """Count another way of asking, torch's get_worker_info() say, as a look."""
    _looked[0] = 1
