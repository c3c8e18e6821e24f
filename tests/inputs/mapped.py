"""A loader over a map-style dataset whose samples are partly random."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.utils.data

from penstock.data import MapLoader

__all__ = ["SAMPLES", "mapped"]

SAMPLES = 100


class Augmented(torch.utils.data.Dataset[dict[str, Any]]):
    fingerprint = "augmented"

    def __init__(self, broken: int) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == self._broken:
            raise ValueError("no such pixel")
        noise = torch.randn(3) + random.random() + np.random.normal()
        return {"number": number, "noise": noise.double()}


def mapped(broken: int = -1, **options: Any) -> MapLoader:
    return MapLoader(Augmented(broken), **{"shuffle": True, "seed": 4, "keys": "key", **options})
