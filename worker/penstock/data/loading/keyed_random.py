"""Seeding of the generators of python, numpy and torch for one sample, from a key and its position in the order.
Otherwise a sample would depend on those that the process read before, so on workers, boxes and restarts. Each is seeded
in the cheapest way, Python's with 64 bits, the others with 32 (torch.manual_seed takes twenty times as long: it seeds
all devices)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
from xxhash import xxh3_64_intdigest

from penstock.data.ordering.permutation import mix
from penstock.proto.state.found_generators import capture, defining_modules, find_generators, reseed, restore
from penstock.proto.state.generators import capture_rng, restore_rng

_PYTHON, _OTHERS = 0, 1
"""Mixed into seeds, so that Python's generator and the others get different ones."""

T = TypeVar("T")
Seeds = tuple[int, int]
"""For Python's generator, and for numpy's and torch's."""


def seeds_of(key: int, *position: npt.ArrayLike) -> list[Seeds]:
    """Return each sample's seeds. `position`: integers that identify it, such as epoch and position; at least one is an
    array."""
    words = mix(key, *position)
    return list(zip(mix(_PYTHON, words).tolist(), mix(_OTHERS, words).tolist(), strict=True))


def seed_generators(seeds: Seeds) -> None:
    for_python, for_others = seeds
    random.seed(for_python)
    np.random.seed(for_others & 0xFFFFFFFF)
    torch.default_generator.manual_seed(for_others >> 32)


class Generators:
    """Generators from which user code may draw: the process's, and those that a walk over objects and modules finds
    (found_generators.py). Seeding takes up to 10 us, for a numpy Generator 30."""

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = list(objects)
        self._look()
        self._used = False

    def _look(self) -> None:
        self._found = find_generators(self._objects, defining_modules(self._objects))
        self._names = [xxh3_64_intdigest(found.path.encode()) << 64 for found in self._found]

    def drawn(self, make: Callable[[], T]) -> T:
        """Return what `make()`, which calls `seed`, returns, and restore all generators. Objects may make their
        generators at their first use, as transformers' collators do: then the first call is made again, with these
        seeded too."""
        with self._undisturbed():
            made = make()
        if not self._used:
            self._used, before = True, self._found
            self._look()
            if self._found != before:
                return self.drawn(make)
        return made

    def seed(self, seeds: Seeds) -> None:
        seed_generators(seeds)
        for found, name in zip(self._found, self._names, strict=True):
            reseed(found, name | seeds[1])

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        before, held = capture_rng(), capture(self._found) if self._found else b""
        try:
            yield
        finally:
            restore_rng(before)
            if held:
                restore(self._found, held)


def seeded(make: Callable[[], T], key: int, *position: int) -> T:
    """Return `make()`, called with generators seeded from key and position, and restored afterwards."""
    before = capture_rng()
    try:
        seed_generators(seeds_of(key, np.array([position[0]]), *position[1:])[0])
        return make()
    finally:
        restore_rng(before)


CONTAINERS = (list, tuple, range, np.ndarray, np.memmap, torch.Tensor)
"""Types whose items are read without user code."""


def draws_nothing(dataset: Any) -> bool:
    """Return True if no user code runs when samples are read: seeding, which costs more than a cheap sample, is then
    not needed. Draws cannot be tried: there may be one in a million samples. A subclass is user code."""
    kind = type(dataset)
    if kind in CONTAINERS:
        return True
    if kind is TensorDataset:
        return all(map(draws_nothing, dataset.tensors))
    if kind is Subset:
        return draws_nothing(dataset.indices) and draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    if kind is StackDataset:
        parts = dataset.datasets
        return type(parts) in (dict, tuple) and all(
            map(draws_nothing, parts.values() if isinstance(parts, dict) else parts)
        )
    return False
