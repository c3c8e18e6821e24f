"""Protocol of a restartable loader; and get_worker_state(), for its state_dict().

A loader with four methods (`RestartableDataLoader`) resumes on any number of workers through the user's own code, and
loads only states that this code made; one with `state_dict` and `load_state_dict` on the same numbers of boxes and
workers; one without state methods can only be replayed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from penstock.proto.v1 import records_pb2


@runtime_checkable
class RestartableDataLoader(Protocol):
    """Interface of a loader whose position can be saved, and restored on any number of workers, by these four methods.

    The parameter `strict` is optional: either both methods take it, or neither; otherwise a TypeError is raised.

    Any loader, or its iterator, may also have a method `skip_batch()`, which advances all counters and random
    generators as if the next batch had been made, and raises StopIteration if the epoch is over. Jobs with
    Appliance(poison="skip") call it for a batch that kills the process that makes it.

    The class may have four more attributes:

    loads_own_state = True: load_state_dict also accepts what `state_dict` returned on the same worker. Each epoch then
    has a process of its own, and a lost runner is replaced within the epoch, not by replay from the start of the
    launch.

    exact_states = True: a loader that loads a state then makes exactly the batches that followed it, across epochs too,
    with the same random numbers. One object is then kept over all epochs, and any of its states is used.

    advance_state(state_dict, batches): a static method that returns the state `batches` batches later in the same
    epoch, without making a batch. Use it only if making batches does not change the process's random generators. A
    loader object that changes them must set its attribute advance_state to None.

    repeats(aggregated): a method that returns False if settings that may change at a resume, such as the batch size,
    are others than in this state of `aggregate_state_dict`. A resume then continues from the state, and compares no
    batch with the saved run's. For a loader with exact_states."""

    def state_dict(self) -> Any:
        """Return this worker's state after the batches yielded so far. It may call `get_worker_state()` once."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Load a state that `deaggregate_state_dict` returned."""

    def aggregate_state_dict(self, worker_states: list[Any]) -> Any:
        """Return one state for the checkpoint, made from the states of all workers in order of global_worker_id."""

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True) -> Any:
        """Return this worker's part of the aggregated state, for load_state_dict. Called on every worker."""


@dataclass(frozen=True)
class DataLoaderCheckpoint:
    """Identity, progress and state of one worker, with the names of Cerebras' cstorch (a box: CSX, WSE)."""

    local_worker_id: int
    """Number of the worker in its box, from 0; usually that of its slot. Loaders with the four methods that distribute
    batches in turn begin each launch with worker 0: the slot whose turn it was becomes worker 0. If it was slot 2's of
    4, slots 2, 3, 0 and 1 are workers 0 to 3."""
    num_workers_per_csx: int
    num_csx: int
    """Number of boxes."""
    wse_id: int
    """Number of the worker's box, from 0."""
    appliance_step: int
    """Number of batches delivered to the box's loop in this launch, also by a lost runner before. A launch that resumes
    from a saved state counts from 0 again; if by replay, from the beginning of the run."""
    worker_step: int
    """Number of this worker's batches, counted from the same moment as appliance_step."""
    samples_streamed: int
    """Number of samples (rows of the first dimension) in worker_step's batches. A loader whose state counts over all
    launches adds those of the loaded state."""
    user_state_dict: Any = field(default=None, repr=False)  # of any length
    """State that the loader's state_dict() returned; None in the result of `get_worker_state()`."""
    lifetime_appliance_step: int = 0
    """Number of batches delivered to the box's training loop in all launches: the step of `state_dict()`."""
    lifetime_worker_step: int = 0
    """Number of this worker's batches in all launches since the numbers of boxes and workers last changed."""
    lifetime_samples_streamed: int = 0
    """Number of samples in the batches that lifetime_worker_step counts."""

    @property
    def global_worker_id(self) -> int:
        """Number of the worker among all workers: wse_id * num_workers_per_csx + local_worker_id."""
        return self.wse_id * self.num_workers_per_csx + self.local_worker_id

    @property
    def total_num_workers(self) -> int:
        """Number of workers of all boxes: num_workers_per_csx * num_csx."""
        return self.num_workers_per_csx * self.num_csx


_unread: ContextVar[list[DataLoaderCheckpoint] | None] = ContextVar("penstock_worker_state", default=None)


@contextmanager
def worker_state(checkpoint: DataLoaderCheckpoint) -> Iterator[list[DataLoaderCheckpoint]]:
    """Let `get_worker_state()` return `checkpoint` once inside the block, from the list, which is empty then."""
    unread = [checkpoint]
    token = _unread.set(unread)
    try:
        yield unread
    finally:
        _unread.reset(token)


def get_worker_state() -> DataLoaderCheckpoint:
    """Return identity and progress of the worker whose state is saved. Only inside `state_dict()`, at most once a call.

    Raises:
        RuntimeError: called elsewhere, or a second time.
    """
    unread = _unread.get()
    if unread is None:
        raise RuntimeError("get_worker_state() must be called inside a loader's state_dict() on a worker")
    if not unread:
        raise RuntimeError("get_worker_state() was called twice in a state_dict(): keep the first result")
    return unread.pop()


_TWO = ("state_dict", "load_state_dict")
_FOUR = (*_TWO, "aggregate_state_dict", "deaggregate_state_dict")


def state_methods(loader: object) -> int:
    """Return the number of state methods of a loader: 4, 2 (state_dict and load_state_dict only), or 0."""
    if all(callable(getattr(loader, name, None)) for name in _FOUR):
        return 4
    return 2 if all(callable(getattr(loader, name, None)) for name in _TWO) else 0


def by_own_methods(capabilities: records_pb2.LoaderCapabilities) -> bool:
    """True if the loader loads only results of its own deaggregate_state_dict, not of its state_dict."""
    return capabilities.state_methods == 4 and not capabilities.loads_own_state


def is_pure(capabilities: records_pb2.LoaderCapabilities) -> bool:
    """True if each epoch is a function of its number: no states vouched for, nor only the loader's own four methods."""
    return not (capabilities.exact_states or by_own_methods(capabilities))


def is_vouched(capabilities: records_pb2.LoaderCapabilities) -> bool:
    """True if any state that the loader's state_dict returned is a restart point, also in a later epoch."""
    return capabilities.exact_states and not by_own_methods(capabilities)


def takes_strict(loader: object) -> bool:
    """True if load_state_dict takes `strict`. Raises TypeError if deaggregate_state_dict differs in this."""
    methods = state_methods(loader)
    if methods == 0:
        return False
    names: Sequence[str] = ("load_state_dict", "deaggregate_state_dict") if methods == 4 else ("load_state_dict",)
    taking = [name for name in names if takes(getattr(loader, name), "strict")]
    if 0 < len(taking) < len(names):
        kind = (loader if isinstance(loader, type) else type(loader)).__qualname__
        raise TypeError(f"{kind}: only {taking[0]} takes `strict`; let {' and '.join(names)} both take it, or neither")
    return bool(taking)


def takes(method: Any, argument: str) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)
