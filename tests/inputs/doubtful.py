"""Loaders whose states are not what they seem, as libraries have them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from penstock.client import get_worker_state
from penstock.worker import current_assignment


class Twice:
    """Once restored, it counts the batches twice that it passes over (a dataset without states of its own)."""

    def __init__(self, batches: int) -> None:
        self.batches, self.done, self.skip = batches, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        skip, self.skip, self.done = self.skip, 0, self.skip
        for number in range(self.batches):
            self.done += 1
            if number >= skip:
                yield torch.tensor([number])
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["done"]


def twice(batches: int = 1000) -> Twice:
    return Twice(batches)


class Shuffled:
    """Its order depends on the epoch, which its state has, or has not."""

    def __init__(self, batches: int, *, saves_epoch: bool) -> None:
        self.batches, self.saves_epoch = batches, saves_epoch
        self.epoch, self.done = -1, 0
        self.resumed = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.resumed:
            self.epoch, self.done = self.epoch + 1, 0
        self.resumed = False
        order = list(range(self.batches))
        random.Random(self.epoch).shuffle(order)
        return self._rest(order)

    def _rest(self, order: list[int]) -> Iterator[torch.Tensor]:
        while self.done < len(order):
            self.done += 1
            yield torch.tensor([order[self.done - 1]])

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done} | ({"epoch": self.epoch} if self.saves_epoch else {})

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done, self.resumed = state.get("epoch", 0), state["done"], True


def counts_epochs(batches: int = 12) -> Shuffled:
    return Shuffled(batches, saves_epoch=True)


class CountsAnew:
    """Rotates its batches by the number of epochs that this object began, and saves how far it is in one. Restored at
    an epoch's end it is at it again, and begins the next one as the first, just as a new loader does."""

    def __init__(self, batches: int) -> None:
        self.batches, self.done, self.epochs = batches, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        epoch = self.epochs
        while self.done < self.batches:
            self.done += 1
            yield torch.tensor([(self.done + 5 * epoch) % self.batches])
        self.done = 0
        self.epochs += 1

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]
        self.epochs = -1


def counts_anew(batches: int = 12) -> CountsAnew:
    return CountsAnew(batches)


class DrawsLate:
    """Draws an epoch's order when its first batch is asked for; restored at an epoch's start, before."""

    def __init__(self, batches: int) -> None:
        self.batches, self.done = batches, 0
        self.seed: int | None = None
        self.resumed = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.resumed and self.seed is None:
            self.seed = int(torch.randint(1 << 30, ()))
        elif not self.resumed:
            self.seed, self.done = None, 0
        self.resumed = False
        return self._rest()

    def _rest(self) -> Iterator[torch.Tensor]:
        if self.seed is None:
            self.seed = int(torch.randint(1 << 30, ()))
        order = list(range(self.batches))
        random.Random(self.seed).shuffle(order)
        while self.done < len(order):
            self.done += 1
            yield torch.tensor([order[self.done - 1]])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.seed, self.resumed = state["done"], state["seed"], True


def draws_late(batches: int = 12) -> DrawsLate:
    return DrawsLate(batches)


class Streamed:
    """Four methods, with the habits of a well-known model zoo: load_state_dict reads what deaggregate_state_dict made,
    and no value of state_dict; and its state adds what this launch streamed to what former launches had."""

    def __init__(self, rows: int) -> None:
        self.rows, self.before = rows, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        place = current_assignment()
        at = self.before
        while True:
            first = at * place.total_num_workers + place.global_worker_id * self.rows
            yield torch.arange(first, first + self.rows)
            at += self.rows

    def state_dict(self) -> dict[str, int]:
        return {"samples": get_worker_state().samples_streamed + self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["my_samples"]

    def aggregate_state_dict(self, worker_states: list[dict[str, int]]) -> dict[str, int]:
        return {"all_samples": sum(state["samples"] for state in worker_states)}

    def deaggregate_state_dict(self, aggregated: dict[str, int]) -> dict[str, int]:
        return {"my_samples": aggregated["all_samples"] // current_assignment().total_num_workers}


def streamed(rows: int = 4) -> Streamed:
    return Streamed(rows)


class Arithmetic(Streamed):
    """Knows its state at any place."""

    loads_own_state = exact_states = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["samples"] if "samples" in state else state["my_samples"]

    @staticmethod
    def advance_state(state: dict[str, int], batches: int) -> dict[str, int]:
        return {"samples": state["samples"] + 4 * batches}


def arithmetic() -> Arithmetic:
    return Arithmetic(4)
