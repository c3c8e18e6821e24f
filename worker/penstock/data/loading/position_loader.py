"""Base class of loaders that can compute which sample is at a position of the order, for any kind of storage.

The order (ordering/sharded_order.py, unsharded_order.py) maps positions to samples. The epoch plan
(ordering/epoch_plan.py) divides an epoch into batches, and WorkerBatches selects the batches that this process makes.
So a position is a few integers, and a state with these integers can be resumed on any topology (numbers of boxes and
workers; a box is one data-parallel rank). Subclasses define how the samples of a batch are read.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, get_args

import numpy as np
import torch.utils.data

from penstock.data.arguments import at_least_one, one_of, whole
from penstock.data.loading.counting import LoaderCounts, skipped_rows
from penstock.data.loading.map_reading import MapReader
from penstock.data.loading.restore_keys import PositionKeys, checked_name, with_keys
from penstock.data.loading.worker_identity import WorkerIdentity
from penstock.data.ordering.balance import Balance, Balanced, Imbalance
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
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.skips import ranges_of
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateMismatchError
from penstock.proto.state.counts import Group, Row, Tally, merged_rows, note_imbalance

__all__ = ["Fetcher", "PositionLoader", "balanced_order", "check_settings"]


COUNTED_AT_ONCE = 1 << 16
"""Largest number of skipped samples for which the dataset is asked for their sources in one call."""


class Fetcher(Protocol):
    """Interface of an object that makes a worker's batches before they are needed."""

    def take(self, done: int) -> Any:
        """Return batch number `done`, from 0, of the batches that the worker makes in this epoch. The batch must exist.
        The caller increases `done` by one at each call, but repeats it after an error."""

    def close(self) -> None:
        """Stop making batches. The next call of `take` starts again."""


class PositionLoader(torch.utils.data.IterableDataset[Any], ABC):
    """Loader of batches in an order that does not depend on the numbers of boxes and workers. One iteration is one
    epoch, or the rest of an epoch after a loaded state."""

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
        counts: LoaderCounts,
        balance: Balanced | None = None,
    ) -> None:
        """Store the settings, and go to the beginning of epoch 0, or if `skip` leaves out all of it, of the first epoch
        that has a batch.

        Args:
            name: name of the data, for messages.
            order: order of the samples.
            described: all settings that decide the order, by name. load_state_dict refuses a state with other settings.
            identity: number of this process's box, and of this process among the workers.
            batch: number of rows of all boxes' batches together.
            tail: treatment of an incomplete last batch, as in MapLoader.
            skip: ranges of samples to leave out, as in MapLoader.
            keys: name of the field for restore keys; None: batches have no restore keys.
            counts: counts of the samples. If the loader counts, its reader and fetchers return a CountedBatch.
            balance: assignment of rows to boxes by cost, see Balanced; None: rows are assigned to the boxes round
                robin.
        """
        super().__init__()
        self._name, self._order, self._described, self._identity, self._batch = name, order, described, identity, batch
        self._epochs = EpochPlan(len(order), tail, ranges_of(skip))
        self._balance = balance
        self._keys, self._key_field = PositionKeys.of(described, len(order)), checked_name(keys)
        self._counts = counts
        self.draws_nothing = self._reader.draws_nothing and type(self).__module__.startswith("penstock.data.")
        """True if batches do not depend on the process's random generators, so that states need not hold these. Not
        known of a user's subclass."""
        if counts.tally is not None or not self.draws_nothing:
            # to count needs the samples, and an advanced state lacks the generators' states
            self.advance_state = None  # type: ignore[method-assign, assignment]
        self._last: tuple[EpochRemainder, int] | None = None
        """Batch that was returned or skipped last, as a pair (EpochRemainder with the batch, number of the batch in
        it); None before the first batch."""
        self._epoch = self._start = self._done = self._first = 0
        self._partitioned_for = self._topology()
        """Topology (numbers of boxes and workers) for which `_done` counts this worker's batches."""
        self._at_position = True
        """True if the next iteration begins at the present position; False if at the next epoch's beginning."""
        self._epoch_is_set = False
        """True if `set_epoch` was called since the last iteration began. The next iteration is then over that epoch,
        even if the epoch has no batch left."""
        self._counted = 0, 0
        """Position from which `state_after` counts batches: (epoch, number of samples before it in the epoch)."""
        self._epochs_begun = 0
        """Number that grows when an iteration begins, and when `load_state_dict` or `set_epoch` changes the position.
        An iterator ends if it has changed since the iterator was made."""
        if EpochPlan(len(order), tail).remainder(0, 0, batch, identity.boxes).batches == 0:
            raise DatasetError(
                f"{name}: a global batch must have at most {len(order)} rows, the samples of an epoch, with "
                f"tail={tail!r}, got {batch}. Use a smaller batch or another tail"
            )
        self._epoch, self._start = self._worker_batches().remainder.position_after(0)
        self._count_from_here()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} over {self._name}: {len(self._order)} samples, {self._batch} in a global batch, "
            f"epoch {self._epoch}, {self._done} batches done>"
        )

    # ---- methods of subclasses

    @abstractmethod
    def _read_samples(self, plan: BatchPlan) -> list[Any]:
        """Return the samples of a batch. `plan`: says which samples these are."""

    _reader: MapReader
    """Reader that makes the batches; a subclass sets it."""

    def _prefetch(self, own_batches: WorkerBatches, plans: list[BatchPlan]) -> None:
        """Prepare to prefetch data for the next batches. Called from time to time; the default does nothing.
        `own_batches`: this worker's batches of the epoch; `plans`: plans of the next of them."""

    def _approach(self, plan: BatchPlan) -> None:
        """Prefetch the data that will be needed soon. Called before each batch, with its plan; the default does
        nothing."""

    def _fetcher(self, own_batches: WorkerBatches) -> Fetcher | None:
        """Return the Fetcher for a new epoch; None if each batch is made only when it is needed. `own_batches`: this
        worker's batches of the epoch."""
        return None

    # ---- cost

    def imbalance(self, steps: int = 100) -> Imbalance:
        """Return how unequal the costs of the boxes are, without balance and with it, as a mean over the first `steps`
        steps of the present epoch. No sample is read. Raise InvalidArgumentError for a loader without `balance`."""
        if self._balance is None:
            raise InvalidArgumentError(
                f"{self._name}: imbalance() needs the costs of samples. Pass balance=Balance(cost, report=True) to the "
                "loader"
            )
        return self._balance.imbalance(self._remainder(self._epoch, 0), at_least_one("steps", steps))

    # ---- epochs

    def __len__(self) -> int:
        """Return the number of batches that this process makes in a whole epoch. With tail="carry" epochs differ by up
        to one batch; the number is that of the present epoch."""
        begin = self._epochs.begin(self._epoch, self._batch, (self._epoch, self._start))
        return self._identity.turn().done(
            self._epochs.remainder(self._epoch, begin, self._batch, self._identity.boxes).batches
        )

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, or over the rest of the epoch in which a loaded state lies."""
        self._repartition()
        own_batches = self._worker_batches()
        # Skip an epoch that has no batch left, but not an epoch that never had a batch.
        ended = (
            (self._done > 0 or self._start > 0)
            and own_batches.ended(self._done)
            and self._identity.alone(own_batches.turn)
            and not self._epoch_is_set
        )
        self._epoch_is_set = False
        if not self._at_position or ended:
            self._move_to(*own_batches.remainder.following())
        self._at_position = False
        self._epochs_begun += 1
        self._count_from_here()
        return _Epoch(self, self._worker_batches())

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. The next iteration starts at that epoch's beginning; or, if a state in this
        epoch was loaded, at that state's position. If that position is the epoch's end, the iteration has no batch."""
        epoch = whole("epoch", epoch)
        if epoch < 0:
            raise InvalidArgumentError(f"epoch must be at least 0, got {epoch}. Count epochs from 0")
        if not self._at_position or epoch != self._epoch:
            self._move_to(epoch, self._epochs.begin(epoch, self._batch, (self._epoch, self._start)))
        self._epoch_is_set = True
        self._count_from_here()

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's position after the batches that it has yielded so far."""
        progress = OrderProgress(self._epoch, self._start, self._done, self._topology(), self._first)
        return {**state_of(progress, self._described, self._epochs.skip), **self._counts.saved()}

    @staticmethod
    def advance_state(state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        """Return the state that a worker will have after `batches` more of its batches in the same epoch. It is
        computed from `state_dict`, without reading data or running user code."""
        return {**state_dict, "done": progress_of(state_dict).done + batches}

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set `advance_state` to None in a subclass that overrides `state_dict` but not `advance_state`, because the
        inherited function does not know the subclass's states. None means that states cannot be advanced."""
        super().__init_subclass__(**keywords)
        if "state_dict" in vars(cls) and "advance_state" not in vars(cls):
            cls.advance_state = None  # type: ignore[assignment]

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Go to the position of a state. A state from aggregate_state_dict or state_after, or from a box with a single
        worker, fits any topology. Any other state, unless it was saved before the first batch, fits only the numbers of
        boxes and workers, the global batch and the `skip` with which it was saved.

        Raises:
            StateMismatchError: the state belongs to another order of samples; or it is the state of one of several
                workers, with another topology or `skip`; or `skip` leaves out more samples before the position than
                when the state was saved; or its counts are by another key. With strict=False the first and the
                third are only warnings, and the counts begin at zero.
            StateCorruptError, StateVersionError: the state cannot be read.
        """
        progress, topology = progress_of(state_dict), self._topology()
        check_order(state_dict, self._described, self._epochs, strict=strict)
        counts: Mapping[str, Any] = state_dict
        if "others" in state_dict or (progress.done and progress.topology != topology):
            counts = {**state_dict, **self._counts_part(state_dict)}
        if "others" in state_dict:
            progress = self._part(state_dict, strict=strict)
        elif progress.done and progress.topology != topology:
            if progress.topology.workers > 1:
                raise StateMismatchError(
                    f"{self._name}: the state of one of several workers must be loaded in its own topology, "
                    f"{progress.topology}, got {topology}. Load a state that aggregate_state_dict or state_after "
                    "returned, which fits any topology"
                )
            progress = self._part(state_dict, strict=strict)  # all boxes have delivered equally many batches
        elif skip_of(state_dict) != self._epochs.skip:
            if progress.done and topology.workers > 1:
                raise StateMismatchError(
                    f"{self._name}: the state of one of several workers must be loaded with the same skip, "
                    f"{skip_of(state_dict)}, got {self._epochs.skip}. Load a state that aggregate_state_dict or "
                    "state_after returned, which fits any skip"
                )
            start = replanned(state_dict, self._epochs, progress.done, strict=strict)
            progress = OrderProgress(progress.epoch, start, 0, topology, progress.first)
        self._counts.load(counts, strict=strict)
        self._move_to(progress.epoch, progress.start, progress.done, progress.first)
        self._count_from_here()

    def aggregate_state_dict(self, worker_states: list[Any]) -> dict[str, Any]:
        """Merge the states of all workers, in order of global_worker_id, into one state that fits any topology."""
        whole = aggregated(worker_states, self._described, self._epochs)
        return {**whole, **LoaderCounts.aggregated(worker_states)}

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True) -> dict[str, Any]:
        """Return this worker's part of a state that `aggregate_state_dict` or `state_after` returned."""
        progress = progress_of(aggregated)
        if "others" not in aggregated and progress.done and progress.topology.workers > 1:
            raise StateMismatchError(
                "deaggregate_state_dict needs a state that aggregate_state_dict returned, got the state of one "
                "worker. Merge the states of all workers first"
            )
        check_order(aggregated, self._described, self._epochs, strict=strict)
        part = state_of(self._part(aggregated, strict=strict), self._described, self._epochs.skip)
        return {**part, **self._counts_part(aggregated)}

    def state_after(self, batches: int) -> dict[str, Any]:
        """Return the state after `batches` more batches of this rank. They are counted from the position at which the
        latest iteration began; or from the position that `load_state_dict` or `set_epoch` set, if that was later. The
        state fits any topology. Use this method with torch's DataLoader, whose worker processes make and count the
        batches in copies of this loader."""
        batches = whole("batches", batches)
        if batches < 0:
            raise InvalidArgumentError(f"batches must be at least 0, got {batches}. Pass the number of batches done")
        epoch, start = self._remainder(*self._counted).position_after(batches)
        return state_of(OrderProgress(epoch, start, 0, self._topology()), self._described, self._epochs.skip)

    def config(self) -> dict[str, Any]:
        """Return the settings that decide the order of samples, as a dict of JSON values. A state with different
        settings is refused."""
        return {"kind": type(self).__name__, **copy.deepcopy(self._described)}

    def can_restore_sample(self) -> bool:
        """Return True: `restore_sample` can read any sample again."""
        return True

    def restore_sample(self, key: str) -> Any:
        """Read the sample of one row of an earlier batch again. `key`: the row's text in the field that the loader's
        argument `keys` names.

        Raises InvalidArgumentError for an invalid key, StateMismatchError for a key of other data or settings.
        """
        epoch, position = self._keys.position_of(key)
        positions = np.array([position])
        return self._read_samples(BatchPlan(epoch, positions, self._order.ids(epoch, positions)))[0]

    def _part(self, aggregated: Any, *, strict: bool) -> OrderProgress:
        identity = self._identity
        return deaggregated(
            aggregated, identity.number, identity.all_workers, self._topology(), self._epochs, strict=strict
        )

    def _counts_part(self, aggregated: Any) -> dict[str, Any]:
        identity = self._identity
        return self._counts.part(aggregated, identity.box, identity.boxes, identity.turn().number)

    # ---- counts

    @property
    def tally(self) -> Tally | None:
        """Counts of the samples up to the present position, by source and key; None without `counts`."""
        return self._counts.tally

    @property
    def key_field(self) -> str | None:
        """Name of the field of a batch that holds its restore keys; None without `keys`."""
        return self._key_field

    def last_samples(self) -> list[range]:
        """Return the samples of the global batch that was returned or skipped last, as ranges that `skip` accepts; an
        empty list before the first batch."""
        if self._last is None:
            return []
        remainder, number = self._last
        begin = remainder.epoch * self._epochs.length
        return [range(first + begin, end + begin) for first, end in remainder.kept_ranges(number)]

    def _sources_of(self, numbers: Ints) -> Sequence[str] | None:
        """Return the name of the source of each sample with these numbers; None if the sources are unknown."""
        return None

    def _skipped(self, remainder: EpochRemainder, number: int) -> dict[str, int]:
        """Return the number of samples, by source, that `skip` leaves out from the end of batch `number` - 1 to the end
        of batch `number`. On boxes other than 0 return an empty dict, so that these samples are counted once."""
        if not self._epochs.skip or self._identity.box:
            return {}
        found: Counter[str] = Counter()
        for first, end in remainder.skipped_ranges(number):
            for begin in range(first, end, COUNTED_AT_ONCE):
                positions = np.arange(begin, min(end, begin + COUNTED_AT_ONCE))
                sources = self._sources_of(self._order.ids(remainder.epoch, positions))
                found.update(sources if sources is not None else {"": len(positions)})
        return found

    def _move_to(self, epoch: int, start: int = 0, done: int = 0, first: int = 0) -> None:
        self._epochs_begun += 1
        self._epoch, self._start, self._done, self._first, self._at_position = epoch, start, done, first, True
        self._partitioned_for = self._topology()

    def _count_from_here(self) -> None:
        # With several workers, the progress of the others is unknown.
        done = self._done if self._partitioned_for.workers == 1 else 0
        self._counted = self._remainder(self._epoch, self._start).position_after(done)

    def _repartition(self) -> None:
        """Adapt this loader's position to the processes that share the batches now. A worker process of a torch
        DataLoader has a copy of a loader that was made, and perhaps loaded a state, in the parent process. There the
        position was that of a single process, which makes all batches."""
        topology = self._topology()
        if not self._done or self._partitioned_for == topology:
            # the topology stays fixed: with persistent_workers=True each copy counts its own epochs
            self._partitioned_for = topology
            return
        if self._partitioned_for.workers > 1:
            raise StateMismatchError(
                f"{self._name}: the loader must be read in the topology for which its state was loaded, "
                f"{self._partitioned_for}, got {topology}. Load the state in the processes that read (torchdata's "
                "StatefulDataLoader does), or load a state from this loader's state_after(batches)"
            )
        self._move_to(*self._worker_batches().remainder.position_after(self._done))

    # ---- division among processes

    def _topology(self) -> Topology:
        return Topology(self._identity.boxes, self._identity.turn().of, self._batch)

    def _worker_batches(self) -> WorkerBatches:
        """Return the batches that this process makes in the present epoch."""
        remainder = self._remainder(self._epoch, self._start)
        balance = self._balance
        # a balance that only reports is measured for the counts
        assign = balance.assign if balance and (balance.assigns or self._counts.tally is not None) else None
        return WorkerBatches(remainder, self._order, self._identity.turn(self._first), self._identity.box, assign)

    def _remainder(self, epoch: int, start: int) -> EpochRemainder:
        return self._epochs.remainder(epoch, start, self._batch, self._identity.boxes)


class _Epoch:
    """Iterator over the batches of one epoch. Each batch advances the position of its loader."""

    def __init__(self, loader: PositionLoader, own_batches: WorkerBatches) -> None:
        self._loader, self._worker_batches, self._number = loader, own_batches, loader._epochs_begun
        self._fetcher = loader._fetcher(own_batches)
        self._ahead = loader._reader.columns_ahead()
        self._ready: list[BatchPlan] = []
        """Plans of the next batches, the next one last."""

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        loader, plan = self._loader, self._plan()
        batch = (
            loader._reader.batch(plan, self._ahead, self._ready)
            if self._fetcher is None
            else self._fetcher.take(loader._done)
        )
        counted = None
        if loader._counts.tally is not None:
            batch, counted = batch
        if loader._key_field is not None:
            rows = range(0 if plan.empty else len(plan.ids))
            positions = [plan.position_of(row, loader._epochs.length) for row in rows]
            try:
                batch = with_keys(batch, loader._key_field, [loader._keys.key(*progress) for progress in positions])
            except BaseException:
                # the fetcher has advanced but the loader has not, so restart the fetcher from the loader's position
                self._close()
                raise
        if counted is not None:
            self._count(counted)
        self._move_on()
        return batch

    def skip_batch(self) -> None:
        """Advance the position by one batch, without making that batch."""
        plan = self._plan()
        if self._fetcher is not None:
            self._fetcher.close()
        if self._loader._counts.tally is not None:
            sources = self._loader._sources_of(plan.ids)
            rows = 0 if plan.empty else len(plan.ids)
            self._count(skipped_rows(Counter(sources if rows and sources is not None else {"": rows})))
        self._move_on()

    def _count(self, counted: dict[Group, Row]) -> None:
        """Add the counts of a batch that is returned or skipped, and of the samples that `skip` leaves out since the
        batch before. `counted`: row of counts of each group in the batch."""
        loader, remainder, imbalance = self._loader, self._worker_batches.remainder, self._ready[-1].imbalance
        if imbalance is not None and counted:
            note_imbalance(counted, imbalance)
        skipped = loader._skipped(remainder, self._worker_batches.turn.batch(loader._done))
        loader._counts.handed_out(merged_rows([counted, skipped_rows(skipped)]) if skipped else counted)

    def _move_on(self) -> None:
        self._ready.pop()
        self._loader._last = self._worker_batches.remainder, self._worker_batches.turn.batch(self._loader._done)
        self._loader._done += 1

    def _plan(self) -> BatchPlan:
        """Return the plan of the next batch. Raise StopIteration after the last batch."""
        loader = self._loader
        if self._number != loader._epochs_begun:
            self._close()
            raise StopIteration
        if not self._ready:
            self._ready = self._worker_batches.plans(loader._done)
            if not self._ready:
                self._close()
                if loader._identity.alone(self._worker_batches.turn):
                    loader._move_to(*self._worker_batches.remainder.following())
                raise StopIteration
            loader._prefetch(self._worker_batches, self._ready)
            self._ready.reverse()
        loader._approach(self._ready[-1])
        return self._ready[-1]

    def _close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()


def balanced_order(
    balance: Balance | None, order: SampleOrder, dataset: Any, length: int, batch: int, described: dict[str, Any]
) -> Balanced | None:
    """Return the object that assigns a loader's rows to boxes by cost; None without `balance`.

    Args:
        balance: user's argument.
        order: order of the samples without balance.
        dataset: dataset, for costs that it contains.
        length: number of samples in the dataset.
        batch: number of rows of all boxes' batches together.
        described: settings that decide the loader's order. The balance is added, if it changes which step has a row.

    Raises InvalidArgumentError or DatasetError for invalid costs or steps.
    """
    if balance is None:
        return None
    found = Balanced(balance, order, dataset, length, batch)
    if found.described:
        described["balance"] = found.described
    return found


def check_settings(tail: str, **numbers: int | None) -> None:
    one_of("tail", tail, get_args(Tail))
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name} must be at least 1, got {value}. Pass a larger number")
