"""The protocol that a restartable loader follows, and what it may ask while it is being saved.

A loader's abilities are counted by its methods: four (`RestartableDataLoader`) resume on any number of workers through
the user's own code, and load nothing but what it made for that; two (`state_dict` and `load_state_dict`) resume on the
same topology; none can only be replayed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.proto.v1 import records_pb2

__all__ = [
    "DataLoaderCheckpoint",
    "RestartableDataLoader",
    "WorkerContext",
    "by_own_methods",
    "get_worker_state",
    "state_methods",
    "takes_strict",
    "worker_state",
]


@runtime_checkable
class RestartableDataLoader(Protocol):
    """A loader whose position can be saved and restored, on any number of workers.

    `strict` is optional, but on both methods that take it or on neither; on one alone it is a TypeError.

    A loader of any kind, or its iterator, may also have `skip_batch()`: pass over the next batch without making it,
    with all that counts and is random moved on as if it had been made; StopIteration if the epoch is over. It is called
    for a batch that kills the process that makes it, where the job asks to leave such ones out
    (Appliance(poison="skip")).

    Three more things it may have, as attributes of its class; none is needed:

    loads_own_state = True: load_state_dict also takes what `state_dict` returned, on the worker that it came from. A
    lost runner is then replaced from a state that was proven, and not by replay from where the launch began.

    exact_states = True: each state leads to just the batches that follow it, over the ends of epochs too, and drawing
    the same random numbers. Nothing is proven then, but once at the beginning of a run.

    advance_state(state_dict, batches): a static method that returns the state so many batches further in the same
    epoch. A state between two snapshots is then had without making a batch; the generators are taken to be unchanged,
    so it is for loaders whose batches do not draw from those of the process. A loader for which that does not hold sets
    its own attribute advance_state to None.
    """

    def state_dict(self) -> Any:
        """This worker's state after the batches it has yielded so far. May call `get_worker_state()` once."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Take on a state that `deaggregate_state_dict` returned."""

    def aggregate_state_dict(self, worker_states: list[Any]) -> Any:
        """One state from those of all workers, in order of global_worker_id."""

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True) -> Any:
        """This worker's state from the aggregated one. Runs on every worker."""


@dataclass(frozen=True)
class DataLoaderCheckpoint:
    """One worker's part of a checkpoint. Field names follow the system that introduced them: a CSX is a box."""

    local_worker_id: int
    """Which worker of its box the loader takes itself for, 0-based: its slot's number, but where the job was resumed
    between two turns of the workers and the slot whose turn it was became worker 0."""
    num_workers_per_csx: int
    num_csx: int
    """Boxes."""
    wse_id: int
    """The worker's box, 0-based."""
    appliance_step: int
    """Batches that the box's training loop was handed in this launch of the job, from 0. A runner that is replaced
    goes on counting; a launch that resumes from a saved state counts from 0 again, but where the loader had to be made
    again from the beginning: then it counts from there, and has been given no state."""
    worker_step: int
    """Batches of this worker in this launch."""
    samples_streamed: int
    """Samples (rows of the first dimension) in those batches. A loader whose state counts all samples adds those of
    the state that it was loaded with."""
    user_state_dict: Any = None
    """What the loader's state_dict() returned."""
    lifetime_appliance_step: int = 0
    """Batches that the box's training loop was handed in all launches: the step of `state_dict()`."""
    lifetime_worker_step: int = 0
    """Batches of this worker in all launches since the numbers of boxes and workers last changed."""
    lifetime_samples_streamed: int = 0
    """Samples in those batches."""

    @property
    def global_worker_id(self) -> int:
        """wse_id * num_workers_per_csx + local_worker_id."""
        return self.wse_id * self.num_workers_per_csx + self.local_worker_id

    @property
    def total_num_workers(self) -> int:
        """num_workers_per_csx * num_csx."""
        return self.num_workers_per_csx * self.num_csx


class WorkerContext:
    """A DataLoaderCheckpoint offered to one state_dict() call; remembers whether it was read."""

    def __init__(self, checkpoint: DataLoaderCheckpoint) -> None:
        self._checkpoint: DataLoaderCheckpoint | None = checkpoint
        self.was_read = False

    def read(self) -> DataLoaderCheckpoint:
        if self._checkpoint is None:
            raise RuntimeError("get_worker_state() was called twice in one state_dict(): keep the value it returned")
        checkpoint, self._checkpoint = self._checkpoint, None
        self.was_read = True
        return checkpoint


_context: ContextVar[WorkerContext | None] = ContextVar("penstock_worker_context", default=None)


@contextmanager
def worker_state(checkpoint: DataLoaderCheckpoint) -> Iterator[WorkerContext]:
    """While open, `get_worker_state()` returns `checkpoint`, once."""
    context = WorkerContext(checkpoint)
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)


def get_worker_state() -> DataLoaderCheckpoint:
    """Which worker is being saved, and at which step. Only inside `state_dict()`, and once in each call.

    Raises:
        RuntimeError: elsewhere, or on a second call.
    """
    context = _context.get()
    if context is None:
        raise RuntimeError("get_worker_state() can only be called inside a loader's state_dict() on a worker")
    return context.read()


_TWO = ("state_dict", "load_state_dict")
_FOUR = (*_TWO, "aggregate_state_dict", "deaggregate_state_dict")


def state_methods(loader: object) -> int:
    """How many of the four methods the loader has, in steps that mean something: 4, 2 or 0."""
    if all(callable(getattr(loader, name, None)) for name in _FOUR):
        return 4
    return 2 if all(callable(getattr(loader, name, None)) for name in _TWO) else 0


def by_own_methods(capabilities: records_pb2.LoaderCapabilities) -> bool:
    """Whether load_state_dict takes only what deaggregate_state_dict returns."""
    return capabilities.state_methods == 4 and not capabilities.loads_own_state


def takes_strict(loader: object) -> bool:
    """Whether load_state_dict (and deaggregate_state_dict, with four methods) take `strict`.

    Raises:
        TypeError: only one of the two does.
    """
    methods = state_methods(loader)
    if methods == 0:
        return False
    names: Sequence[str] = ("load_state_dict", "deaggregate_state_dict") if methods == 4 else ("load_state_dict",)
    found = {name: _has_strict(getattr(loader, name)) for name in names}
    if len(set(found.values())) > 1:
        has = next(name for name, strict in found.items() if strict)
        lacks = next(name for name, strict in found.items() if not strict)
        of = (loader if isinstance(loader, type) else type(loader)).__qualname__
        raise TypeError(f"{of}: {has} takes `strict` and {lacks} does not; give it to both or to neither")
    return all(found.values())


def _has_strict(method: Any) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "strict" or p.kind is p.VAR_KEYWORD for p in parameters)
