"""Shards of indexable pieces: ranges of positions in a computed order of all records (ordering/sharded_order.py). A
saved position is one number. While user code reads a record, the random generators are seeded by (seed, epoch,
position), so augmentation does not depend on the shard, the worker, or earlier reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.data.loading.keyed_random import Seeds, seed_generators, seeds_of
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.sharded_order import ShardedOrder
from penstock.data.sharded.protocol import SavedPosition
from penstock.data.sharded.runs import Run, RunCursor
from penstock.data.sharded.sources.isolation import OwnGenerators
from penstock.data.sharded.sources.pieces import Pieces
from penstock.proto.errors import SampleCorruptError, ShardUnavailableError, StateCorruptError

POSITIONS_PER_CALL = 1024
"""Number of positions whose records are found in one call, 0.1 us each."""
EXAMINED_POSITIONS = 256
"""Most upcoming positions, at equal distances, whose parts are looked up to prefetch them."""


def shard_range(records: int, shards: int, shard: int) -> tuple[int, int]:
    """Return a shard's first position and end. All integers, so each record is in one shard."""
    return shard * records // shards, (shard + 1) * records // shards


class PieceParts:
    """Parts of all pieces: the shards or row groups of a StreamingDataset's files; any other piece is one part."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        sizes = [pieces.sizes(number) for number in range(len(pieces))]
        self.sizes: Ints = np.concatenate(sizes)
        self.records = int(self.sizes.sum())
        lengths = np.array([int(own.sum()) for own in sizes], np.int64)
        self._starts = np.cumsum(lengths) - lengths
        counts = np.array([len(own) for own in sizes], np.int64)
        self._first_parts = np.cumsum(counts) - counts
        self._streaming = [n for n in range(len(pieces)) if pieces.streaming(n) is not None]
        self._wanted: dict[int, Ints] = {}
        """Parts that each prefetching cursor needs next, by its `id()`."""

    def found(self, ids: Ints) -> list[tuple[int, int]]:
        """Return (piece, offset in it) of each record; they are numbered through all pieces."""
        piece = np.searchsorted(self._starts, ids, side="right") - 1
        return list(zip(piece.tolist(), (ids - self._starts[piece]).tolist(), strict=True))

    @property
    def fetches(self) -> bool:
        return bool(self._streaming)

    def want(self, cursor: int, parts: Ints) -> None:
        """Set which parts a cursor needs next, and prefetch those that all cursors need, round robin."""
        if parts.size:
            self._wanted[cursor] = parts
        else:
            self._wanted.pop(cursor, None)
        longest = max((len(own) for own in self._wanted.values()), default=0)
        in_turn = [own[rank] for rank in range(longest) for own in self._wanted.values() if rank < len(own)]
        wanted = np.fromiter(dict.fromkeys(in_turn), np.int64)
        owner = np.searchsorted(self._first_parts, wanted, side="right") - 1
        for number in self._streaming:
            dataset = self.pieces.streaming(number)
            assert dataset is not None
            units = dataset.read_units(wanted[owner == number] - self._first_parts[number])
            dataset.keep_open(units)
            dataset.fetch_ahead(units)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wanted": {}}


class RangeCursor(RunCursor):
    def __init__(
        self,
        parts: PieceParts,
        order: ShardedOrder | None,
        epoch: int,
        begin: int,
        end: int,
        ahead: int,
        saved: SavedPosition,
        key: int | None = None,
        *,
        tolerant: bool = False,
    ):
        """`ahead`: upcoming positions whose parts are prefetched; `key`: seeds the generators for each record;
        `tolerant`: `next` returns the error of a record that cannot be decoded."""
        if saved is not None and (type(saved) is not int or not 0 <= saved <= end - begin):
            raise StateCorruptError(
                f"the saved position in a shard of {end - begin} records is damaged, or of other data: {saved!r:.200}"
            )
        self._parts, self._order, self._epoch, self._ahead = parts, order, epoch, ahead
        self._begin, self._end, self._at = begin, end, begin + (saved or 0)
        self._found: list[tuple[int, int]] = []
        """(piece, offset) of the records at the next positions, from `_found_from` on."""
        self._found_from = begin
        self._tolerant = tolerant
        self._key, self._seeds = key, list[Seeds]()
        self._random: OwnGenerators | None = None
        self._prefetched_from = -1

    def __next__(self) -> Any:  # as `take(1)`, in half of its time: a round robin reads each sample by itself
        index = self._next_found()
        if index < 0:
            raise StopIteration
        self._at += 1
        try:
            return self._record(index, *self._found[index])
        except SampleCorruptError as error:
            if not self._tolerant:
                raise
            return error

    def _next_found(self) -> int:
        """Return the index in `_found` of the next record; -1 at the end of the shard."""
        if self._at >= self._end:
            self.close()
            return -1
        index = self._at - self._found_from
        if not 0 <= index < len(self._found):
            self._find()
            index = 0
        return index

    def take(self, count: int) -> Run:
        index = self._next_found()
        if index < 0:
            return Run()
        found = self._found[index : index + count]
        first, size = self._at - self._begin, len(found)
        self._at += size
        return Run(self._parts.pieces.listed(found) or self._records(index, found), size, first.__add__)

    def _records(self, first: int, found: Sequence[tuple[int, int]]) -> Iterator[Any]:
        for index, (piece, offset) in enumerate(found, first):
            yield self._record(index, piece, offset)

    def _record(self, index: int, piece: int, offset: int) -> Any:
        pieces = self._parts.pieces
        if self._key is None or not pieces.may_draw(piece):
            return pieces.record(piece, offset)
        return self._drawn(self._key, index, piece, offset)

    def _drawn(self, key: int, index: int, piece: int, offset: int) -> Any:
        """Return a record, read by user code while the random generators are seeded for it."""
        if not self._seeds:
            positions = np.arange(self._found_from, self._found_from + len(self._found))
            self._seeds = seeds_of(key, self._epoch & (2**62 - 1), positions)
        if self._random is None:
            self._random = OwnGenerators(0)
        with self._random:
            seed_generators(self._seeds[index])
            return self._parts.pieces.record(piece, offset)

    def skip(self, count: int) -> int:
        count = min(count, self._end - self._at)
        self._at += count
        return count

    def saved_position(self) -> SavedPosition:
        return self._at - self._begin

    def close(self) -> None:
        self._found, self._found_from, self._seeds = [], self._begin, []
        if self._prefetched_from >= 0:
            self._prefetched_from = -1
            self._parts.want(id(self), np.zeros(0, np.int64))
        self._parts.pieces.left(id(self))

    def __del__(self) -> None:
        if hasattr(self, "_prefetched_from"):  # __init__ may have failed before this attribute was set
            with contextlib.suppress(ShardUnavailableError):  # the dataset was closed before
                self.close()

    def _find(self) -> None:
        assert self._order is not None
        self._parts.pieces.read_by(id(self))
        last = self._prefetched_from
        if self._parts.fetches and (last < 0 or self._at - last >= self._ahead // 4):
            self._prefetched_from = self._at
            last = min(self._end, self._at + self._ahead)
            at = np.unique(np.linspace(self._at, last - 1, min(EXAMINED_POSITIONS, last - self._at)).astype(np.int64))
            self._parts.want(id(self), self._order.shards(self._epoch, at))
        end = min(self._end, self._at + POSITIONS_PER_CALL)
        self._found = self._parts.found(self._order.ids(self._epoch, np.arange(self._at, end)))
        self._found_from, self._seeds = self._at, []
