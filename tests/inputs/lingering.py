"""A loader that stays in its next(), with a process of its own beside it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.worker import current_assignment


class Lingers(torch.utils.data.IterableDataset[Any]):
    """Yields eight batches in an epoch. In epoch `at`, slot 1 stays for `seconds` in its next() after two batches, and
    writes a file `left` if it closes its iterator."""

    def __init__(self, seconds: float, folder: str, at: int) -> None:
        self.seconds, self.folder, self.at, self.epoch = seconds, Path(folder), at, 0
        self.slot = current_assignment().slot

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        try:
            for number in range(8):
                if (self.epoch, self.slot, number) == (self.at, 1, 2):
                    self._linger()
                yield torch.full((4096,), value(self.epoch, self.slot, number))
        finally:
            (self.folder / f"left{self.slot}").touch()

    def _linger(self) -> None:
        beside = subprocess.Popen(["sleep", "300"])
        (self.folder / "lingers").write_text(str(beside.pid))
        time.sleep(self.seconds)


class Acknowledged(Lingers):
    """Lingers in slot 1 once its process has read that the loop has taken three batches. The loop says so while it
    waits for slot 0's fourth batch, which is made only then."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(8):
            if (self.epoch, self.slot, number) == (0, 0, 3):
                while not (self.folder / "lingers").exists():
                    time.sleep(0.01)
            elif (self.epoch, self.slot) == (0, 1) and number in (3, 4):
                time.sleep(0.7)  # after a slow batch the process reads what the loop says
            elif (self.epoch, self.slot, number) == (0, 1, 5):
                self._linger()
            yield torch.full((4096,), value(self.epoch, self.slot, number))


def value(epoch: int, slot: int, number: int) -> int:
    return 1000 * epoch + 100 * slot + number


def lingering(seconds: float, folder: str, at: int = 0) -> Any:
    return torch.utils.data.DataLoader(Lingers(seconds, folder, at), batch_size=None)


def acknowledged(folder: str) -> Any:
    return torch.utils.data.DataLoader(Acknowledged(600, folder, 0), batch_size=None)
