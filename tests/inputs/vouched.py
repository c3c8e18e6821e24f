"""Loaders that vouch for their states over data, code or generators that are others after a resume."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.data import LogicalShards, MapLoader, Mapped, ShardLoader, StreamingDataset, StreamingLoader
from penstock.worker import current_assignment

SLOW_S = 0.02


class Images:
    """Map-style dataset whose values are shifted by `shift`, as other data of the same length are."""

    def __init__(self, shift: int, seed: int = 0) -> None:
        self.shift = shift
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 600

    def __getitem__(self, number: int) -> dict[str, Any]:
        time.sleep(SLOW_S / 4)
        return {"number": number + self.shift, "draw": torch.tensor(self.rng.random())}


def mapped(shift: int = 0, batch: int = 4) -> MapLoader:
    """Slow, so that no batch is ahead of the loop."""
    return MapLoader(Images(shift), global_batch_size=batch, shuffle=True)


def seeded(reseed: bool = True, seed: int = 0) -> MapLoader:
    return MapLoader(Images(0, seed), global_batch_size=12, shuffle=True, reseed=reseed)


def slow(batch: Any) -> Any:
    time.sleep(SLOW_S)
    return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}


def streaming(folder: str) -> StreamingLoader:
    return StreamingLoader(StreamingDataset(local=folder), batch_size=4, shuffle=True, collate_fn=slow)


class Shift:
    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self, sample: int) -> int:
        time.sleep(SLOW_S / 4)
        return sample + self.shift


def sharded(shift: int = 0, batch: int = 4) -> ShardLoader:
    pieces = [list(range(300)), list(range(300, 600))]
    source = Mapped(LogicalShards(pieces, shards=12, shuffle=True), Shift(shift))
    return ShardLoader(source, global_batch_size=batch)


class Own:
    """A user's loader with two methods, which vouches for its states."""

    exact_states = True

    def __init__(self, shift: int = 0) -> None:
        self.shift, self.done = shift, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        current_assignment().global_worker_id  # noqa: B018
        while self.done < 150:
            time.sleep(SLOW_S)
            self.done += 1
            yield torch.tensor([self.done - 1 + self.shift])
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Drawing(Own):
    """It says by mistake that its batches depend on no generator."""

    draws_nothing = True

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in super().__iter__():
            yield batch + self.rng.random()


def unseeded() -> MapLoader:
    return MapLoader(Images(0), batch_size=4, reseed=False)


class Drawn(Images):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, Any]:
        time.sleep(0.2)
        return super().__getitem__(number)


def entropic() -> Any:
    """A pure loader that holds a generator seeded from entropy. No batch is ahead of the loop."""
    images = Drawn(0)
    images.rng = np.random.default_rng()
    current_assignment().global_worker_id  # noqa: B018
    return torch.utils.data.DataLoader(images, batch_size=2)  # type: ignore[arg-type]
