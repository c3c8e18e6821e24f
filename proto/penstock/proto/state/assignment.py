"""Assignment of the worker in this process (its number, its box, the run's seed): `current_assignment()`.

A runner sets it before it calls input_fn, and the training job while it builds a local instance of a loader. Elsewhere
it is that of the only worker of the only box, so that an input_fn also works there. It is a module global, because
input_fn may start threads, which would begin with an empty context. A byte of shared memory records whether it was
read, perhaps in a worker process that torch's DataLoader forked: if never, the runner warns, because every worker then
streams the whole data set.

Many loaders divide their samples by the assignment, and once more by torch's get_worker_info(). So reads of fields by
user code are recorded, and get_worker_info() answers by them (`Reads`). Penstock itself reads
`process_assignment()`."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from types import FrameType
from typing import Any

from penstock.proto.errors import InputFnError, InvalidArgumentError


@dataclass(frozen=True)
class Assignment:
    """Number of a worker among all workers of a run, the numbers of boxes and workers, and the run's seed."""

    box: int
    """Number of the box that this worker feeds, in [0, num_boxes)."""
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
    def epoch(self) -> int:
        """Number of the epoch that the worker makes, from 0; 0 inside input_fn. It is set anew before each `iter()` of
        the loader, so read it in `__iter__`, and not in input_fn."""
        global _epoch_was_read
        _epoch_was_read = True
        return _epoch

    @property
    def global_worker_id(self) -> int:
        """Number of this worker in the run, in [0, total_num_workers): box * num_workers_per_box + slot."""
        return self.box * self.num_workers_per_box + self.slot

    @property
    def total_num_workers(self) -> int:
        return self.num_boxes * self.num_workers_per_box


class WorkerInfoAnswer(IntEnum):
    """What torch's get_worker_info() answers to user code. The numbers are those of `WorkerInfo` in records.proto."""

    NOT_ASKED = 0
    OF_RUN = 1
    """Number among the workers of all boxes: user code has read no field that divides samples."""
    OF_BOX = 2
    """Number among the workers of the box: user code has read only the box's number."""
    NONE = 3
    """As in a worker of cstorch: user code has read the worker's number."""


WORKER_INFO_TEXTS: dict[int, str] = {
    WorkerInfoAnswer.OF_RUN: "get_worker_info() gives the worker's number among all workers of the run",
    WorkerInfoAnswer.OF_BOX: "get_worker_info() gives the worker's number in its box, because the loader reads .box",
    WorkerInfoAnswer.NONE: "get_worker_info() returns None to the loader, because the loader reads its worker's number",
}

_OF_BOX = frozenset({"box", "num_boxes"})
_OF_WORKER = frozenset({"slot", "num_workers_per_box", "global_worker_id", "total_num_workers"})
_DIVIDING = _OF_BOX | _OF_WORKER


@dataclass
class Reads:
    """What user code of one worker has read, by which get_worker_info() answers. An answer holds: a field that would
    change it must be read before."""

    fields: set[str] = field(default_factory=set)
    asked: bool = False
    named_at: str = ""
    """Place (file:line) of the first call of get_worker_info() that named the worker."""
    paused: bool = False
    """True while the loader saves or loads a state: its numbers then tell whose the state is, and divide nothing."""

    @property
    def answer(self) -> WorkerInfoAnswer:
        return self.next_answer if self.asked else WorkerInfoAnswer.NOT_ASKED

    @property
    def next_answer(self) -> WorkerInfoAnswer:
        if self.fields & _OF_WORKER:
            return WorkerInfoAnswer.NONE
        return WorkerInfoAnswer.OF_BOX if self.fields else WorkerInfoAnswer.OF_RUN

    def ask(self, caller: FrameType) -> WorkerInfoAnswer:
        answer = self.next_answer
        if not self.paused:
            self.asked = True
            if answer is not WorkerInfoAnswer.NONE:
                self.named_at = self.named_at or _place(caller)
        return answer

    def read(self, name: str, assignment: Assignment, caller: FrameType) -> None:
        """Record a read by user code. Raises InputFnError if it would change an answer of get_worker_info()."""
        if name in self.fields or self.paused:
            return
        of_worker = name in _OF_WORKER
        if self.named_at and (of_worker or not (self.fields or assignment.num_boxes == 1)):
            raise InputFnError(
                f"{_place(caller)} reads .{name} of current_assignment() after get_worker_info(), at {self.named_at}: "
                f"samples divided by both are lost. Read .{name} first, in input_fn, or divide by only one of them"
            )
        self.fields.add(name)


def _place(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename == dataclasses.__file__:
        frame = frame.f_back
    return "unknown" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Watched(Assignment):
    """Assignment for user code that records reads of its fields. To print, compare, hash, copy or pickle is none."""

    def __init__(self, plain: Assignment | None = None, **fields: Any) -> None:
        """Wrap `plain`, or with dataclasses.replace() an assignment with these fields."""
        object.__setattr__(self, "_plain", Assignment(**fields) if plain is None else plain)

    def __getattribute__(self, name: str) -> Any:
        plain = _plain(self)
        if name in _DIVIDING:
            _reads.read(name, plain, sys._getframe(1))
        elif name == "__dict__":
            for each in _DIVIDING:
                _reads.read(each, plain, sys._getframe(1))
            return dict(vars(plain))
        return object.__getattribute__(self, name) if name.startswith("__") else getattr(plain, name)

    def __repr__(self) -> str:
        return repr(_plain(self))

    def __eq__(self, other: object) -> bool:
        return _plain(self) == (_plain(other) if isinstance(other, _Watched) else other)

    def __hash__(self) -> int:
        return hash(_plain(self))

    def __reduce__(self) -> tuple[type[_Watched], tuple[Assignment]]:
        return _Watched, (_plain(self),)


def _plain(watched: _Watched) -> Assignment:
    plain: Assignment = object.__getattribute__(watched, "_plain")
    return plain


_watched = lru_cache(maxsize=64)(_Watched)

NEUTRAL = Assignment(box=0, num_boxes=1, slot=0, num_workers_per_box=1, seed=0, first_step=1)

_current = NEUTRAL
_epoch = 0
_epoch_was_read = False
_alone = replace(NEUTRAL)
"""Assignment of code that must not divide its data (`step_aside`). A copy: NEUTRAL means "outside a run"."""
_looked = mmap.mmap(-1, 1)  # shared with forked children
_reads = Reads()


def current_assignment() -> Assignment:
    """Return the assignment of the worker that runs this code. Outside one: of worker 0 of 1, seed 0.

    To divide data inside input_fn: `data[a.global_worker_id :: a.total_num_workers]` with `a = current_assignment()`.
    torch's get_worker_info() then returns None, so that code which asks for it too does not divide the data again. If
    only `a.box` or `a.num_boxes` is read, it gives the worker's number among the workers of this box."""
    _looked[0] = 1
    return _current if _current is NEUTRAL or _current is _alone else _watched(_current)


def process_assignment() -> Assignment:
    """Return the assignment for code of Penstock: reads do not change the answer of get_worker_info()."""
    _looked[0] = 1
    return _current


def reads() -> Reads:
    return _reads


def get_streaming_batch_size(effective_batch_size: int, global_rank: int | None = None) -> int:
    """Return the batch size that a worker must use so that all boxes together train on `effective_batch_size` rows at
    each step. For 512 rows and 4 boxes: 128 on every worker, however many workers a box has, because each batch of a
    box is made by one worker.

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
        raise TypeError(f"effective_batch_size must be an integer, got {effective_batch_size!r}")
    here = process_assignment()
    if effective_batch_size < here.num_boxes:
        raise InvalidArgumentError(
            f"effective_batch_size must be >= the number of boxes ({here.num_boxes}), got {effective_batch_size}"
        )
    if global_rank is not None and not 0 <= global_rank < here.total_num_workers:
        raise InvalidArgumentError(f"global_rank must be in [0, {here.total_num_workers}), got {global_rank}")
    box = here.box if global_rank is None else global_rank // here.num_workers_per_box
    share, rest = divmod(effective_batch_size, here.num_boxes)
    return share + (box < rest)


def set_assignment(assignment: Assignment) -> None:
    """Set this process's assignment, and mark it as not read. What user code has read still counts for
    get_worker_info(), because the user's modules are imported only once."""
    global _current, _looked, _epoch_was_read
    _current, _epoch_was_read = assignment, False
    _looked = mmap.mmap(-1, 1)  # a new one: the fork server's is shared by all of its children


def set_epoch(epoch: int) -> None:
    global _epoch
    _epoch = epoch


def epoch_was_read() -> bool:
    return _epoch_was_read


@contextmanager
def assigned(assignment: Assignment) -> Iterator[None]:
    """Set an assignment inside a block, and restore the previous one, and its mark, after it."""
    global _current, _looked, _reads
    before = _current, _looked, _reads
    set_assignment(assignment)
    _reads = Reads()
    try:
        yield
    finally:
        _current, _looked, _reads = before


Seat = tuple[Assignment, mmap.mmap, Reads]
"""Assignment of one of several workers in a process, the shared byte that records whether it was read, and what was."""


def exchange(seat: Seat | None) -> Seat:
    """Set the assignment of another worker, for a process that runs several in turn. `seat`: from an earlier call;
    None: the worker has none yet. Return the previous worker's."""
    global _current, _looked, _reads
    before = _current, _looked, _reads
    _current, _looked, _reads = seat if seat is not None else (NEUTRAL, mmap.mmap(-1, 1), Reads())
    return before


def step_aside() -> Assignment:
    """Let this process appear as the only worker, until `step_back`, so that code does not divide its data. Return the
    real assignment. Its mark that it was read does not change."""
    global _current, _alone
    before = _current
    if (_alone.seed, _alone.first_step) != (before.seed, before.first_step):
        _alone = replace(NEUTRAL, seed=before.seed, first_step=before.first_step)
    _current = _alone
    return before


def step_back(assignment: Assignment) -> None:
    global _current
    _current = assignment


def stands_aside() -> bool:
    return _current is _alone


def looked_at() -> bool:
    """True if this process, or one that it forked, has read the assignment since it was set."""
    return _looked[0] == 1


def mark_address() -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(_looked))
