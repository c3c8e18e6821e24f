"""Loaders that tell whose they are, and what they may do."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

HELD = 50 << 20
"""Bytes that each batch of a loader that grows leaves behind."""


def _may_read(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def _may_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


class Tells:
    """`batches` batches of [number, uid, gid, may read `secret`, may signal `daemon`, may become root, has a home]."""

    def __init__(self, batches: int, secret: str, daemon: int) -> None:
        self.batches, self.secret, self.daemon, self.done = batches, secret, daemon, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.done < self.batches:
            self.done += 1
            yield torch.tensor([self.done, os.getuid(), os.getgid(), *map(int, self._rights())])

    def _rights(self) -> tuple[bool, bool, bool, bool]:
        readable, signalled = _may_read(self.secret), _may_signal(self.daemon)
        try:
            os.setuid(0)
            becomes_root = True
        except PermissionError:
            becomes_root = False
        home = os.environ["HOME"] != "/root"
        return readable, signalled, becomes_root, home

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def tells(batches: int, secret: str, daemon: int) -> Tells:
    return Tells(batches, secret, daemon)


class _Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getuid()])


def in_processes() -> DataLoader[torch.Tensor]:
    """torch's own loader with processes of its own, which make sockets and temporary files."""
    with tempfile.TemporaryFile():
        return DataLoader(_Rows(), batch_size=2, num_workers=2, multiprocessing_context=get_context("fork"))


def grows(batches: int) -> Iterator[torch.Tensor]:
    """Holds more with each batch."""
    held = []
    for number in range(batches):
        held.append(b"x" * HELD)
        time.sleep(0.3)
        yield torch.tensor([number])


def many(wanted: int) -> list[torch.Tensor]:
    """Return one batch: how many of `wanted` processes this one could start."""
    started = []
    try:
        for _ in range(wanted):
            started.append(subprocess.Popen(["sleep", "60"]))
    except BlockingIOError:
        pass
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [torch.tensor([len(started)])]
