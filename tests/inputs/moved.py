"""Loaders that go on where another library stopped: rows that say which they are."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from penstock.data import MapLoader, StreamingDataset, StreamingLoader


class Rows:
    """Row i is i. The process dies once, at the row that the file `killing` names."""

    def __init__(self, length: int, killing: str = "") -> None:
        self.length, self.killing = length, Path(killing)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> int:
        if self.killing.is_file() and int(self.killing.read_text()) == number:
            self.killing.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return number


def rows(length: int, batch: int, order_file: str, killing: str = "") -> MapLoader:
    return MapLoader(Rows(length, killing), global_batch_size=batch, shuffle=True, order_file=order_file)


def shards(folder: str, batch: int, order_file: str) -> StreamingLoader:
    return StreamingLoader(StreamingDataset(folder), global_batch_size=batch, shuffle=True, order_file=order_file)


def numbers(batch: Any) -> list[int]:
    found: list[int] = (batch["number"] if isinstance(batch, dict) else batch).tolist()
    return found
