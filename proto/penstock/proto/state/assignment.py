"""The assignment of this process: the value that `current_assignment()` returns inside a user's input_fn.

A runner sets it once, before it calls input_fn; the training job sets it around the local instances that it builds of a
loader. Elsewhere the assignment is that of the only worker of the only box, so that an input_fn also runs there.

The assignment is a module global, not a context variable, because input_fn may start threads, and a new thread begins
with an empty context. A byte of shared memory records whether the assignment was read. It is shared because the reader
is often a worker process that torch's DataLoader forked. The runner warns about an input that never reads its
assignment, because it streams the whole data set from every worker.
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
    """Position of one worker among all that stream for a run."""

    box: int
    """Number of the box (data-parallel rank) that this worker feeds, in [0, num_boxes)."""
    num_boxes: int
    slot: int
    """Number of this worker among those of its box, in [0, num_workers_per_box)."""
    num_workers_per_box: int
    seed: int
    """Seed of the run, the same on all workers: shuffle a list with it, then take this worker's share."""
    first_step: int
    """Number of the next step of the box, from 1. Larger than 1 after a resume."""

    @property
    def global_worker_id(self) -> int:
        """Return this worker's number among all, in [0, total_num_workers)."""
        return self.box * self.num_workers_per_box + self.slot

    @property
    def total_num_workers(self) -> int:
        return self.num_boxes * self.num_workers_per_box


NEUTRAL = Assignment(box=0, num_boxes=1, slot=0, num_workers_per_box=1, seed=0, first_step=1)
"""Assignment outside a worker."""

_current = NEUTRAL
_alone = replace(NEUTRAL)
"""Assignment for code that must not divide its data. It is a copy, because NEUTRAL itself means "outside a run"."""
_looked = mmap.mmap(-1, 1)  # shared with forked children


def current_assignment() -> Assignment:
    """Return which worker runs this code: its number, its box, the numbers of boxes and workers, and the run's seed.
    Outside a worker it is worker 0 of 1, with seed 0.

    Sharding inside input_fn: `data[a.global_worker_id :: a.total_num_workers]` with `a = current_assignment()`.
    """
    _looked[0] = 1
    return _current


def get_streaming_batch_size(effective_batch_size: int, global_rank: int | None = None) -> int:
    """Return the batch size of a worker, in rows, for a given global batch of all boxes. It is the share of its box,
    because one worker makes a whole batch of its box.

    The first boxes get one row more where the global batch does not divide evenly. Outside a worker the result is the
    whole global batch.

    Args:
        effective_batch_size: rows of all boxes' batches together, at least one for each box.
        global_rank: global_worker_id of the worker; None: this worker.

    Raises:
        TypeError: effective_batch_size is not an integer.
        InvalidArgumentError: there are fewer rows than boxes, or global_rank is out of range.
    """
    if isinstance(effective_batch_size, bool) or not isinstance(effective_batch_size, int):
        raise TypeError(f"effective_batch_size must be an integer, got {effective_batch_size!r}")
    here = current_assignment()
    if effective_batch_size < here.num_boxes:
        raise InvalidArgumentError(
            f"effective_batch_size must be >= the number of boxes ({here.num_boxes}), got {effective_batch_size}: "
            "each box needs a row"
        )
    if global_rank is not None and not 0 <= global_rank < here.total_num_workers:
        raise InvalidArgumentError(f"global_rank must be in [0, {here.total_num_workers}), got {global_rank}")
    box = here.box if global_rank is None else global_rank // here.num_workers_per_box
    share, rest = divmod(effective_batch_size, here.num_boxes)
    return share + (box < rest)


def set_assignment(assignment: Assignment) -> None:
    """Set this process's assignment, as a runner does, and mark it as not read."""
    global _current, _looked
    _current = assignment
    _looked = mmap.mmap(-1, 1)  # a new one: the fork server's is shared by all of its children


@contextmanager
def assigned(assignment: Assignment) -> Iterator[None]:
    """Set an assignment within a block; afterwards restore the earlier one, and whether it was read."""
    global _current, _looked
    before = _current, _looked
    set_assignment(assignment)
    try:
        yield
    finally:
        _current, _looked = before


Seat = tuple[Assignment, mmap.mmap]
"""Assignment, and the shared byte that records whether it was read."""


def exchange(seat: Seat | None) -> Seat:
    """Switch to another worker's assignment (None if it is not set yet), in a process that several workers share in
    turn; return the one before."""
    global _current, _looked
    before = _current, _looked
    _current, _looked = seat if seat is not None else (NEUTRAL, mmap.mmap(-1, 1))
    return before


def step_aside() -> Assignment:
    """Make this process appear as the only worker of the only box. Return the assignment, for `step_back`.

    Does not change whether the assignment counts as read.
    """
    global _current, _alone
    before = _current
    if (_alone.seed, _alone.first_step) != (before.seed, before.first_step):
        _alone = replace(NEUTRAL, seed=before.seed, first_step=before.first_step)
    _current = _alone
    return before


def step_back(assignment: Assignment) -> None:
    """Restore the assignment that `step_aside` returned."""
    global _current
    _current = assignment


def stands_aside() -> bool:
    """Return whether `step_aside` is in force."""
    return _current is _alone


def looked_at() -> bool:
    """Return whether this process, or one that it forked, read its assignment since it was set."""
    return _looked[0] == 1


def mark_looked_at() -> None:
    """Mark the assignment as read, because it was read in another way, such as by torch's get_worker_info()."""
    _looked[0] = 1
