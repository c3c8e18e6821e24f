"""Loaders that end runs in each of the ways that an operator is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch


def ending(how: str, batches: int = 3, seconds: float = 0.0) -> Iterator[torch.Tensor]:
    """Some batches that take so long each, and then the end: "ends", "raises", "hangs" or "kills" its process."""
    for number in range(batches):
        time.sleep(seconds)
        yield torch.tensor(number)
    if how == "raises":
        raise ValueError("no such image")
    if how == "hangs":
        time.sleep(3600)
    if how == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
