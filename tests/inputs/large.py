"""Large batches with small leaves beside them. Workers of the system tests import this module by name."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from penstock.worker import current_assignment

KIB = 1 << 10
SIZES = [(300 * KIB,), (200 * KIB, 7, 200 * KIB), (20 * KIB, 5) * 20, (1 << 20, *[300] * 9), (256 * KIB,), (10,)]
"""Sizes of the leaves of batches: one sampled leaf, few, many, small ones beside it, and batches covered in full."""


def of_all_kinds(count: int) -> Iterator[list[torch.Tensor]]:
    """Batches of other shapes each time, and again of the same."""
    rng = np.random.default_rng(current_assignment().slot)
    for number in range(count):
        sizes = [size + 64 * (number % 5) for size in SIZES[number % len(SIZES)]]
        yield [torch.from_numpy(rng.integers(0, 256, size, np.uint8)) for size in sizes]
