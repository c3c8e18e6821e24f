"""A pure loader with two methods over data that may be others of the same length."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from penstock.worker import current_assignment

STEPS = 12
MADE: list[int] = []
"""Batches that this process has made, which a batch shows."""


class TwoMethods:
    def __init__(self, shift: int = 0, remembers: bool = True) -> None:
        here = current_assignment()
        self.number, self.slots = here.global_worker_id, here.total_num_workers
        self.shift, self.done, self.remembers = shift, 0, remembers

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.done = 0
        while self.done < STEPS // self.slots:
            time.sleep(0.005)
            sample = self.done * self.slots + self.number + self.shift
            self.done += 1
            MADE.append(sample)
            yield torch.tensor([sample, self.epoch, len(MADE) * self.remembers])

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]
