"""Loaders that are right for a while after they were restored, and wrong then."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

BATCHES = 12
"""Number of batches in an epoch."""


def _order(seed: int) -> list[int]:
    order = list(range(BATCHES))
    random.Random(seed).shuffle(order)
    return order


class Ordered:
    """Yields an epoch's order, which comes of a seed that its state has."""

    fields: tuple[str, ...] = ("done", "seed")

    def __init__(self) -> None:
        self.done, self.seed, self.resumed = 0, 0, False

    def begin(self) -> None:
        """Draw what an epoch needs."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.resumed:
            self.resumed = False
        else:
            self.done = 0
            self.begin()
        return self.rest()

    def rest(self) -> Iterator[torch.Tensor]:
        order = _order(self.seed)
        while self.done < len(order):
            self.done += 1
            yield torch.tensor([order[self.done - 1]])

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.fields}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.resumed = True


class LooksAhead:
    """Restored, it has only the next `right` batches as they were: the rest of its order it draws anew."""

    def __init__(self, right: int, batches: int) -> None:
        self.right, self.batches = right, batches
        self.done, self.from_here = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        wrong = self.from_here + self.right if self.from_here else self.batches
        self.done, self.from_here = self.from_here, 0
        while self.done < self.batches:
            self.done += 1
            yield torch.tensor([self.done - 1 if self.done <= wrong else -self.done])

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = self.from_here = state["done"]


def looks_ahead(right: int = 5, batches: int = 1000) -> LooksAhead:
    return LooksAhead(right, batches)


class NeverTheSame(Ordered):
    """Its state has a number in it that is another one each time."""

    asked = 0

    def begin(self) -> None:
        self.seed = int(torch.randint(1 << 30, ()))

    def state_dict(self) -> dict[str, Any]:
        NeverTheSame.asked += 1
        return super().state_dict() | {"asked": NeverTheSame.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({name: state[name] for name in self.fields})


def never_the_same() -> NeverTheSame:
    return NeverTheSame()
