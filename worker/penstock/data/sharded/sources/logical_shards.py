"""Division of a list of pieces into logical shards: ranges of positions in the order of all records, if all pieces are
indexable (indexed_pieces.py), or whole pieces (sequential_pieces.py), read sequentially (opaque.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from penstock.data.arguments import at_least_one
from penstock.data.loading.streaming_loader import BLOCK
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.sharded_order import ShardedOrder
from penstock.data.recent import Recent
from penstock.data.sharded.layers.layer import UNREADABLE, SearchLimit, entered
from penstock.data.sharded.layers.mapped import without_errors
from penstock.data.sharded.protocol import Cursor, KnownRecords, PositionOf, SavedPosition
from penstock.data.sharded.sources.indexed_pieces import PieceParts, RangeCursor, shard_range
from penstock.data.sharded.sources.lines import LineFile, cut_files
from penstock.data.sharded.sources.pieces import Pieces, one_each
from penstock.data.sharded.sources.sequential_pieces import SequentialCursor, SequentialPieces
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.proto.state.generators import derive_seed

MAX_OPEN = 128
"""An eighth of the usual limit of file descriptors. A process needs one for each shard of a finite source."""
LISTED = 16
"""Largest length of a list that a source's description contains in full, not as a digest."""
KEPT_ORDERS = 2


class LogicalShards:
    """Source of the records of some pieces (files, tables, datasets), divided into a fixed number of logical shards, so
    that any number of boxes and workers can read them in one order.

        LogicalShards([LineFile(path) for path in sorted(paths)], shards=240)

    A piece is one of these:

    - an indexable object, with `len(piece)` and `piece[i]`: a list, an array or memmap, a torch Dataset, a
      StreamingDataset, or a pyarrow Table, whose records are its rows;
    - an iterable that can be iterated repeatedly;
    - a function without arguments that returns one of the above, called when the piece is needed. The returned object's
      `close()` is called afterwards, if it exists. For an iterator or a generator, give the function that makes it.

    **All pieces are indexable:** the N records of an epoch have one order, like that of a StreamingLoader. With
    `shuffle`, pieces are permuted, and then records within blocks of pieces. Shard l of L gets the positions from
    floor(l N / L) to floor((l + 1) N / L) - 1 of this order, none if there are too few.

    **Otherwise** each piece is assigned to one shard as a whole, and its records come in its own order (WindowShuffled
    can shuffle them). docs/sharded.md says how such pieces are resumed, and which random numbers are seeded.
    """

    endless = False

    def __init__(
        self,
        pieces: Sequence[Any],
        *,
        shards: int,
        counts: Sequence[int] | None = None,
        shuffle: bool = False,
        shuffle_block: int | None = BLOCK,
        max_open: int = MAX_OPEN,
        names: Sequence[str] | None = None,
        capture_rng: bool = True,
    ) -> None:
        """
        Args:
            pieces: list of at least one piece.
            shards: number of shards, which must stay the same when the number of boxes or workers changes: choose at
                least the largest number of workers that may read at a time.
            counts: number of records of each piece; None: unknown. With counts, no function but the first is called
                only to get a length, and the length of an iterable is known. Each count is checked when the piece is
                read.
            shuffle: True: shuffle, differently in each epoch, by the seed of the loader.
            shuffle_block: approximate number of records that are shuffled with each other, if all pieces are indexable:
                those of some whole pieces (of a StreamingDataset, whole shards or row groups). None: all records.
            max_open: largest number of pieces that a process has open; the least recently used one is closed first.
                Below the number of shards of a finite source, which is read round robin, pieces are opened and closed
                all the time.
            names: name of each piece, such as its file's; None: errors number the pieces, in which each range of a
                LineFile counts as one. A state that was saved with other names is refused.
            capture_rng: True: seed the process's random generators for each piece or record while user code reads it,
                and restore them afterwards. False: leave them alone, which saves 15 us a record; the pieces must then
                not use them. Lists, arrays, tables and StreamingDatasets without random clips draw nothing in any case.

        Raises:
            InvalidArgumentError: an invalid piece or argument.
            DatasetError: a piece has another length than in counts.

        If a function raises OSError, the source raises DatasetError when it is read.
        """
        self._shards = at_least_one("shards", shards)
        self._shuffle = bool(shuffle)
        self._block = None if shuffle_block is None else at_least_one("shuffle_block", shuffle_block)
        pieces, names, file_cuts = _cut(pieces, counts, names, self._shards)
        self._pieces = Pieces(pieces, counts, names, at_least_one("max_open", max_open))
        self._parts = PieceParts(self._pieces) if self._pieces.by_position else None
        self._own_random = bool(capture_rng)
        self._whole = SequentialPieces(self._pieces, self._shards, shuffle=self._shuffle, capture_rng=self._own_random)
        self._orders = Recent[int, ShardedOrder](KEPT_ORDERS)
        by_position = self._parts is not None
        self._described: dict[str, Any] = {
            "kind": "LogicalShards",
            "shards": self._shards,
            "pieces": len(self._pieces),
            "records": None if self._pieces.counts is None else sum(self._pieces.counts),
            "counts": _listed(self._pieces.counts),
            "names": _listed(self._pieces.names),
            "data": _listed([*self._pieces.fingerprints(), *file_cuts]),
            "cut": "by position" if by_position else "in whole pieces",
            "capture_rng": self._own_random,
            "shuffle": self._shuffle,
            "shuffle_block": (self._block or "all") if self._shuffle and by_position else None,
        }
        if self._pieces.unreadable:
            self._described[UNREADABLE] = self._pieces.unreadable
        self.skip_failures = self._pieces.skip_failures()
        if self.skip_failures and not by_position:
            raise InvalidArgumentError("pieces must all be indexable with skip_failures of a StreamingDataset")
        if self.skip_failures:
            self._described["skip_failures"] = self.skip_failures

    @property
    def keyed(self) -> bool:
        return self._own_random

    @property
    def num_shards(self) -> int:
        return self._shards

    def described(self) -> dict[str, Any]:
        return dict(self._described)

    def lengths(self, epoch: int) -> Sequence[int] | None:
        self._check_readable()
        if self._parts is None:
            return self._whole.lengths(epoch)
        if self.skip_failures:
            return None
        bounds = [shard_range(self._parts.records, self._shards, shard) for shard in range(self._shards)]
        return [end - begin for begin, end in bounds]

    def known_records(self) -> KnownRecords | None:
        """Return the records of all pieces; None unless all pieces are indexable, if there is no record, or if some may
        be left out."""
        parts = self._parts
        if parts is None or not parts.records or self.skip_failures:
            return None

        def numbers(epoch: int, seed: int, shards: Ints, indices: Ints) -> Ints:
            begins = shards * parts.records // self._shards  # as `shard_range`
            return self._order(seed).ids(epoch, begins + indices)

        return KnownRecords(parts.records, numbers)

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        assert 0 <= shard < self._shards, f"shard {shard} of {self._shards}"
        self._check_readable()
        if self._parts is None:
            own, seed_of = self._whole.pieces_of(shard, epoch, seed), self._whole.seeds(epoch, seed)
            return SequentialCursor(self._whole, own, seed_of, saved)
        begin, end = shard_range(self._parts.records, self._shards, shard)
        order = self._order(seed) if self._parts.records else None
        ahead = 2 * min(self._block or end - begin, max(1, end - begin))
        key = derive_seed(seed, "record") if self._own_random else None
        if not self.skip_failures:
            return RangeCursor(self._parts, order, epoch, begin, end, ahead, saved, key)
        (index,), inner = entered(saved, "LogicalShards", "index")
        cursor = RangeCursor(self._parts, order, epoch, begin, end, ahead, inner, key, tolerant=True)
        where = f"LogicalShards: shard {shard}, epoch {epoch}, sample"
        return without_errors(cursor, self.skip_failures, index, SearchLimit(self, "LogicalShards", shard), where)

    def _check_readable(self) -> None:
        if self._pieces.unreadable:
            raise DatasetError(
                f"a piece of LogicalShards cannot be opened: {self._pieces.unreadable}. Restore it, or give the source "
                "weight 0 in its Mixture"
            )

    def _order(self, seed: int) -> ShardedOrder:
        key, parts = derive_seed(seed, "LogicalShards") if self._shuffle else 0, self._parts
        assert parts is not None
        return self._orders.get(
            key,
            lambda: ShardedOrder([parts.sizes], [parts.records], seed=key, shuffle=self._shuffle, block=self._block),
        )


def _cut(
    pieces: Sequence[Any], counts: Sequence[int] | None, names: Sequence[str] | None, shards: int
) -> tuple[Sequence[Any], Sequence[str] | None, list[str]]:
    """Cut LineFiles if there are fewer pieces than shards. Return the pieces, their names, and for the description a
    text for each LineFile, such as "3 of 120 bytes" for 3 ranges."""
    if isinstance(pieces, Iterator):
        pieces = list(pieces)
    if not isinstance(pieces, list | tuple) or not any(isinstance(piece, LineFile) for piece in pieces):
        return pieces, names, []
    if counts is not None:
        raise InvalidArgumentError("counts must be None with a LineFile, whose lines are not counted")
    parts = cut_files(pieces, shards)
    if names is not None:
        names = [
            name if len(own) == 1 else f"{name} [{number + 1}/{len(own)}]"
            for name, own in zip(one_each("names", names, len(pieces)), parts, strict=True)
            for number in range(len(own))
        ]
    file_cuts = [
        f"{len(own)} of {piece.size} bytes"
        for piece, own in zip(pieces, parts, strict=True)
        if isinstance(piece, LineFile)
    ]
    return [each for own in parts for each in own], names, file_cuts


def _listed(values: Sequence[Any] | None) -> Any:
    """Return a list as a description contains it: a long one as its length and digest; None if it is empty."""
    if not values or len(values) <= LISTED:
        return None if not values else list(values)
    return f"{len(values)}, digest {xxhash.xxh3_64_hexdigest(json.dumps(list(values)).encode())}"
