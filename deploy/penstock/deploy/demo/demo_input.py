"""Input of `penstock demo`: synthetic images in a shuffled order. Each image takes some milliseconds to make."""

from __future__ import annotations

import time

import numpy as np
import torch

from penstock.data import MapLoader, SyntheticDataset

MAKING_S = 0.004
"""Seconds to make an image, as decoding one would take, so that the stream lasts long enough for the faults."""


def images(samples: int, batch_size: int) -> MapLoader:
    spec = {"image": torch.empty(3, 16, 16), "label": _label}
    return MapLoader(SyntheticDataset(spec, samples), global_batch_size=batch_size, shuffle=True)


def _label(index: int, generator: np.random.Generator) -> int:
    time.sleep(MAKING_S)
    return index
