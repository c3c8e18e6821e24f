"""Loaders of small programs that once got wrong batches (test_cases.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

KEPT: dict[int, Any] = {}


class Text(IterableDataset[Any]):
    """Keeps its place in the dataset, as torchtitan's text dataset does."""

    def __init__(self, length: int, pause_s: float) -> None:
        self.length, self.pause_s, self.place = length, pause_s, 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            time.sleep(self.pause_s)  # time enough for a worker to draw conclusions
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def text(length: int, pause_s: float = 0.003) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Text(length, pause_s), batch_size=1)


class Memoised(Dataset[Any]):
    """Keeps random results in a dict of its module."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        if index % 5:
            return index, torch.rand(3)
        if index not in KEPT:
            KEPT[index] = torch.rand(3)
        return index, KEPT[index]


def memoised() -> Any:
    return DataLoader(Memoised(), 2, shuffle=True)


class Noisy(Dataset[Any]):
    """Label noise from a generator of its own, between large leaves."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        image = torch.full((3, 64, 64), float(index))
        label = index if self.rng.random() < 0.7 else int(self.rng.integers(1000))
        return {"image": image, "label": label, "mask": image + 1}


def noisy() -> Any:
    return DataLoader(Noisy(), 4, shuffle=True)


class Held(Dataset[Any]):
    """One sample waits until a file is there, and says in which process."""

    def __init__(self, held: int, folder: str) -> None:
        self.held, self.folder = held, Path(folder)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == self.held:
            (self.folder / "waits").write_text(str(os.getpid()))
            while not (self.folder / "go").exists():
                time.sleep(0.01)
        return torch.tensor(index)


def held(folder: str) -> Any:
    return DataLoader(Held(24, folder), batch_size=8)


class Unseeded(Dataset[Any]):
    """Draws that no other process makes again."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.tensor([index, self.rng.random()])


def unseeded() -> Any:
    return DataLoader(Unseeded(), 1)
