"""Loaders of penstock.data whose positions are arithmetic, and loaders that look alike and draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from penstock.data import (
    Counts,
    LogicalShards,
    MapLoader,
    ShardLoader,
    StreamingDataset,
    StreamingLoader,
)


class Augmented:
    """A user's dataset, which draws."""

    def __len__(self) -> int:
        return 150

    def __getitem__(self, number: int) -> float:
        return number + random.random()


def mapped() -> MapLoader:
    return MapLoader(list(range(150)), batch_size=8, shuffle=True)


def augmented(reseed: bool | None = None) -> MapLoader:
    return MapLoader(Augmented(), batch_size=8, shuffle=True, reseed=reseed)


def streaming(folder: str) -> StreamingLoader:
    return StreamingLoader(StreamingDataset(local=folder), batch_size=8, shuffle=True)


def counted(folder: str) -> StreamingLoader:
    """Its states are reached by replay."""
    return StreamingLoader(StreamingDataset(local=folder), batch_size=8, shuffle=True, counts=Counts())


def sharded() -> ShardLoader:
    pieces = [list(range(75)), list(range(75, 150))]
    return ShardLoader(LogicalShards(pieces, shards=12, shuffle=True), global_batch_size=24)


class Wrapper:
    """Forwards all that it does not know, as wrappers do, and draws."""

    def __init__(self, inner: MapLoader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._inner:
            yield batch + torch.rand(())


def wrapped() -> Wrapper:
    return Wrapper(mapped())
