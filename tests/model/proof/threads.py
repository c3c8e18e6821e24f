"""Loader that starts a thread which makes its batches, when it is made."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch

from penstock.worker import current_assignment


class Threaded:
    """Its thread makes numbers without end; an epoch takes the next ones."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.made: queue.Queue[int] = queue.Queue(4)
        threading.Thread(target=self._make, daemon=True).start()

    def _make(self) -> None:
        number = 0
        while True:
            self.made.put(number)
            number += 1

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield torch.tensor([current_assignment().global_worker_id, self.made.get(), float(torch.rand(()))])

    def __len__(self) -> int:
        return self.length
