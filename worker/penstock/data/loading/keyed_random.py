"""The process's random generators, set for one sample: from a key and the sample's position in the order.

User code draws from the generators of python, numpy and torch. Unless these are set, a sample depends on what the same
process read before, and so on workers, boxes and restarts. Each is seeded in its cheapest way: by 64 bits for Python's,
by 32 for numpy's and torch's (torch uses no more of a seed). torch.manual_seed would take twenty times as long, because
it asks every kind of device.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import torch

from penstock.data.ordering.permutation import mix

__all__ = ["Seeds", "seed_generators", "seeds_of"]

_PYTHON, _OTHERS = 0, 1
"""Constants mixed into the keys, so that Python's generator and the others get different ones."""

Seeds = tuple[int, int]
"""Seed of Python's generator, and seed of the others."""


def seeds_of(key: int, *position: npt.ArrayLike) -> list[Seeds]:
    """Return the seeds of several samples. `position`: integers that identify each sample, such as epochs and
    positions. At least one is an array; the others broadcast."""
    words = mix(key, *position)
    return list(zip(mix(_PYTHON, words).tolist(), mix(_OTHERS, words).tolist(), strict=True))


def seed_generators(seeds: Seeds) -> None:
    """Set the generators of python, numpy and torch."""
    for_python, for_others = seeds
    random.seed(for_python)
    np.random.seed(for_others & 0xFFFFFFFF)
    torch.default_generator.manual_seed(for_others >> 32)
