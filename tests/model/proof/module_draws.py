"""Dataset that draws from generators of its module."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from proof.batches import batch_of
from proof.mutations import mutable
from torch.utils.data import DataLoader, Dataset

RNG = np.random.default_rng(3)
OTHER = random.Random(4)
TORCH = torch.Generator()


class Draws(Dataset[Any]):
    def __init__(self, length: int, pause_s: float, big: bool) -> None:
        self.length, self.pause_s, self.big = length, pause_s, big

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.pause_s:
            time.sleep(self.pause_s)
        drawn = [RNG.random(), OTHER.random(), float(torch.rand((), generator=TORCH)), float(torch.rand(()))]
        return batch_of(index, drawn, self.big)


@mutable
def module_generators(length: int = 12, pause_s: float = 0.0, big: bool = False) -> Any:
    return DataLoader(Draws(length, pause_s, big), batch_size=None, shuffle=True)
