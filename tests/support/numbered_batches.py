"""Loader of few small batches that say where they come from, and what an epoch of it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["numbers", "one_pass", "tuples"]


def numbers(slot: int, epoch: int) -> list[torch.Tensor]:
    """Five batches an epoch: epoch, slot, number."""
    return [torch.tensor([epoch, slot, number]) for number in range(5)]


def tuples(batches: Iterable[Any]) -> list[tuple[int, ...]]:
    return [tuple(batch.tolist()) for batch in batches]


def one_pass(epoch: int, slots: int = 2, count: int = 5) -> list[tuple[int, int, int]]:
    return [(epoch, slot, number) for number in range(count) for slot in range(slots)]
