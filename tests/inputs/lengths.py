"""Loaders with a wrong len(). Each worker counts in a range of its own, from the first batch in each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from penstock.worker import current_assignment


class TooShort:
    """Begins anew in each epoch, unless a state was loaded. Has one batch more than its len() says."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.first = 1000 * current_assignment().global_worker_id
        self.done, self.loaded = 0, False

    def __len__(self) -> int:
        return self.batches - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.done, self.loaded = self.done if self.loaded else 0, False
        while self.done < self.batches:
            self.done += 1
            number = self.first + self.done
            yield {"x": torch.full((4,), number), "number": number}

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done, self.loaded = state["done"], True


def too_short(batches: int = 3) -> TooShort:
    return TooShort(batches)


class Raising(IterableDataset[Any]):
    def __len__(self) -> int:
        raise ValueError("the manifest\nhas no row count")

    def __iter__(self) -> Iterator[int]:
        yield from range(100 * current_assignment().slot, 100 * current_assignment().slot + 4)


def raising() -> DataLoader[Any]:
    return DataLoader(Raising(), batch_size=2)
