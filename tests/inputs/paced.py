"""A loader with states whose batches take PACED_S seconds, by its daemon's environment: machines fast and slow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from penstock.worker import current_assignment


class Paced:
    """Counts; the number says who streamed it and which it is, and nothing about where it ran."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.done = 0
        self.me = current_assignment().global_worker_id

    def __iter__(self) -> Iterator[torch.Tensor]:
        seconds = float(os.environ.get("PACED_S", "0"))
        while self.done < self.count:
            time.sleep(seconds)
            self.done += 1
            yield torch.tensor([self.me, self.done])
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def paced(count: int) -> Paced:
    return Paced(count)
