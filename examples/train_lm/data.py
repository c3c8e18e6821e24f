"""Input: windows of Python's own source text, shuffled anew in each epoch."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch

from penstock.data import MapLoader

__all__ = ["WINDOW", "Windows", "corpus", "input_fn"]

WINDOW = 128
"""Number of bytes of context of the model. A window has one byte more, the last one to predict."""


def input_fn(batch_size: int, num_windows: int) -> MapLoader:
    """Return the loader; Penstock calls this in each worker. The arguments are those of the DataLoader. Batches are
    dicts of

    tokens: uint8, [batch_size, WINDOW + 1]; window: int64, [batch_size], the windows' numbers.
    """
    return MapLoader(Windows(num_windows), batch_size=batch_size, shuffle=True, tail="drop", reseed=False)


class Windows(torch.utils.data.Dataset[dict[str, Any]]):
    """Dataset of windows (pieces of equal length) of the text."""

    def __init__(self, count: int) -> None:
        self.windows = torch.frombuffer(corpus(count * WINDOW + 1), dtype=torch.uint8).unfold(0, WINDOW + 1, WINDOW)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"tokens": self.windows[number], "window": number}


def corpus(size: int) -> bytearray:
    """Return the first `size` bytes of the standard library's source text, its files in order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            return text[:size]
    raise ValueError(f"size must be at most {len(text)}, the bytes of the text, got {size}. Pass fewer num_windows")
