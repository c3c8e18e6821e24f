"""The plainest sources in logical shards: numbers in lists, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.data.sharded.protocol import PositionOf, SavedPosition
from penstock.proto.errors import StateCorruptError

__all__ = ["Counting", "Listed"]


class Listed:
    """Finite: shard s of epoch e has the samples (e * 1000 + s) * 1000 + i for i below its length."""

    endless = False

    def __init__(self, lengths: Sequence[int], *, known: bool = True, name: str = "listed") -> None:
        """`known`: whether it says its lengths beforehand."""
        self._lengths, self._known, self._name = list(lengths), known, name
        self.num_shards = len(self._lengths)
        self.made = 0
        """Samples that were really made."""
        self.opened: list[tuple[int, int]] = []
        """(shard, index at which it was opened)."""
        self.saved = 0
        """Number of positions that were saved."""

    def described(self) -> dict[str, Any]:
        return {"kind": self._name, "lengths": list(self._lengths)}

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return self.counted(epoch) if self._known else None

    def counted(self, epoch: int) -> list[int]:
        """The lengths; each epoch has them the other way round."""
        return self._lengths[:: -1 if epoch % 2 else 1]

    def open(
        self,
        shard: int,
        epoch: int,
        seed: int,
        saved: SavedPosition | None = None,
        position_of: PositionOf | None = None,
    ) -> _Reading:
        self.opened.append((shard, _start(saved)))
        return _Reading(self, (epoch * 1000 + shard) * 1000, self.counted(epoch)[shard], _start(saved))


class Counting:
    """Endless: shard s has the samples (s, i, position, seed), where `position` is what the loader gives for it."""

    endless = True

    def __init__(self, shards: int, *, empty: int | None = None) -> None:
        """`empty`: a shard that has nothing, against its promise."""
        self.num_shards, self._empty = shards, empty
        self.made, self.saved = 0, 0
        self.opened: list[tuple[int, int]] = []

    def described(self) -> dict[str, Any]:
        return {"kind": "counting", "shards": self.num_shards}

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return None

    def open(
        self,
        shard: int,
        epoch: int,
        seed: int,
        saved: SavedPosition | None = None,
        position_of: PositionOf | None = None,
    ) -> _Reading:
        assert epoch == 0, "an endless source goes on by itself"
        own = position_of or (lambda index: index * self.num_shards + shard)
        length = 0 if shard == self._empty else None
        self.opened.append((shard, _start(saved)))
        return _Reading(self, shard, length, _start(saved), own, seed)


class _Reading:
    def __init__(
        self,
        source: Listed | Counting,
        first: int,
        length: int | None,
        at: int,
        position_of: PositionOf | None = None,
        seed: int = 0,
    ) -> None:
        self._source, self._first, self._length, self._at = source, first, length, at
        self._position_of, self._seed = position_of, seed

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> Any:
        if self._length is not None and self._at >= self._length:
            raise StopIteration
        at, self._at = self._at, self._at + 1
        self._source.made += 1
        return self._first + at if self._position_of is None else (self._first, at, self._position_of(at), self._seed)

    def skip(self, count: int) -> int:
        passed = count if self._length is None else min(count, self._length - self._at)
        self._at += passed
        return passed

    def saved_position(self) -> SavedPosition:
        self._source.saved += 1
        return {"at": self._at}

    def close(self) -> None:
        pass


def _start(saved: SavedPosition | None) -> int:
    if saved is None:
        return 0
    if not isinstance(saved, dict) or type(saved.get("at")) is not int or saved["at"] < 0:
        raise StateCorruptError(f"a saved position that no list gave: {saved!r}")
    return int(saved["at"])
