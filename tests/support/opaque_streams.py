"""Streams and pieces that only know what is next: with a state, without one, and with one that is wrong; and the
sources made of them that every contract of sources is checked on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torchdata.nodes import IterableWrapper, Mapper
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.data import LogicalShards, Savable
from penstock.data.sharded.protocol import ShardedSource

__all__ = ["SOURCES", "Counter", "CountsLate", "Numbers", "drawing", "graph", "rows_of", "shuffled_loader"]


class Counter:
    """0, 1, 2, ... with a state, which is the very dict that it goes on to change, as torchdata's are."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first
        self.state = {"next": 0}
        self.made = self.loaded = self.closed = 0

    def __iter__(self) -> Iterator[Any]:
        while self.state["next"] < self.count:
            self.state["next"] += 1
            self.made += 1
            yield self.first + self.state["next"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)
        self.loaded += 1

    def close(self) -> None:
        self.closed += 1


class CountsLate(Counter):
    """Counts behind the yield, so that its state is one sample late; a plain generator's mistake."""

    def __iter__(self) -> Iterator[Any]:
        while self.state["next"] < self.count:
            self.made += 1
            yield self.first + self.state["next"]
            self.state["next"] += 1


class Numbers(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style dataset."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "noise": float(torch.rand(()))}


def drawing(count: int, shard: int = 0) -> Iterator[dict[str, Any]]:
    """Samples that all three generators decide; an odd number of gaussians, of which two are drawn at a time."""
    for index in range(count):
        yield {
            "at": (shard, index),
            "python": random.random(),
            "python gauss": random.gauss(0, 1),
            "numpy": float(np.random.normal()),
            "torch": torch.rand(2),
        }


def shuffled_loader(count: int = 24, workers: int = 0) -> Any:
    """Torchdata's loader, shuffled, of a dataset that draws as well."""
    return StatefulDataLoader(Numbers(count), batch_size=4, shuffle=True, num_workers=workers)


def graph(count: int) -> Any:
    """The root of a graph of torchdata.nodes."""
    return Mapper(IterableWrapper(range(count)), lambda number: {"number": number, "draw": random.random()})


def rows_of(batch: int, rows: int = 24) -> Iterator[list[int]]:
    for begin in range(0, rows, batch):
        yield list(range(begin, begin + batch))


def _lists(*lengths: int) -> list[list[int]]:
    return [[100 * number + index for index in range(length)] for number, length in enumerate(lengths)]


def _opening(records: list[int]) -> Callable[[], Iterator[int]]:
    return lambda: iter(records)


SOURCES: dict[str, Callable[[], ShardedSource]] = {
    "more shards than records": lambda: LogicalShards(_lists(2, 1), shards=5, shuffle=True),
    "generators": lambda: LogicalShards([_opening(own) for own in _lists(4, 0, 5, 2, 1)], shards=2, shuffle=True),
    "generators of known lengths": lambda: LogicalShards(
        [_opening(own) for own in _lists(4, 0, 5)], counts=[4, 0, 5], shards=4, shuffle=True
    ),
    "stateful pieces": lambda: LogicalShards([lambda: Counter(7), lambda: Counter(3, 50), [7, 8]], shards=2),
    "generators that draw": lambda: Savable(lambda shard: drawing(5 + shard, shard), shards=2),
    "loaders": lambda: Savable(lambda shard: shuffled_loader(16), shards=2, snapshot_every=2),
    "graphs": lambda: Savable(lambda shard: graph(5), shards=2, snapshot_every=2),
}
"""Name -> how it is made."""
