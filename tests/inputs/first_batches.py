"""Loaders whose slot 1 makes other batches in each process, by what no walk finds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from penstock.worker import current_assignment


class Kept:
    """Loader with two methods. `entropy`: slot 1 draws from the system's."""

    def __init__(self, entropy: bool) -> None:
        self.entropy, self.done = current_assignment().slot == 1 and entropy, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.done = 0
        while self.done < 200:
            self.done += 1
            time.sleep(0.002)
            drawn = int.from_bytes(os.urandom(4), "little") if self.entropy else 0
            yield torch.tensor([self.done, drawn])

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Scalars(Kept):
    """What slot 1 draws, from its second batch on, is a value without rows."""

    def __iter__(self) -> Iterator[Any]:
        for number, drawn in super().__iter__():
            yield {"rows": number.repeat(4), "drawn": int(drawn) * int(number > 1)}


class Queue:
    """Loader without methods, of which no second instance is compared."""

    def __init__(self, entropy: bool) -> None:
        self._kept = Kept(entropy)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kept)
