"""Datasets that divide their samples as public libraries do: by the assignment, by torch's get_worker_info(), or both.
All of them are numbers from 0."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from penstock.client import get_worker_state
from penstock.worker import current_assignment


def of_worker(numbers: Any) -> Any:
    """Part of the worker that get_worker_info() names, as torch's documentation shows."""
    info = get_worker_info()
    return numbers if info is None else numbers[info.id :: info.num_workers]


class Numbers(IterableDataset[int]):
    """Divides by get_worker_info() alone, as WebDataset's split_by_worker does."""

    def __init__(self, numbers: range | list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        yield from of_worker(self.numbers)


def by_worker_info(count: int, own_workers: int = 0) -> DataLoader[int]:
    return DataLoader(Numbers(range(count)), batch_size=4, num_workers=own_workers)


def by_node(count: int) -> DataLoader[int]:
    """Hugging Face's split_dataset_by_node(), then the split in its `_iter_pytorch`."""
    here = current_assignment()
    return DataLoader(Numbers(range(count)[here.box :: here.num_boxes]), batch_size=4)


class WebShards(IterableDataset[int]):
    """WebDataset's split_by_node, which reads torchrun's variables, and then split_by_worker."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        yield from of_worker(range(self.count)[rank::ranks])


def web_shards(count: int) -> DataLoader[int]:
    return DataLoader(WebShards(count), batch_size=4)


def model_zoo(count: int, own_workers: int = 0) -> DataLoader[int]:
    """The Model Zoo's iterables divide their files by streamer, and what is left by get_worker_info()."""
    here = current_assignment()
    numbers = range(count)[here.global_worker_id :: here.total_num_workers]
    return DataLoader(Numbers(numbers), batch_size=4, num_workers=own_workers)


def collated(count: int) -> DataLoader[int]:
    """torch's collate function asks for the worker info before the assignment is read."""
    torch.utils.data.default_collate([torch.zeros(1), torch.zeros(1)])
    return model_zoo(count)


def orders(count: int) -> DataLoader[int]:
    """All numbers, in an order of this worker's own: the worker's number is read for a seed."""
    numbers = torch.randperm(count, generator=torch.Generator().manual_seed(current_assignment().slot)).tolist()
    return DataLoader(Numbers(numbers), batch_size=4)


class Late(Numbers):
    """Asks for the worker info first, and reads a field of its assignment then."""

    def __init__(self, count: int, field: str) -> None:
        super().__init__(range(count))
        self.place, self.field = current_assignment(), field

    def __iter__(self) -> Iterator[int]:
        numbers = of_worker(self.numbers)
        getattr(self.place, self.field)
        yield from numbers


def late(count: int, field: str) -> DataLoader[int]:
    return DataLoader(Late(count, field), batch_size=4)


class Saved(DataLoader[int]):
    """Divides by the worker info. Its states tell whose they are, by fields of the assignment and of cstorch."""

    def __init__(self, count: int) -> None:
        self.place, self.done, self.numbers = current_assignment(), 0, range(count)
        super().__init__(Numbers(range(count)), batch_size=4)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for number, batch in enumerate(super().__iter__()):
            if number >= self.done:
                self.done += 1
                yield batch
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "of": get_worker_state().global_worker_id, "slot": self.place.slot}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["slot"] == self.place.slot == current_assignment().global_worker_id == state["of"]
        self.done = state["done"]


def saved(count: int) -> Saved:
    return Saved(count)
