"""Input of these examples: short pieces of Python's own source text, shuffled anew in each epoch."""

from __future__ import annotations

import argparse as text
from pathlib import Path
from typing import Any

import torch

from penstock.data import MapLoader

__all__ = ["CONTEXT", "PIECES", "Pieces", "input_fn"]

CONTEXT = 8
"""Number of bytes from which the next one is predicted."""
PIECES = 1024
"""Number of rows in an epoch."""


def input_fn(global_batch_size: int) -> MapLoader:
    """Return the loader; Penstock calls this in each worker. Boxes share the rows of a global batch. A box's batch is a
    dict of

    context: int64, [rows, CONTEXT]; target: int64, [rows]; piece: int64, [rows], the pieces' numbers.
    """
    return MapLoader(Pieces(), global_batch_size=global_batch_size, shuffle=True, tail="drop")


class Pieces(torch.utils.data.Dataset[dict[str, Any]]):
    """Pieces of the first part of a module of the standard library."""

    def __init__(self) -> None:
        self.bytes = torch.frombuffer(bytearray(Path(text.__file__).read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return PIECES

    def __getitem__(self, number: int) -> dict[str, Any]:
        piece = self.bytes[number * CONTEXT : (number + 1) * CONTEXT + 1]
        return {"context": piece[:-1], "target": piece[-1], "piece": number}
