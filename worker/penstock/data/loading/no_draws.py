"""Test for datasets that certainly draw no random numbers, so that random generators need not be seeded for them.

To seed the generators takes longer than to read a cheap sample. It cannot be found out by trying whether code draws
numbers, because it may draw for one sample in a million. So only datasets without user code pass the test: containers
of Python, numpy and torch, and torch's own datasets over these. A subclass of one of them is user code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

__all__ = ["CONTAINERS", "draws_nothing"]

CONTAINERS = (list, tuple, range, np.ndarray, np.memmap, torch.Tensor)
"""Types whose items are read without calling user code."""


def draws_nothing(dataset: Any) -> bool:
    """Return True if no user code runs when samples of a dataset are read."""
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
