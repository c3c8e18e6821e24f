"""A shard of indexable pieces: a range of positions in the order of all their records.

The order of an epoch is a function (ordering/order.py), and shard l of L has the positions from floor(l N / L) to
floor((l + 1) N / L) of it: in whole numbers, so that each record is in one shard, whatever N and L are. A cursor is a
number, and skips by adding to it.

A record that user code reads has the process's random generators for itself, seeded by (seed, epoch, position): random
augmentation is the same in whatever shard or worker it comes, and whatever was read before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.data.loading.keyed_random import Seeds, seed_generators, seeds_of
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.sharded_order import ShardedOrder
from penstock.data.sharded.protocol import Token
from penstock.data.sharded.sources.pieces import Pieces
from penstock.data.sharded.sources.randomness import OwnGenerators
from penstock.proto.errors import StateCorruptError

__all__ = ["PieceParts", "RangeCursor", "cut"]

FOUND_AT_ONCE = 1024
"""Positions whose records are found in one go: it takes 0.1 us each then."""
LOOKED_AT = 256
"""Positions, of those ahead, by which the parts that are needed next are found."""


def cut(records: int, shards: int, shard: int) -> tuple[int, int]:
    """Where a shard begins and ends among so many records."""
    return shard * records // shards, (shard + 1) * records // shards


class PieceParts:
    """The parts of all pieces in a row: one for each piece, and of a StreamingDataset one for each of its shards."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        sizes = [pieces.sizes(number) for number in range(len(pieces))]
        self.sizes: Ints = np.concatenate(sizes)
        self.records = int(self.sizes.sum())
        lengths = np.array([int(own.sum()) for own in sizes], np.int64)
        self._starts = np.cumsum(lengths) - lengths
        """Number of the first record of each piece."""
        counts = np.array([len(own) for own in sizes], np.int64)
        self._first_parts = np.cumsum(counts) - counts
        self._streaming = [n for n in range(len(pieces)) if pieces.streaming(n) is not None]
        self._wanted: dict[int, Ints] = {}
        """Of each cursor that reads ahead, the parts that it needs next."""

    def found(self, ids: Ints) -> list[tuple[int, int]]:
        """(piece, offset in it) of records."""
        piece = np.searchsorted(self._starts, ids, side="right") - 1
        return list(zip(piece.tolist(), (ids - self._starts[piece]).tolist(), strict=True))

    @property
    def fetches(self) -> bool:
        """Some piece is fetched from elsewhere."""
        return bool(self._streaming)

    def want(self, cursor: int, parts: Ints) -> None:
        """Have these fetched in the background, the first ones first; an empty array ends what the cursor wanted."""
        if parts.size:
            self._wanted[cursor] = parts
        else:
            self._wanted.pop(cursor, None)
        longest = max((len(own) for own in self._wanted.values()), default=0)
        turns = [own[turn] for turn in range(longest) for own in self._wanted.values() if turn < len(own)]
        wanted = np.fromiter(dict.fromkeys(turns), np.int64)
        owner = np.searchsorted(self._first_parts, wanted, side="right") - 1
        for number in self._streaming:
            dataset = self.pieces.streaming(number)
            assert dataset is not None
            dataset.fetch_ahead(wanted[owner == number] - self._first_parts[number])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wanted": {}}


class RangeCursor(Iterator[Any]):
    """Positions [begin, end) of an epoch's order, read along."""

    def __init__(
        self,
        parts: PieceParts,
        order: ShardedOrder | None,
        epoch: int,
        begin: int,
        end: int,
        ahead: int,
        token: Token,
        key: int | None = None,
    ):
        """`order`: None where there is no record at all. `ahead`: positions whose parts are fetched. `key`: of the
        random generators that a record has for itself; None: it has none."""
        if token is not None and (type(token) is not int or not 0 <= token <= end - begin):
            raise StateCorruptError(f"a place in a shard of {end - begin} records that cannot be: {token!r:.200}")
        self._parts, self._order, self._epoch, self._ahead = parts, order, epoch, ahead
        self._begin, self._end, self._at = begin, end, begin + (token or 0)
        self._found: list[tuple[int, int]] = []
        self._found_from = begin
        self._key, self._seeds = key, list[Seeds]()
        self._random: OwnGenerators | None = None
        self._looked = -1
        """Position from which was last looked ahead."""

    def __next__(self) -> Any:
        if self._at >= self._end:
            self.close()
            raise StopIteration
        index = self._at - self._found_from
        if not 0 <= index < len(self._found):
            self._find()
            index = 0
        record = self._read(index)
        self._at += 1
        return record

    def _read(self, index: int) -> Any:
        pieces, (piece, offset) = self._parts.pieces, self._found[index]
        if self._key is None or not pieces.may_draw(piece):
            return pieces.record(piece, offset)
        if not self._seeds:
            positions = np.arange(self._found_from, self._found_from + len(self._found))
            self._seeds = seeds_of(self._key, self._epoch & (2**62 - 1), positions)
        if self._random is None:
            self._random = OwnGenerators(0)
        with self._random:
            seed_generators(self._seeds[index])
            return pieces.record(piece, offset)

    def skip(self, count: int) -> int:
        count = min(count, self._end - self._at)
        self._at += count
        return count

    def token(self) -> Token:
        return self._at - self._begin

    def close(self) -> None:
        self._found, self._found_from, self._seeds = [], self._begin, []
        if self._looked >= 0:
            self._looked = -1
            self._parts.want(id(self), np.zeros(0, np.int64))
        self._parts.pieces.left(id(self))

    def __del__(self) -> None:
        if hasattr(self, "_looked"):  # its making went so far
            self.close()

    def _find(self) -> None:
        assert self._order is not None
        self._parts.pieces.read_by(id(self))
        if self._parts.fetches and (self._looked < 0 or self._at - self._looked >= self._ahead // 4):
            self._looked = self._at
            last = min(self._end, self._at + self._ahead)
            at = np.unique(np.linspace(self._at, last - 1, min(LOOKED_AT, last - self._at)).astype(np.int64))
            self._parts.want(id(self), self._order.shards(self._epoch, at))
        end = min(self._end, self._at + FOUND_AT_ONCE)
        self._found = self._parts.found(self._order.ids(self._epoch, np.arange(self._at, end)))
        self._found_from, self._seeds = self._at, []
