"""A finite source over what a test gives it, and what it is asked to do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

from penstock.data.sharded.protocol import Cursor, PositionOf, SavedPosition, ShardedSource
from penstock.data.sharded.runs import Run, RunCursor
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.generators import derive_seed

__all__ = ["Given", "Placed", "again", "first", "position_after", "rest", "whole"]


class Given:
    """Lists of samples, one for each shard; `shuffled`: in another order for each seed and epoch."""

    endless = False

    def __init__(self, shards: Sequence[Sequence[Any]], *, known: bool = True, shuffled: bool = False) -> None:
        self._shards, self._known, self._shuffled = [list(shard) for shard in shards], known, shuffled
        self.num_shards = len(self._shards)
        self.opened = self.made = 0
        """Cursors, and samples that were read from them rather than passed over."""

    def described(self) -> dict[str, Any]:
        return {"kind": "Given", "lengths": [len(shard) for shard in self._shards], "shuffled": self._shuffled}

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return [len(shard) for shard in self._shards] if self._known else None

    def open(
        self,
        shard: int,
        epoch: int,
        seed: int,
        saved: SavedPosition | None = None,
        position_of: PositionOf | None = None,
    ) -> Cursor:
        self.opened += 1
        samples = self._shards[shard]
        if self._shuffled:
            samples = Random(derive_seed(seed, "given", epoch, shard)).sample(samples, len(samples))
        return self.cursor(samples, saved)

    def cursor(self, samples: list[Any], saved: SavedPosition | None) -> Cursor:
        return _Cursor(self, samples, 0 if saved is None else saved["index"])


class Placed(Given):
    """Samples that say what the source was opened with: (epoch, shard, index, position in the order, seed)."""

    def __init__(self, lengths: Sequence[int], *, known: bool = True) -> None:
        super().__init__([range(length) for length in lengths], known=known)

    def open(
        self,
        shard: int,
        epoch: int,
        seed: int,
        saved: SavedPosition | None = None,
        position_of: PositionOf | None = None,
    ) -> Cursor:
        samples = [(epoch, shard, index, position_of and position_of(index), seed) for index in self._shards[shard]]
        return self.cursor(samples, saved)


class _Cursor(RunCursor):
    def __init__(self, source: Given, samples: list[Any], at: int) -> None:
        self._source, self._samples, self._at = source, samples, at

    def take(self, count: int) -> Run:
        first, found = self._at, self._samples[self._at : self._at + count]
        self._at += len(found)
        self._source.made += len(found)
        return Run(found, len(found), lambda number: {"index": first + number})

    def skip(self, count: int) -> int:
        passed = min(count, len(self._samples) - self._at)
        self._at += passed
        return passed

    def saved_position(self) -> SavedPosition:
        return {"index": self._at}

    def close(self) -> None:
        pass


def first(source: ShardedSource, count: int, *, shard: int = 0, epoch: int = 0, seed: int = 1) -> list[Any]:
    """Return the first `count` samples of a shard, or all if it has fewer."""
    cursor = source.open(shard, epoch, seed)
    samples = list(itertools.islice(cursor, count))
    cursor.close()
    return samples


def whole(source: ShardedSource, *, shard: int = 0, epoch: int = 0, seed: int = 1) -> list[Any]:
    return first(source, 1_000_000, shard=shard, epoch=epoch, seed=seed)


def again(source: ShardedSource, cursor: Cursor, *, shard: int = 0, epoch: int = 0, seed: int = 1) -> Cursor:
    """The cursor as another process opens it from a saved state."""
    position = decode_state(encode_state(cursor.saved_position()))
    cursor.close()
    return source.open(shard, epoch, seed, position)


def position_after(
    source: ShardedSource, count: int, saved: SavedPosition = None, *, shard: int = 0, seed: int = 1
) -> SavedPosition:
    """Return the saved position of a cursor that has passed so many samples."""
    cursor = source.open(shard, 0, seed, saved)
    try:
        assert cursor.skip(count) == count
        return decode_state(encode_state(cursor.saved_position()))
    finally:
        cursor.close()


def rest(
    source: ShardedSource, saved: SavedPosition = None, *, shard: int = 0, seed: int = 1, most: int = 1000
) -> list[Any]:
    """Samples of a shard behind a saved position."""
    cursor = source.open(shard, 0, seed, saved)
    try:
        return list(itertools.islice(cursor, most))
    finally:
        cursor.close()
