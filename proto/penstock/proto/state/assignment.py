"""Assignment of the worker that runs in this process (its number, its box, the run's seed), which
`current_assignment()` returns inside a user's input_fn.

A runner sets the assignment before it calls input_fn. The training job sets one while it builds a local instance of a
loader. Elsewhere the assignment is that of the only worker of the only box, so that an input_fn also works there.

The assignment is a module global, not a context variable, because input_fn may start threads, and a new thread begins
with an empty context. A byte of shared memory records whether the assignment was read, because the process that reads
the assignment is often a worker process that torch's DataLoader forked. If an input never reads its assignment, the
runner warns, because every worker then streams the whole data set.
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
    """Number of a worker among all workers of a run, the numbers of boxes and workers, and the run's seed."""

    box: int
    """Number of the box (data-parallel rank) that this worker feeds, in [0, num_boxes)."""
    num_boxes: int
    slot: int
    """Number of this worker among the workers of its box, in [0, num_workers_per_box). After a resume it may differ
    from the number of the runner's slot: see `DataLoaderCheckpoint.local_worker_id`."""
    num_workers_per_box: int
    seed: int
    """Seed of the run, the same on all workers, for example to shuffle a list before each worker takes its share."""
    first_step: int
    """Number of the box's first step in this launch, from 1; above 1 after a resume. A runner that replaces a lost one
    in the same launch has the same number."""

    @property
    def global_worker_id(self) -> int:
        """Number of this worker among all workers of the run, in [0, total_num_workers): box * num_workers_per_box +
        slot."""
        return self.box * self.num_workers_per_box + self.slot

    @property
    def total_num_workers(self) -> int:
        return self.num_boxes * self.num_workers_per_box


NEUTRAL = Assignment(box=0, num_boxes=1, slot=0, num_workers_per_box=1, seed=0, first_step=1)
"""Assignment of code that runs outside a worker: worker 0 of 1, with seed 0."""

_current = NEUTRAL
_alone = replace(NEUTRAL)
"""Assignment of code that must not divide its data (see `step_aside`): the only worker. It is a copy, because NEUTRAL
itself means "outside a run"."""
_looked = mmap.mmap(-1, 1)  # shared with forked children


def current_assignment() -> Assignment:
    """Return the assignment of the worker that runs this code: its number, its box, the numbers of boxes and workers,
    and the run's seed. Outside a worker, return the assignment of worker 0 of 1, with seed 0.

    To divide data inside input_fn: `data[a.global_worker_id :: a.total_num_workers]` with `a = current_assignment()`.
    """
    _looked[0] = 1
    return _current


def get_streaming_batch_size(effective_batch_size: int, global_rank: int | None = None) -> int:
    """Return the batch size (number of rows) that a worker must use so that all boxes together train on
    `effective_batch_size` rows at each step. For 512 rows and 4 boxes: 128 on every worker, however many workers a box
    has, because each batch of a box is made by one worker.

    If the rows do not divide evenly, the first boxes get one row more. Outside a worker the result is
    `effective_batch_size`.

    Args:
        effective_batch_size: number of rows of a step, in the batches of all boxes together; at least the number of
            boxes.
        global_rank: global_worker_id of the worker; None: this worker.

    Raises:
        TypeError: effective_batch_size is not an integer.
        InvalidArgumentError: there are fewer rows than boxes, or global_rank is out of range.
    """
    if isinstance(effective_batch_size, bool) or not isinstance(effective_batch_size, int):
        raise TypeError(
            f"effective_batch_size must be an integer, got {effective_batch_size!r}: pass the number of rows"
        )
    here = current_assignment()
    if effective_batch_size < here.num_boxes:
        raise InvalidArgumentError(
            f"effective_batch_size must be >= the number of boxes ({here.num_boxes}), got {effective_batch_size}: "
            "pass at least one row for each box"
        )
    if global_rank is not None and not 0 <= global_rank < here.total_num_workers:
        raise InvalidArgumentError(
            f"global_rank must be in [0, {here.total_num_workers}), got {global_rank}: pass a worker's global_worker_id"
        )
    box = here.box if global_rank is None else global_rank // here.num_workers_per_box
    share, rest = divmod(effective_batch_size, here.num_boxes)
    return share + (box < rest)


def set_assignment(assignment: Assignment) -> None:
    """Set this process's assignment, and mark it as not read. A runner calls this before input_fn."""
    global _current, _looked
    _current = assignment
    _looked = mmap.mmap(-1, 1)  # a new one: the fork server's is shared by all of its children


@contextmanager
def assigned(assignment: Assignment) -> Iterator[None]:
    """Set an assignment inside a block. After the block, the previous assignment and its mark (read or not) are
    restored."""
    global _current, _looked
    before = _current, _looked
    set_assignment(assignment)
    try:
        yield
    finally:
        _current, _looked = before


Seat = tuple[Assignment, mmap.mmap]
"""Assignment of one of several workers in a process, and the shared byte that records whether it was read."""


def exchange(seat: Seat | None) -> Seat:
    """Set the assignment of another worker, for a process that runs several workers in turn. `seat`: what an earlier
    call returned for that worker; None: the worker has no assignment yet. Return the seat of the previous worker."""
    global _current, _looked
    before = _current, _looked
    _current, _looked = seat if seat is not None else (NEUTRAL, mmap.mmap(-1, 1))
    return before


def step_aside() -> Assignment:
    """Let this process appear as the only worker of the only box, until `step_back`, so that code does not divide its
    data. Return the real assignment.

    The mark that records whether the assignment was read does not change.
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
    """Return whether the process appears as the only worker: it is between `step_aside` and `step_back`."""
    return _current is _alone


def looked_at() -> bool:
    """Return whether this process, or a process that it forked, has read the assignment since it was set."""
    return _looked[0] == 1


def mark_looked_at() -> None:
    """Mark the assignment as read. For code that learns the worker's number in another way, such as torch's
    get_worker_info()."""
    _looked[0] = 1
