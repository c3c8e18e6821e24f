"""Pure loaders with a generator of their own whose batches take PACED_S seconds, by the environment."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import torch


class Drawn:
    """Draws; each batch depends on all draws of its epoch before it."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch, self.done = count, 0, 0
        self.random = random.Random(3)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.done < self.count:
            time.sleep(float(os.environ.get("PACED_S", "0")))
            self.done += 1
            yield torch.tensor([self.epoch, self.done, self.random.getrandbits(32)])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def drawn(count: int) -> Drawn:
    return Drawn(count)
