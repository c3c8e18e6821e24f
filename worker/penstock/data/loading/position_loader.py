"""A loader of samples whose order is a function from position to sample: all that does not depend on where they lie.

The order (ordering/order.py, unsharded_order.py) says which sample is where, ordering/course.py which batches an epoch
has, and Here which of them this process makes. So the position is a few integers, and a state of them is good for any
shape. What a loader of its own adds is how the samples of a batch are read.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, get_args

import numpy as np
import torch.utils.data

from penstock.data.arguments import one_of, whole
from penstock.data.loading.restore_keys import PositionKeys, checked_name, with_keys
from penstock.data.loading.worker_identity import WorkerIdentity
from penstock.data.ordering.epoch_plan import BatchPlan, EpochPlan, EpochRemainder, SampleOrder, WorkerBatches
from penstock.data.ordering.order_states import (
    OrderProgress,
    Topology,
    aggregated,
    check_order,
    deaggregated,
    progress_of,
    replanned,
    skip_of,
    state_of,
)
from penstock.data.ordering.partition import Tail
from penstock.data.ordering.skips import ranges_of
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateMismatchError

__all__ = ["Fetcher", "PositionLoader", "check_settings"]


class Fetcher(Protocol):
    """Makes the batches of a walk, ahead of need."""

    def take(self, done: int) -> Any:
        """The batch behind so many, which is there. It is always the next one, but after an error, where it may be the
        same."""

    def close(self) -> None:
        """Stop working ahead; `take` begins anew."""


class PositionLoader(torch.utils.data.IterableDataset[Any], ABC):
    """Batches in an order that does not depend on who makes them. An epoch is an epoch, or what is left of it."""

    loads_own_state = True
    exact_states = True

    def __init__(
        self,
        name: str,
        order: SampleOrder,
        described: dict[str, Any],
        *,
        identity: WorkerIdentity,
        batch: int,
        tail: Tail,
        skip: Iterable[range],
        keys: str | None,
    ) -> None:
        """
        Args:
            name: of the data, for messages.
            described: all that decides the order; a state is good where it is the same.
            batch: rows of all boxes' batches together.
        """
        super().__init__()
        self._name, self._order, self._described, self._identity, self._batch = name, order, described, identity, batch
        self._epochs = EpochPlan(len(order), tail, ranges_of(skip))
        self._keys, self._key_field = PositionKeys.of(described, len(order)), checked_name(keys)
        self._epoch = self._start = self._done = self._first = 0
        self._partitioned_for = self._topology()
        """Who shares the batches of which so many are done."""
        self._stands = True
        """The next epoch begins where the loader stands; else in the next epoch."""
        self._counted = 0, 0
        """(epoch, start) from where `state_after` counts."""
        self._epochs_begun = 0
        """Begun so far, or made void by going elsewhere: an iterator of an earlier one yields nothing more."""
        if EpochPlan(len(order), tail).remainder(0, 0, batch, identity.boxes).batches == 0:
            raise DatasetError(
                f"{name}: {len(order)} samples make no batch of {batch} with tail={tail!r}; use a smaller batch, or "
                "another tail"
            )
        self._epoch, self._start = self._worker_batches().remainder.place(0)
        self._count_from_here()

    # ---- what a loader adds

    @abstractmethod
    def _read(self, plan: BatchPlan) -> list[Any]:
        """The samples of a plan."""

    @abstractmethod
    def _made(self, plan: BatchPlan) -> Any:
        """The batch of a plan."""

    def _planned(self, batches_of_worker: WorkerBatches, plans: list[BatchPlan]) -> None:
        """Told which batches come next."""

    def _fetcher(self, batches_of_worker: WorkerBatches) -> Fetcher | None:
        """Of an epoch that begins, if batches are made ahead of need."""
        return None

    # ---- passes

    def __len__(self) -> int:
        """Batches of a whole epoch that this process makes. With tail="carry" epochs differ by one; then it is the
        present one."""
        begin = self._epochs.begin(self._epoch, self._batch, (self._epoch, self._start))
        return self._identity.turn().done(
            self._epochs.remainder(self._epoch, begin, self._batch, self._identity.boxes).batches
        )

    def __iter__(self) -> Iterator[Any]:
        """The next epoch, or the rest of the one that a loaded state is in."""
        self._deal_anew()
        batches_of_worker = self._worker_batches()
        # Of an epoch of which nothing is left, and not of one that never had a batch.
        ended = (
            (self._done > 0 or self._start > 0)
            and batches_of_worker.ended(self._done)
            and self._identity.alone(batches_of_worker.turn)
        )
        if not self._stands or ended:
            self._go(*batches_of_worker.remainder.following())
        self._stands = False
        self._epochs_begun += 1
        self._count_from_here()
        return _Epoch(self, self._worker_batches())

    def set_epoch(self, epoch: int) -> None:
        """The next epoch is this epoch, from its beginning; or from where a loaded state stands in it."""
        epoch = whole("epoch", epoch)
        if epoch < 0:
            raise InvalidArgumentError(f"epoch={epoch}: the first one is 0")
        if not self._stands or epoch != self._epoch:
            self._go(epoch, self._epochs.begin(epoch, self._batch, (self._epoch, self._start)))
        self._count_from_here()

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """This worker's place, after the batches that it has yielded so far."""
        progress = OrderProgress(self._epoch, self._start, self._done, self._topology(), self._first)
        return state_of(progress, self._described, self._epochs.skip)

    @staticmethod
    def advance_state(state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        """A worker's state after so many more of its batches of the same epoch. For a step between two snapshots, whose
        state is a number: nothing is read again for it, and none of the user's code runs."""
        return {**state_dict, "done": progress_of(state_dict).done + batches}

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A class that says another state than this one's must say itself how to go on from it."""
        super().__init_subclass__(**keywords)
        if "state_dict" in vars(cls) and "advance_state" not in vars(cls):
            cls.advance_state = None  # type: ignore[assignment]

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Go to a place of this order: a state of this very topology, or one that fits any, as does that of a box's
        only worker.

        Raises:
            StateMismatchError: it is a place in another order, or of one of several workers of another topology; or
            more
                samples before it are to be left out than were.
            StateCorruptError, StateVersionError: it cannot be read.
        """
        progress, topology = progress_of(state_dict), self._topology()
        check_order(state_dict, self._described, self._epochs, strict=strict)
        if "others" in state_dict:
            progress = self._part(state_dict, strict=strict)
        elif progress.done and progress.topology != topology:
            if progress.topology.workers > 1:
                raise StateMismatchError(
                    f"{self._name}: the state is one worker's of {progress.topology}, and this is one of {topology}; "
                    "a state of aggregate_state_dict or state_after fits any topology"
                )
            progress = self._part(state_dict, strict=strict)  # what it has done each box has
        elif skip_of(state_dict) != self._epochs.skip:
            if progress.done and topology.workers > 1:
                raise StateMismatchError(
                    f"{self._name}: the state is one worker's of {topology}, and skip was {skip_of(state_dict)} and is "
                    f"{self._epochs.skip}; a state of aggregate_state_dict or state_after fits any"
                )
            start = replanned(state_dict, self._epochs, progress.done, strict=strict)
            progress = OrderProgress(progress.epoch, start, 0, topology, progress.first)
        self._go(progress.epoch, progress.start, progress.done, progress.first)
        self._count_from_here()

    def aggregate_state_dict(self, worker_states: list[Any]) -> dict[str, Any]:
        """One state from those of all workers, in order of global_worker_id; it fits any topology."""
        return aggregated(worker_states, self._described, self._epochs)

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True) -> dict[str, Any]:
        """This worker's part of what `aggregate_state_dict` or `state_after` gave."""
        place = progress_of(aggregated)
        if "others" not in aggregated and place.done and place.topology.workers > 1:
            raise StateMismatchError(
                "this is the state of one worker; deaggregate_state_dict takes what aggregate_state_dict returned"
            )
        check_order(aggregated, self._described, self._epochs, strict=strict)
        return state_of(self._part(aggregated, strict=strict), self._described, self._epochs.skip)

    def state_after(self, batches: int) -> dict[str, Any]:
        """The state after so many of the rank's batches of this epoch, or of the one that just ended, whoever made
        them: worker processes of a torch DataLoader alone know how far they are, but a place is only a number. It fits
        any shape."""
        batches = whole("batches", batches)
        if batches < 0:
            raise InvalidArgumentError(f"batches={batches}: it must be at least 0")
        epoch, start = self._remainder(*self._counted).place(batches)
        return state_of(OrderProgress(epoch, start, 0, self._topology()), self._described, self._epochs.skip)

    def config(self) -> dict[str, Any]:
        """What decides which sample is where in the order, as values of JSON: a state with another one is refused."""
        return {"kind": type(self).__name__, **copy.deepcopy(self._described)}

    def can_restore_sample(self) -> bool:
        """Any sample can be had again by its key."""
        return True

    def restore_sample(self, key: str) -> Any:
        """The sample that a restore key (see `keys`) names, read again.

        Raises InvalidArgumentError for what is no key, StateMismatchError for one of other data or settings.
        """
        epoch, position = self._keys.place(key)
        positions = np.array([position])
        return self._read(BatchPlan(epoch, positions, self._order.ids(epoch, positions)))[0]

    def _part(self, aggregated: Any, *, strict: bool) -> OrderProgress:
        identity = self._identity
        return deaggregated(
            aggregated, identity.number, identity.all_workers, self._topology(), self._epochs, strict=strict
        )

    def _go(self, epoch: int, start: int = 0, done: int = 0, first: int = 0) -> None:
        self._epochs_begun += 1
        self._epoch, self._start, self._done, self._first, self._stands = epoch, start, done, first, True
        self._partitioned_for = self._topology()

    def _count_from_here(self) -> None:
        # Of a worker among several it is not known what the others have done.
        done = self._done if self._partitioned_for.workers == 1 else 0
        self._counted = self._remainder(self._epoch, self._start).place(done)

    def _deal_anew(self) -> None:
        """Worker processes of a torch DataLoader have a copy of a loader that was made, and maybe loaded, outside of
        them: by one that shares its batches with fewer."""
        topology = self._topology()
        if not self._done or self._partitioned_for == topology:
            self._partitioned_for = topology  # from here on; with persistent_workers=True the copies count their passes
            return
        if self._partitioned_for.workers > 1:
            raise StateMismatchError(
                f"{self._name}: the loader stands at a place of {self._partitioned_for}, and is read by {topology}: load "
                "the state in the processes that read (torchdata's StatefulDataLoader does), or one of state_after"
            )
        self._go(*self._worker_batches().remainder.place(self._done))

    # ---- who makes what

    def _topology(self) -> Topology:
        return Topology(self._identity.boxes, self._identity.turn().of, self._batch)

    def _worker_batches(self) -> WorkerBatches:
        """Of the epoch that the loader stands in."""
        remainder = self._remainder(self._epoch, self._start)
        return WorkerBatches(remainder, self._order, self._identity.turn(self._first), self._identity.box)

    def _remainder(self, epoch: int, start: int) -> EpochRemainder:
        return self._epochs.remainder(epoch, start, self._batch, self._identity.boxes)


class _Epoch:
    """The iterator of an epoch; moves its loader's place on."""

    def __init__(self, loader: PositionLoader, batches_of_worker: WorkerBatches) -> None:
        self._loader, self._worker_batches, self._number = loader, batches_of_worker, loader._epochs_begun
        self._fetcher = loader._fetcher(batches_of_worker)
        self._ready: list[BatchPlan] = []
        """Of the next batches, the last one first."""

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        loader, plan = self._loader, self._plan()
        batch = loader._made(plan) if self._fetcher is None else self._fetcher.take(loader._done)
        if loader._key_field is not None:
            rows = range(0 if plan.empty else len(plan.ids))
            places = [plan.place(row, loader._epochs.length) for row in rows]
            try:
                batch = with_keys(batch, loader._key_field, [loader._keys.key(*place) for place in places])
            except BaseException:
                self._close()  # the fetcher has moved on, and we have not: it begins here again
                raise
        self._move_on()
        return batch

    def skip_batch(self) -> None:
        """Pass over the next batch without making it."""
        self._plan()
        if self._fetcher is not None:
            self._fetcher.close()
        self._move_on()

    def _move_on(self) -> None:
        self._ready.pop()
        self._loader._done += 1

    def _plan(self) -> BatchPlan:
        """Of the next batch. Raises StopIteration behind the last one."""
        loader = self._loader
        if self._number != loader._epochs_begun:
            self._close()
            raise StopIteration
        if not self._ready:
            self._ready = self._worker_batches.plans(loader._done)
            if not self._ready:
                self._close()
                if loader._identity.alone(self._worker_batches.turn):
                    loader._go(*self._worker_batches.remainder.following())
                raise StopIteration
            loader._planned(self._worker_batches, self._ready)
            self._ready.reverse()
        return self._ready[-1]

    def _close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()


def check_settings(tail: str, **numbers: int | None) -> None:
    one_of("tail", tail, get_args(Tail))
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name}={value}: it must be at least 1")
