"""Shards of whole pieces, read one after the other. With known numbers of records, each piece goes to the shard with
the fewest so far; otherwise round robin. With shuffling, the assignment differs between epochs, but not between seeds,
because the lengths of shards must be known without one; the order within a shard depends on both.

The random generators are seeded by (seed, epoch, piece) while a piece is read. A saved position contains the present
piece and a StreamMark in it, from which also a piece that was closed so that others can be opened is resumed.
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.data.ordering.permutation import Ints, permuted
from penstock.data.recent import Recent
from penstock.data.sharded.protocol import SavedPosition
from penstock.data.sharded.sources.opaque import OpaqueStream, SampleDigests, StreamMark
from penstock.data.sharded.sources.pieces import Pieces
from penstock.proto.errors import DatasetError, StateCorruptError
from penstock.proto.state.generators import derive_seed

KEPT_EPOCHS = 16
"""Number of epochs whose assignment stays in memory: 1 MB each for 100,000 pieces."""


def assign_pieces(
    pieces: int, counts: Sequence[int] | None, shards: int, *, epoch: int, shuffle: bool
) -> list[list[int]]:
    """With counts, the records of any two shards differ by at most those of the largest piece."""
    order = _permuted(range(pieces), derive_seed(0, "pieces", epoch)) if shuffle else range(pieces)
    if counts is None:
        return [list(order[shard::shards]) for shard in range(shards)]
    answer: list[list[int]] = [[] for _ in range(shards)]
    fewest = [(0, shard) for shard in range(shards)]
    for number in order:
        records, shard = fewest[0]
        heapq.heapreplace(fewest, (records + counts[number], shard))
        answer[shard].append(number)
    return answer


def _permuted(numbers: Sequence[int], key: int) -> list[int]:
    if len(numbers) < 2:
        return list(numbers)
    order = permuted(np.arange(len(numbers)), len(numbers), np.uint64(key))
    return [numbers[index] for index in order.tolist()]


class SequentialPieces:
    def __init__(self, pieces: Pieces, shards: int, *, shuffle: bool, capture_rng: bool = True) -> None:
        self.pieces, self._shards, self._shuffle = pieces, shards, shuffle
        self._capture_rng = capture_rng
        self.digests = SampleDigests()
        self._assigned = Recent[int, list[Ints]](KEPT_EPOCHS)
        """By epoch: shards below a Repeated may be in different ones, and to assign 100,000 pieces takes 0.2 s."""
        self._warned = False

    def close_for_others(self, stream: OpaqueStream, name: str) -> None:
        """Close a piece's stream for another. Warn, once, if it will be read again from its beginning."""
        stream.park()
        if stream.reads_again and not self._warned:
            self._warned = True
            warnings.warn(
                f"{name} is read again from its beginning repeatedly, because max_open={self.pieces.opened.most} is "
                "smaller than the number of shards that a process reads. Raise max_open",
                stacklevel=6,
            )

    def lengths(self, epoch: int) -> list[int] | None:
        counts = self.pieces.counts
        return None if counts is None else [sum(counts[n] for n in own.tolist()) for own in self._of(epoch)]

    def pieces_of(self, shard: int, epoch: int, seed: int) -> list[int]:
        """Without empty pieces: a position before one and after it must be the same."""
        own: list[int] = self._of(epoch)[shard].tolist()
        ordered = _permuted(own, derive_seed(seed, "pieces", epoch, shard)) if self._shuffle else own
        return ordered if self.pieces.counts is None else [n for n in ordered if self.pieces.counts[n]]

    def seeds(self, epoch: int, seed: int) -> Callable[[int], int | None]:
        """Return the generators' seed for each piece; None: they are left alone."""
        if not self._capture_rng:
            return lambda piece: None
        return lambda piece: derive_seed(seed, "piece", epoch, piece)

    def _of(self, epoch: int) -> list[Ints]:
        def assigned() -> list[Ints]:
            counts, shuffle = self.pieces.counts, self._shuffle
            by_shard = assign_pieces(len(self.pieces), counts, self._shards, epoch=epoch, shuffle=shuffle)
            return [np.array(own, np.int64) for own in by_shard]

        return self._assigned.get(epoch, assigned)


class SequentialCursor(Iterator[Any]):
    def __init__(
        self, whole: SequentialPieces, own: list[int], seed_of: Callable[[int], int | None], saved: SavedPosition
    ) -> None:
        self._whole, self._pieces, self._own, self._seed_of = whole, whole.pieces, own, seed_of
        self._turn = 0
        self._stream = self._new(None) if own else None
        if saved is not None:
            self._go(saved)

    def __next__(self) -> Any:
        while self._stream is not None:
            if self._is_full(self._stream):
                self._expect_end(self._stream)
            else:
                self._touch(self._stream)
                try:
                    record = next(self._stream)
                except StopIteration:
                    self._check_end(self._stream)
                else:
                    # checked now, because no further call follows a shard's last record
                    if self._is_full(self._stream):
                        self._expect_end(self._stream)
                    return record
            self._move_on()
        self.close()
        raise StopIteration

    def skip(self, count: int) -> int:
        left = count
        while left and self._stream is not None:
            rest = self._rest()
            if rest is not None and left >= rest:  # a whole piece is skipped without opening it
                left -= rest
                self._move_on()
                continue
            self._touch(self._stream)
            left -= self._stream.skip(left)
            if left:
                self._check_end(self._stream)
                self._move_on()
        return count - left

    def saved_position(self) -> SavedPosition:
        if self._stream is None:
            return {"turn": self._turn, "piece": None, "stream": None}
        if self._is_full(self._stream):
            following = self._turn + 1
            return {"turn": following, "piece": self._piece(following), "stream": None}
        stream = self._stream.saved_position() if self._stream.passed else None
        return {"turn": self._turn, "piece": self._piece(self._turn), "stream": stream}

    def close(self) -> None:
        self._leave()
        self._pieces.left(id(self))

    def __del__(self) -> None:
        if hasattr(self, "_stream"):  # __init__ may have failed before this attribute was set
            self.close()

    # ---- the piece being read

    @property
    def _name(self) -> str:
        return self._pieces.name(self._own[self._turn])

    def _new(self, mark: StreamMark | None) -> OpaqueStream:
        pieces, piece = self._pieces, self._own[self._turn]
        make, own = pieces.stream(piece)
        return OpaqueStream(
            lambda: pieces.as_iterable(make()),
            self._name,
            digests=self._whole.digests,
            seed=self._seed_of(piece),
            mark=mark,
            keeps_made=own,
        )

    def _touch(self, stream: OpaqueStream) -> None:
        """Mark the present stream as the most recently used; reopen it, and close another if too many are open."""
        opened = self._pieces.opened
        if not opened.used(id(self)):
            self._pieces.read_by(id(self))
            opened.add(id(self), partial(self._whole.close_for_others, stream, self._name))

    def _leave(self) -> None:
        if self._stream is not None:
            self._pieces.opened.forget(id(self))
            self._stream.close()

    def _move_on(self) -> None:
        self._leave()
        self._turn += 1
        self._stream = self._new(None) if self._turn < len(self._own) else None

    # ---- the end of a piece

    def _count(self) -> int | None:
        counts = self._pieces.counts
        return None if counts is None else counts[self._own[self._turn]]

    def _rest(self) -> int | None:
        count = self._count()
        return None if count is None or self._stream is None else count - self._stream.passed

    def _is_full(self, stream: OpaqueStream) -> bool:
        count = self._count()
        return count is not None and stream.passed >= count

    def _expect_end(self, stream: OpaqueStream) -> None:
        count = self._count()
        if stream.passed != count or (stream.is_open and stream.skip(1)):
            raise DatasetError(f"{self._name} must have {count} records, as counts says, got more. Correct counts")

    def _check_end(self, stream: OpaqueStream) -> None:
        count = self._count()
        if count is not None and stream.passed != count:
            raise DatasetError(f"{self._name} must have {count} records, as counts says, got {stream.passed}")

    # ---- saved positions

    def _piece(self, turn: int) -> int | None:
        return self._own[turn] if turn < len(self._own) else None

    def _go(self, saved: SavedPosition) -> None:
        try:
            turn, piece, stream = saved["turn"], saved["piece"], saved["stream"]
        except (KeyError, TypeError) as error:
            raise StateCorruptError(f"the saved position in a shard of pieces is damaged: {saved!r:.200}") from error
        if type(turn) is not int or not 0 <= turn <= len(self._own) or piece != self._piece(turn):
            raise StateCorruptError(
                f"a saved position must be of these pieces, got piece {piece!r} as number {turn!r} of {len(self._own)}"
            )
        self._turn = turn
        if turn == len(self._own):
            self._stream = None
        else:
            self._stream = self._new(None if stream is None else StreamMark.of(stream, self._pieces.name(piece)))
