"""How the samples of a map-style dataset are read: what their randomness is, and what an error says.

Random augmentation draws from the process's generators. Were these left alone, a sample would depend on what was read
before it in the same process: on workers, boxes and restarts. So they are set before each sample, from the seed and the
sample's place in the order, and afterwards to what they were. They are set in the cheapest way that each has: 64 bits
for Python's, 32 for numpy's and torch's (torch keeps no more of a seed). torch.manual_seed would cost twenty times as
much, for it asks all kinds of devices.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from penstock.proto.errors import DatasetError
from penstock.proto.rng import capture_rng, derive_seed, restore_rng
from penstock.worker.datasets.no_end import not_an_end
from penstock.worker.datasets.ordering.course import Plan
from penstock.worker.datasets.ordering.permutation import mix

__all__ = ["MapReader"]

_PYTHON, _OTHERS = 0, 1
"""Generators that a key is for."""


class MapReader:
    """Reads samples and makes batches. Holds nothing but the dataset and settings, so that it may travel to a
    process."""

    def __init__(
        self,
        dataset: Any,
        name: str,
        epoch_size: int,
        collate: Callable[[list[Any]], Any],
        *,
        seed: int,
        reseed: bool,
    ) -> None:
        self.dataset, self.collate = dataset, collate
        self.name, self._length = name, epoch_size
        self._key = derive_seed(seed, "sample") if reseed else None
        self._collate_key = derive_seed(seed, "collate")

    def samples(self, plan: Plan) -> list[Any]:
        if self._key is None:
            return self._all(plan)
        before = capture_rng()
        try:
            return self._each(plan, self._key)
        finally:
            restore_rng(before)

    def batch(self, plan: Plan) -> Any:
        """Collated; where generators are set, its randomness depends on the batch's first row."""
        if self._key is None:
            return self.collate(self._all(plan))
        before = capture_rng()
        try:
            found = self._each(plan, self._key)
            _seed(*self._seeds(self._collate_key, plan.epoch, plan.positions[:1])[0])
            return self.collate(found)
        finally:
            restore_rng(before)

    def _each(self, plan: Plan, key: int) -> list[Any]:
        found = []
        seeds = self._seeds(key, plan.epoch, plan.positions)
        for row, (number, seed) in enumerate(zip(plan.ids.tolist(), seeds, strict=True)):
            _seed(*seed)
            found.append(self._one(plan, row, number))
        return found

    def _all(self, plan: Plan) -> list[Any]:
        numbers = plan.ids.tolist()
        if not callable(getattr(type(self.dataset), "__getitems__", None)):
            dataset, left = self.dataset, iter(numbers)
            try:
                return [dataset[number] for number in left]  # a call of ours for each would take a third more
            except Exception as error:
                self._tell(error, self._place(plan, len(numbers) - operator.length_hint(left) - 1))
                raise
        try:
            found = self.dataset.__getitems__(numbers)
            if isinstance(found, Mapping):  # its keys would be taken for samples
                raise DatasetError(f"{self.name}: __getitems__ returned a dict, and not a list of samples")
            found = list(found)
        except Exception as error:
            first = ", ".join(self._place(plan, row) for row in range(min(3, len(numbers))))
            self._tell(error, f"one of {len(numbers)} samples, the first of which are {first}")
            raise
        if len(found) != len(numbers):
            raise DatasetError(f"{self.name}: __getitems__ returned {len(found)} samples for {len(numbers)} numbers")
        return found

    def _one(self, plan: Plan, row: int, number: int) -> Any:
        try:
            return self.dataset[number]
        except Exception as error:
            self._tell(error, self._place(plan, row))
            raise

    def _tell(self, error: Exception, what: str) -> None:
        """Note in the user's error where it came from. One that would end the pass silently becomes another."""
        if isinstance(error, StopIteration):
            raise not_an_end(f"{self.name} for {what}") from error
        error.add_note(f"raised by {self.name} for {what}")

    def _place(self, plan: Plan, row: int) -> str:
        epoch, position = plan.place(row, self._length)
        return f"sample {plan.ids[row]} (epoch {epoch}, position {position})"

    def _seeds(self, key: int, epoch: int, positions: Any) -> list[tuple[int, int]]:
        epochs = (epoch & (2**62 - 1)) + positions // self._length
        words = mix(key, epochs, positions % self._length)
        return list(zip(mix(_PYTHON, words).tolist(), mix(_OTHERS, words).tolist(), strict=True))


def _seed(for_python: int, for_others: int) -> None:
    random.seed(for_python)
    np.random.seed(for_others & 0xFFFFFFFF)
    torch.default_generator.manual_seed(for_others >> 32)
