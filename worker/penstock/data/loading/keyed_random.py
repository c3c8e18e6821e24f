"""Seeding of the process's random generators for one sample, from a key and the sample's position in the order.

User code draws from the generators of python, numpy and torch. If these were not seeded for each sample, a sample would
depend on those that the process read before it, so on the numbers of workers and boxes and on restarts. Each is seeded
in the cheapest way: Python's with 64 bits, numpy's and torch's with 32 (torch.manual_seed would take twenty times as
long, because it also seeds all devices).
"""

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

__all__ = ["CONTAINERS", "Generators", "Seeds", "draws_nothing", "seed_generators", "seeded", "seeds_of"]


_PYTHON, _OTHERS = 0, 1
"""Mixed into seeds, so that Python's generator and the other two get different ones."""

T = TypeVar("T")
Seeds = tuple[int, int]
"""Pair of seeds: one for Python's generator, one for numpy's and torch's."""


def seeds_of(key: int, *position: npt.ArrayLike) -> list[Seeds]:
    """Return a pair of seeds for each of several samples. `position`: integers that identify a sample, such as its
    epoch and position; at least one is an array with an entry for each sample."""
    words = mix(key, *position)
    return list(zip(mix(_PYTHON, words).tolist(), mix(_OTHERS, words).tolist(), strict=True))


def seed_generators(seeds: Seeds) -> None:
    """Seed the global generators of python, numpy and torch."""
    for_python, for_others = seeds
    random.seed(for_python)
    np.random.seed(for_others & 0xFFFFFFFF)
    torch.default_generator.manual_seed(for_others >> 32)


class Generators:
    """Generators from which the code of a user may draw: those of the process, and those that a walk over its objects
    and the modules that define them finds (found_generators.py). A numpy Generator takes 30 us to seed, others up to
    10."""

    def __init__(self, objects: Iterable[object]) -> None:
        objects = list(objects)
        self._found = find_generators(objects, defining_modules(objects))
        self._names = [xxh3_64_intdigest(found.path.encode()) << 64 for found in self._found]

    def seed(self, seeds: Seeds) -> None:
        seed_generators(seeds)
        for found, name in zip(self._found, self._names, strict=True):
            reseed(found, name | seeds[1])

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore the states of all generators at the end of the block."""
        before, held = capture_rng(), capture(self._found) if self._found else b""
        try:
            yield
        finally:
            restore_rng(before)
            if held:
                restore(self._found, held)


def seeded(make: Callable[[], T], key: int, *position: int) -> T:
    """Return `make()`, called with generators that are seeded from a key and a position; they are restored
    afterwards."""
    before = capture_rng()
    try:
        seed_generators(seeds_of(key, np.array([position[0]]), *position[1:])[0])
        return make()
    finally:
        restore_rng(before)


CONTAINERS = (list, tuple, range, np.ndarray, np.memmap, torch.Tensor)
"""Types whose items are read without calling user code."""


def draws_nothing(dataset: Any) -> bool:
    """Return True if no user code runs when samples of a dataset are read, so that generators need not be seeded for
    them, which takes longer than to read a cheap sample. Whether code draws cannot be tried: it may for one sample in a
    million. A subclass is user code."""
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
