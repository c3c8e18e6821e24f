"""Arrays whose numbers are computed from the index, so that they take no memory. An order of a million shards needs
several such arrays. They are read like numpy arrays, with an array of indexes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.permutation import Ints

__all__ = ["Consecutive", "Zeros"]


@dataclass(frozen=True)
class Consecutive:
    """Array of the `count` numbers `first`, `first` + 1, and so on, which are computed when they are read."""

    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: Ints) -> Ints:
        return at + self.first

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Ints:
        return np.arange(self.first, self.first + self.count)


@dataclass(frozen=True)
class Zeros:
    """Array of `count` zeros that takes no memory."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: Ints) -> Ints:
        return np.zeros_like(at)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Ints:
        return np.zeros(self.count, np.int64)
