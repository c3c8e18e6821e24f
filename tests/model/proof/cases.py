"""Loaders of small programs that once got wrong batches (test_cases.py)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


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
