"""Datasets that certainly draw no random numbers, so that no generator has to be set for their samples.

Setting the generators takes most of the time of a cheap sample. Whether code draws cannot be found out by watching it,
because it may draw for one sample in a million. So a dataset counts only if all of its code is known: containers of
Python, numpy and torch, and torch's own datasets over these. A subclass has code of its own, and does not count.
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
    """Return True if no code of a user runs when samples of a dataset are read."""
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
