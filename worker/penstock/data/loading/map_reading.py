"""Reading of samples by number, for MapLoader and StreamingLoader. Errors of user code get a note that names the
sample. Generators are seeded for each sample from seed and position (keyed_random.py), and restored after the batch."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.data.batch_columns import Columns, columns_match_samples
from penstock.data.loading.collating import (
    checked_collate,
    collate_columns,
    collates_as_torch,
    empty_batch,
    may_draw,
    name_rows,
)
from penstock.data.loading.counting import CountedBatch, LeftOut, SampleCounter, skipped_rows
from penstock.data.loading.keyed_random import Generators, Seeds, seeds_of
from penstock.data.ordering.epoch_plan import BatchPlan
from penstock.data.ordering.permutation import Ints
from penstock.data.stop_iteration import stop_iteration_error
from penstock.proto.errors import DatasetError, SampleCorruptError
from penstock.proto.state.counts import cut_name, merged_rows
from penstock.proto.state.generators import derive_seed

MOST_NAMED = 64
"""Samples of a batch that an error names."""


class MapReader:
    """Reader that makes batches. It has only dataset and settings, so it can be sent to another process."""

    def __init__(
        self,
        dataset: Any,
        name: str,
        epoch_size: int,
        collate_fn: Callable[[list[Any]], Any],
        *,
        seed: int,
        reseed: bool | None,
        threads: int,
        counter: SampleCounter | None,
        own_samples: bool,
        many: Callable[[Ints], list[Any]] | None = None,
    ) -> None:
        """reseed: seed generators before samples are read and batches are collated; None: where user code may draw, but
        not for samples that `threads` read. counter: batches become CountedBatches. own_samples: user code that may
        draw reads the samples. many: reads samples by numbers, with errors that name them; unless these are seeded."""
        self.dataset, self.collate = dataset, checked_collate(collate_fn)
        self.name, self._length = name, epoch_size
        own_collate = self._own_collate = may_draw(collate_fn)
        seeds_samples = own_samples and not threads if reseed is None else reseed
        seeds_collate = own_collate if reseed is None else reseed
        self._key = derive_seed(seed, "sample") if seeds_samples else None
        self._collate_key = derive_seed(seed, "collate") if seeds_collate else None
        self._many, self._counter = many, counter
        self._skip_failures: int = getattr(dataset, "skip_failures", 0)
        self._found: Generators | None = None
        self.draws_nothing = not ((own_samples and self._key is None) or (own_collate and self._collate_key is None))
        """True if batches neither depend on the process's random generators nor change them."""
        self._by_column = not own_collate and not self.reseeds and counter is None and columns_match_samples(dataset)
        """True if batches are made from whole columns: the dataset has them, and no user code needs samples."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None}

    @property
    def _generators(self) -> Generators:
        """Generators to seed, looked for in the process that reads."""
        if self._found is None:
            collate = getattr(self.collate, "args", (self.collate,))
            self._found = Generators((self.dataset, *collate))
        return self._found

    @property
    def reseeds(self) -> bool:
        return self._key is not None or self._collate_key is not None

    def samples(self, plan: BatchPlan) -> list[Any]:
        """Return the samples, with `LeftOut` in the place of those that `skip_failures` leaves out."""
        if self._key is None:
            return self._rows(plan)
        return self._generators.drawn(lambda: self._rows(plan))

    def _rows(self, plan: BatchPlan) -> list[Any]:
        try:
            return self._read(plan)
        except SampleCorruptError:
            if not self._skip_failures:
                raise
        return self._tolerated(plan)

    def _tolerated(self, plan: BatchPlan) -> list[Any]:
        found: list[Any] = []
        failed = 0
        for row in range(len(plan.ids)):
            own = slice(row, row + 1)
            try:
                found += self._read(plan._replace(ids=plan.ids[own], positions=plan.positions[own]))
                failed = 0
            except SampleCorruptError as error:
                failed += 1
                if failed > self._skip_failures or failed == len(plan.ids):
                    why = f"more than skip_failures={self._skip_failures} samples in a row cannot be decoded"
                    if failed <= self._skip_failures:
                        why = "the batch would have no sample, because none of its samples can be decoded"
                    raise SampleCorruptError(f"{why}: {error.message}") from error
                where = f"{self.name}: {self._sample_position(plan, row)}"
                warnings.warn(f"{where} is left out: {error.message}", stacklevel=4)
                found.append(LeftOut)
        return found

    def _read(self, plan: BatchPlan) -> list[Any]:
        return self._all(plan) if self._key is None else self._each(plan, self._key)

    def read(self, plan: BatchPlan) -> list[Any] | Columns:
        """Return whole columns if the batch can be made from them, otherwise samples."""
        if self._by_column and not plan.empty and collates_as_torch():
            columns: Columns | None = self.dataset.get_columns(plan.ids)
            if columns is not None:
                return columns
        return self.samples(plan)

    def batch(self, plan: BatchPlan) -> Any:
        if not self.reseeds:
            return self._collated(plan, self.read(plan))
        return self._generators.drawn(lambda: self._seeded(plan, self._rows(plan)))

    def collated(self, plan: BatchPlan, found: list[Any] | Columns) -> Any:
        """Collate what `read` returned, with generators seeded from the batch's first position."""
        if self._collate_key is None:
            return self._collated(plan, found)
        return self._generators.drawn(lambda: self._seeded(plan, found))

    def _seeded(self, plan: BatchPlan, found: list[Any] | Columns) -> Any:
        if self._collate_key is not None:
            self._generators.seed(self._seeds(self._collate_key, plan.epoch, plan.positions[:1])[0])
        return self._collated(plan, found)

    def _collated(self, plan: BatchPlan, found: list[Any] | Columns) -> Any:
        if isinstance(found, dict):
            try:
                return collate_columns(found)
            except Exception as error:
                self._name_rows(error, plan, plan.ids, found)
                raise
        rows = None
        if self._skip_failures and any(sample is LeftOut for sample in found):
            rows = [row for row, sample in enumerate(found) if sample is not LeftOut]
            found = [found[row] for row in rows]
        if plan.empty:
            batch = empty_batch(self.collate, found[0])
            return batch if self._counter is None else CountedBatch(batch, {})
        if self._counter is None:
            return self._made(plan, plan.ids, found)
        ids = plan.ids if rows is None else plan.ids[rows]
        counted = self._counter.count(found, self.sources(ids))
        if rows is not None:
            left_out = np.delete(plan.ids, rows)
            skipped = Counter(self.sources(left_out) or {"": len(left_out)})
            counted = merged_rows([counted, skipped_rows(skipped)])
        return CountedBatch(self._made(plan, ids, found), counted, rows)

    def _made(self, plan: BatchPlan, ids: Ints, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            self._name_rows(error, plan, ids, samples)
            raise

    def _name_rows(self, error: Exception, plan: BatchPlan, ids: Ints, found: list[Any] | Columns) -> None:
        numbers = ", ".join(map(str, ids[:MOST_NAMED].tolist())) + (", ..." if len(ids) > MOST_NAMED else "")
        rows = f"the samples {numbers} of {self.name} (epoch {plan.epoch})"

        def place_of(index: int) -> str:
            place = getattr(self.dataset, "place_of", lambda number: f"{self.name}: sample {number}")
            return str(place(int(ids[index])))

        name_rows(error, found, rows, place_of, own_collate=self._own_collate)

    def sources(self, numbers: Ints) -> Sequence[str] | None:
        """Return each sample's source by `sources_of` of the dataset, if it has it."""
        names = getattr(self.dataset, "sources_of", None)
        if not callable(names):
            return None
        found = list(names(numbers))
        if len(found) != len(numbers) or not all(isinstance(name, str) for name in set(found)):
            raise DatasetError(
                f"{self.name}: sources_of must return a text for each of {len(numbers)} samples, got {found!r:.100}"
            )
        return [cut_name(str(name)) for name in found]

    def _each(self, plan: BatchPlan, key: int) -> list[Any]:
        found = []
        seeds = self._seeds(key, plan.epoch, plan.positions)
        seed_generators = self._generators.seed
        for row, (number, seed) in enumerate(zip(plan.ids.tolist(), seeds, strict=True)):
            seed_generators(seed)
            try:
                found.append(self.dataset[number])
            except Exception as error:
                self._annotate(error, self._sample_position(plan, row))
                raise
        return found

    def _all(self, plan: BatchPlan) -> list[Any]:
        if self._many is not None:
            return self._many(plan.ids)
        numbers = plan.ids.tolist()
        if not callable(getattr(type(self.dataset), "__getitems__", None)):
            dataset, left = self.dataset, iter(numbers)
            try:
                # inlined: a method call for each sample takes a third longer
                return [dataset[number] for number in left]
            except Exception as error:
                self._annotate(error, self._sample_position(plan, len(numbers) - operator.length_hint(left) - 1))
                raise
        try:
            found = self.dataset.__getitems__(numbers)
            if isinstance(found, Mapping):  # iterating over the dict would yield its keys as samples
                raise DatasetError(f"{self.name}: __getitems__ must return a list of samples, got a dict")
            found = list(found)
        except Exception as error:
            first = ", ".join(self._sample_position(plan, row) for row in range(min(3, len(numbers))))
            self._annotate(error, f"one of {len(numbers)} samples, the first of which are {first}")
            raise
        if len(found) != len(numbers):
            raise DatasetError(
                f"{self.name}: __getitems__ must return one sample for each of {len(numbers)} numbers, got {len(found)}"
            )
        return found

    def _annotate(self, error: Exception, what: str) -> None:
        """Add a note. A StopIteration, which would silently end the epoch, becomes a DatasetError."""
        if isinstance(error, StopIteration):
            raise stop_iteration_error(f"{self.name} for {what}") from error
        error.add_note(f"raised by {self.name} for {what}")

    def _sample_position(self, plan: BatchPlan, row: int) -> str:
        epoch, position = plan.position_of(row, self._length)
        return f"sample {plan.ids[row]} (epoch {epoch}, position {position})"

    def _seeds(self, key: int, epoch: int, positions: Any) -> list[Seeds]:
        epochs = (epoch & (2**62 - 1)) + positions // self._length
        return seeds_of(key, epochs, positions % self._length)
