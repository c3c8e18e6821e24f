"""Pure loaders whose batches say which epoch they belong to: what user code sees of it, and what it draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.worker import current_assignment

BATCHES = 45
"""Batches of one worker in an epoch: more than a ring holds."""


class Labelled(torch.utils.data.IterableDataset[list[int]]):
    def __init__(self) -> None:
        self.epoch, self.at = -1, 0
        self.generator = torch.Generator().manual_seed(3)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        a = current_assignment()
        while self.at < BATCHES:
            self.at += 1
            own = int(torch.randint(1 << 30, (1,), generator=self.generator))
            yield [a.epoch, self.epoch, a.slot, self.at, own, int(torch.randint(1 << 30, (1,)))]
        self.at = 0


class Aggregated(Labelled):
    """The same, with four methods, for any of its own states."""

    loads_own_state = True

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def aggregate_state_dict(self, states: list[dict[str, int]]) -> dict[str, Any]:
        return {"each": states}

    def deaggregate_state_dict(self, aggregated: dict[str, Any]) -> dict[str, int]:
        return dict(aggregated["each"][current_assignment().global_worker_id])


def labelled() -> Any:
    return Labelled()


def aggregated() -> Any:
    return Aggregated()
