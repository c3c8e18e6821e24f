"""Sequence of a dataset's shards that makes a Shard object only when the shard is used. A million objects would take
gigabytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from penstock.data.formats.shards import Shard

__all__ = ["ShardsOnDemand"]


class ShardsOnDemand(Sequence[Shard]):
    """Base class of sequences of shards that make a Shard object only when the shard is used."""

    @abstractmethod
    def _shard(self, number: int) -> Shard:
        """Return the shard with this number, which is from 0 to len(self) - 1."""

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> list[Shard]: ...
    def __getitem__(self, at: int | slice) -> Shard | list[Shard]:
        numbers = range(len(self))[at]
        return self._shard(numbers) if isinstance(numbers, int) else [self._shard(number) for number in numbers]
