"""Base class of loaders that can compute which sample is at a position. The order (ordering/) maps positions to
samples, the epoch plan divides an epoch into batches, WorkerBatches selects this process's; subclasses read the
samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import numpy as np

from penstock.data.arguments import one_of, whole
from penstock.data.loading.counting import LoaderCounts, skipped_rows
from penstock.data.loading.fetching import ReadAhead
from penstock.data.loading.loader import Loader
from penstock.data.loading.map_reading import MapReader
from penstock.data.loading.restore_keys import PositionKeys, with_keys
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
from penstock.data.ordering.skips import ranges_of
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateMismatchError
from penstock.proto.state.counts import Group, Row, merged_rows, note_imbalance

COUNTED_AT_ONCE = 1 << 16
"""Skipped samples whose sources are asked for in one call."""


class PositionLoader(Loader):
    _balance: Balanced | None

    def __init__(
        self,
        name: str,
        order: SampleOrder,
        described: dict[str, Any],
        reader: MapReader,
        *,
        identity: WorkerIdentity,
        batch: int,
        tail: Tail,
        skip: Iterable[range],
        keys: str | None,
        counts: LoaderCounts,
        balance: Balance | None,
        samples: int,
        threads: int,
    ) -> None:
        """Begin at epoch 0, or if `skip` leaves out all of it, at the first epoch with a batch. samples: of the
        dataset."""
        balanced = None if balance is None else Balanced(balance, order, reader.dataset, samples, batch)
        if balanced and balanced.described:  # it changes which step has a row
            described["balance"] = balanced.described
        super().__init__(name, identity, batch, keys, counts, balanced)
        self._order, self._described = balanced.order if balanced else order, described
        self._reader, self._threads = reader, threads
        self._epochs = EpochPlan(len(order), tail, ranges_of(skip))
        self._keys = PositionKeys.of(described, len(order))
        self._promise(draws_nothing=reader.draws_nothing)
        self._last: tuple[EpochRemainder, int] | None = None
        """Batch returned or skipped last, by its number in the rest of the epoch."""
        self._epoch = self._start = self._done = self._first = 0
        self._partitioned_for = self._topology()
        self._epoch_is_set = False
        """True after `set_epoch`: the next iteration is then over that epoch, even without a batch left."""
        self._counted = 0, 0
        """(epoch, start) from which `state_after` counts."""
        self._epochs_begun = 0
        """Grows when an iteration begins and the position is set: earlier iterators have then ended."""
        if EpochPlan(len(order), tail).remainder(0, 0, batch, identity.boxes).batches == 0:
            raise DatasetError(f"{name}: the global batch must have at most {len(order)} rows ({tail=}), got {batch}")
        self._epoch, self._start = self._worker_batches().remainder.position_after(0)
        self._count_from_here()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} over {self._name}: {len(self._order)} samples, {self._batch} in a global batch, "
            f"epoch {self._epoch}, {self._done} batches done>"
        )

    # ---- methods of subclasses

    def _prefetch(self, own_batches: WorkerBatches, plans: list[BatchPlan]) -> None:
        """Prefetch for the next batches. Called from time to time."""

    def _approach(self, plan: BatchPlan) -> None:
        """Prefetch what is needed soon. Called before each batch."""

    # ---- epochs

    def __len__(self) -> int:
        """Number of this process's batches in a whole epoch; of the present one with tail="carry", as epochs differ by
        up to one."""
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
        """Set the epoch of the next iteration, which starts at its beginning, or at a state loaded in this epoch; if
        that is its end, it has no batch."""
        super().set_epoch(epoch)
        self._epoch_is_set = True
        self._count_from_here()

    def _epoch_number(self) -> int:
        return self._epoch

    def _go_to_epoch(self, epoch: int) -> None:
        self._move_to(epoch, self._epochs.begin(epoch, self._batch, (self._epoch, self._start)))

    def _imbalance(self, steps: int) -> Imbalance:
        assert self._balance is not None
        return self._balance.imbalance(self._remainder(self._epoch, 0), steps)

    # ---- states

    def _saved(self) -> dict[str, Any]:
        return self._state_of(OrderProgress(self._epoch, self._start, self._done, self._topology(), self._first))

    def _state_of(self, position: OrderProgress) -> dict[str, Any]:
        return state_of(position, self._described, self._epochs.skip)

    def _check_order(self, state: Any, *, strict: bool) -> None:
        progress_of(state)
        check_order(state, self._described, self._epochs, strict=strict)

    def _is_whole(self, topology: Topology) -> bool:
        return topology.workers == 1  # all boxes have delivered equally many batches

    def _own_position(self, state: Mapping[str, Any], *, strict: bool) -> OrderProgress:
        progress, topology, skip = progress_of(state), self._topology(), skip_of(state)
        if skip == self._epochs.skip:
            return progress
        if progress.done and topology.workers > 1:
            raise StateMismatchError(
                f"{self._name}: the state of one of several workers must be loaded with its skip, {skip}, got "
                f"{self._epochs.skip}. Load a state from aggregate_state_dict or state_after"
            )
        start = replanned(state, self._epochs, progress.done, strict=strict)
        return OrderProgress(progress.epoch, start, 0, topology, progress.first)

    def _part(self, aggregated: Mapping[str, Any], *, strict: bool) -> OrderProgress:
        identity = self._identity
        return deaggregated(
            aggregated, identity.number, identity.all_workers, self._topology(), self._epochs, strict=strict
        )

    def _aggregated(self, states: list[Any]) -> dict[str, Any]:
        return aggregated(states, self._described, self._epochs)

    def _go_to(self, position: OrderProgress) -> None:
        self._move_to(position.epoch, position.start, position.done, position.first)
        self._count_from_here()

    def state_after(self, batches: int) -> dict[str, Any]:
        """Return the state after `batches` more batches of this rank, counted from the beginning of the latest
        iteration, or from a later `load_state_dict` or `set_epoch`. It fits any topology. Use it with torch's
        DataLoader, whose processes make and count batches in copies of this loader."""
        batches = whole("batches", batches)
        if batches < 0:
            raise InvalidArgumentError(f"batches must be at least 0, got {batches}. Pass the number of batches done")
        epoch, start = self._remainder(*self._counted).position_after(batches)
        return self._state_of(OrderProgress(epoch, start, 0, self._topology()))

    def restore_sample(self, key: str) -> Any:
        """Read a row's sample again by its text in the field that the argument `keys` names. Raises
        InvalidArgumentError for an invalid key, StateMismatchError for one of other data or settings."""
        epoch, position = self._keys.position_of(key)
        positions = np.array([position])
        return self._reader.samples(BatchPlan(epoch, positions, self._order.ids(epoch, positions)))[0]

    def last_samples(self) -> list[range]:
        """Return the samples of the last global batch as ranges that `skip` accepts; empty before the first."""
        if self._last is None:
            return []
        remainder, number = self._last
        begin = remainder.epoch * self._epochs.length
        return [range(first + begin, end + begin) for first, end in remainder.kept_ranges(number)]

    def _skipped(self, remainder: EpochRemainder, number: int) -> dict[str, int]:
        """Return the samples, by source, that `skip` leaves out just before batch `number` ends; only box 0 counts
        them."""
        if not self._epochs.skip or self._identity.box:
            return {}
        skipped: Counter[str] = Counter()
        for first, end in remainder.skipped_ranges(number):
            for begin in range(first, end, COUNTED_AT_ONCE):
                positions = np.arange(begin, min(end, begin + COUNTED_AT_ONCE))
                sources = self._reader.sources(self._order.ids(remainder.epoch, positions))
                skipped.update(sources if sources is not None else {"": len(positions)})
        return skipped

    def _move_to(self, epoch: int, start: int = 0, done: int = 0, first: int = 0) -> None:
        self._epochs_begun += 1
        self._epoch, self._start, self._done, self._first, self._at_position = epoch, start, done, first, True
        self._partitioned_for = self._topology()

    def _count_from_here(self) -> None:
        # With several workers, the progress of the others is unknown.
        done = self._done if self._partitioned_for.workers == 1 else 0
        self._counted = self._remainder(self._epoch, self._start).position_after(done)

    def _repartition(self) -> None:
        """Adapt to the processes that share the batches now: a torch worker process copies a single process's
        loader."""
        topology = self._topology()
        if not self._done or self._partitioned_for == topology:
            # the topology stays fixed: with persistent_workers=True each copy counts its own epochs
            self._partitioned_for = topology
            return
        if self._partitioned_for.workers > 1:
            raise StateMismatchError(
                f"{self._name}: the loader must be read in its state's topology, {self._partitioned_for}, got "
                f"{topology}. Load the state in the processes that read, or one from state_after(batches)"
            )
        self._move_to(*self._worker_batches().remainder.position_after(self._done))

    # ---- division among processes

    def _worker_batches(self) -> WorkerBatches:
        remainder = self._remainder(self._epoch, self._start)
        balance = self._balance
        # a balance that only reports is measured for the counts
        assign = balance.assign if balance and (balance.assigns or self._counts.tally is not None) else None
        return WorkerBatches(remainder, self._order, self._identity.turn(self._first), self._identity.box, assign)

    def _remainder(self, epoch: int, start: int) -> EpochRemainder:
        return self._epochs.remainder(epoch, start, self._batch, self._identity.boxes)


class _Epoch(Iterator[Any]):
    """Iterator over one epoch's batches, which advances its loader."""

    def __init__(self, loader: PositionLoader, own_batches: WorkerBatches) -> None:
        self._loader, self._worker_batches, self._number = loader, own_batches, loader._epochs_begun
        threads = loader._threads
        self._fetcher = ReadAhead(own_batches, loader._reader, threads) if threads else None
        self._ready: list[BatchPlan] = []
        """The next batch last."""

    def __next__(self) -> Any:
        loader, plan = self._loader, self._plan()
        batch = loader._reader.batch(plan) if self._fetcher is None else self._fetcher.take(loader._done)
        counted = kept = None
        if loader._counts.tally is not None:
            batch, counted, kept = batch
        if loader._key_field is not None:
            rows = range(0 if plan.empty else len(plan.ids)) if kept is None else kept
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
        plan = self._plan()
        if self._fetcher is not None:
            self._fetcher.close()
        if self._loader._counts.tally is not None:
            sources = self._loader._reader.sources(plan.ids)
            rows = 0 if plan.empty else len(plan.ids)
            self._count(skipped_rows(Counter(sources if rows and sources is not None else {"": rows})))
        self._move_on()

    def _count(self, counted: dict[Group, Row]) -> None:
        """Add counts of a batch returned or skipped, and of samples that `skip` leaves out before."""
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
        """Raise StopIteration after the last batch."""
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


def check_settings(tail: str, **numbers: int | None) -> None:
    one_of("tail", tail, get_args(Tail))
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name} must be at least 1, got {value}. Pass a larger number")
