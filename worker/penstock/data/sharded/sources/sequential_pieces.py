"""A shard of whole pieces, some of which can only be read along: one after the other.

Which pieces make a shard depends on the epoch, if they are shuffled, and on nothing that has to be read: where all
counts are known, each piece in turn goes to the shard with the fewest records so far, and else they are dealt one by
one. The seed and the epoch say in which order a shard reads its own. (The seed has no part in who gets what, for the
lengths of shards are asked for without it.)

While a piece is read, the random generators of the process are its own, seeded by (seed, epoch, piece): it draws the
same in whatever shard or worker it comes, and whoever else draws.

What a cursor keeps is the piece, how many of its records came, and how that piece is gone on with (opaque.py). A piece
that is closed for others' sake, see Opened, keeps its place in the same way.
"""

from __future__ import annotations

import heapq
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.data.ordering.permutation import Ints, permuted
from penstock.data.sharded.protocol import Token
from penstock.data.sharded.sources.opaque import OpaqueStream, StreamMark
from penstock.data.sharded.sources.pieces import Pieces
from penstock.data.sharded.sources.sample_digest import SampleDigests
from penstock.proto.errors import DatasetError, StateCorruptError
from penstock.proto.state.generators import derive_seed

__all__ = ["RunCursor", "SequentialPieces", "dealt"]


KEPT_EPOCHS = 16
"""Of which it is remembered who has which piece: 1 MB each for 100,000 pieces."""


def dealt(pieces: int, counts: Sequence[int] | None, shards: int, *, epoch: int, shuffle: bool) -> list[list[int]]:
    """Of each shard, the numbers of its pieces. By counts, shards differ by the largest piece at most."""
    turn = _permuted(range(pieces), derive_seed(0, "pieces", epoch)) if shuffle else range(pieces)
    if counts is None:
        return [list(turn[shard::shards]) for shard in range(shards)]
    answer: list[list[int]] = [[] for _ in range(shards)]
    fewest = [(0, shard) for shard in range(shards)]
    for number in turn:
        records, shard = fewest[0]
        heapq.heapreplace(fewest, (records + counts[number], shard))
        answer[shard].append(number)
    return answer


def _permuted(numbers: Sequence[int], key: int) -> list[int]:
    if len(numbers) < 2:
        return list(numbers)
    turn = permuted(np.arange(len(numbers)), len(numbers), np.uint64(key))
    return [numbers[place] for place in turn.tolist()]


class SequentialPieces:
    """Whole pieces, dealt to shards."""

    def __init__(self, pieces: Pieces, shards: int, *, shuffle: bool, capture_rng: bool = True) -> None:
        self.pieces, self._shards, self._shuffle = pieces, shards, shuffle
        self._capture_rng = capture_rng
        self.digests = SampleDigests()
        self._dealt: OrderedDict[int, list[Ints]] = OrderedDict()
        """Epoch -> whose pieces. Of an endless source shards are in epochs of their own, and to deal 100,000 pieces
        takes 0.2 s."""
        self._warned = False

    def close_for_others(self, stream: OpaqueStream, name: str) -> None:
        stream.park()
        if stream.reads_again and not self._warned:
            self._warned = True
            warnings.warn(
                f"{name} is read again from its beginning, again and again: more pieces are read in turn than the "
                f"{self.pieces.opened.most} that max_open lets be open. Raise it to the number of shards that a "
                "process reads, or give what it opens a state_dict",
                UserWarning,
                stacklevel=6,
            )

    def lengths(self, epoch: int) -> list[int] | None:
        counts = self.pieces.counts
        return None if counts is None else [sum(counts[n] for n in own.tolist()) for own in self._of(epoch)]

    def run(self, shard: int, epoch: int, seed: int) -> list[int]:
        """The pieces of a shard in their order. Not those of which it is known that they are empty: a place before one
        of them and the place behind it would be two tokens."""
        own: list[int] = self._of(epoch)[shard].tolist()
        run = _permuted(own, derive_seed(seed, "pieces", epoch, shard)) if self._shuffle else own
        return run if self.pieces.counts is None else [n for n in run if self.pieces.counts[n]]

    def seeds(self, epoch: int, seed: int) -> Callable[[int], int | None]:
        """Number of a piece -> seed of the generators that it has for itself in this epoch; None: it has none."""
        if not self._capture_rng:
            return lambda piece: None
        return lambda piece: derive_seed(seed, "piece", epoch, piece)

    def _of(self, epoch: int) -> list[Ints]:
        found = self._dealt.get(epoch)
        if found is None:
            turns = dealt(len(self.pieces), self.pieces.counts, self._shards, epoch=epoch, shuffle=self._shuffle)
            found = self._dealt[epoch] = [np.array(own, np.int64) for own in turns]
            while len(self._dealt) > KEPT_EPOCHS:
                self._dealt.popitem(last=False)
        self._dealt.move_to_end(epoch)
        return found


class RunCursor(Iterator[Any]):
    """Pieces one after the other, each read along."""

    def __init__(
        self, runs: SequentialPieces, run: list[int], seed_of: Callable[[int], int | None], token: Token
    ) -> None:
        self._runs, self._pieces, self._run, self._seed_of = runs, runs.pieces, run, seed_of
        self._turn = 0
        self._stream = self._new(None) if run else None
        if token is not None:
            self._go(token)

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
                    if self._is_full(self._stream):  # at once: behind a shard's last record nobody asks again
                        self._expect_end(self._stream)
                    return record
            self._move_on()
        self.close()
        raise StopIteration

    def skip(self, count: int) -> int:
        left = count
        while left and self._stream is not None:
            rest = self._rest()
            if rest is not None and left >= rest:  # all of it: it need not even be opened
                left -= rest
                self._move_on()
                continue
            self._touch(self._stream)
            left -= self._stream.skip(left)
            if left:
                self._check_end(self._stream)
                self._move_on()
        return count - left

    def token(self) -> Token:
        if self._stream is None:
            return {"turn": self._turn, "piece": None, "stream": None}
        if self._is_full(self._stream):
            following = self._turn + 1
            return {"turn": following, "piece": self._piece(following), "stream": None}
        stream = self._stream.token() if self._stream.passed else None
        return {"turn": self._turn, "piece": self._piece(self._turn), "stream": stream}

    def close(self) -> None:
        self._leave()
        self._pieces.left(id(self))

    def __del__(self) -> None:
        if hasattr(self, "_stream"):  # its making went so far
            self.close()

    # ---- the piece that is read

    @property
    def _name(self) -> str:
        return self._pieces.name(self._run[self._turn])

    def _new(self, mark: StreamMark | None) -> OpaqueStream:
        pieces, piece = self._pieces, self._run[self._turn]
        make, own = pieces.stream(piece)
        return OpaqueStream(
            lambda: pieces.as_iterable(make()),
            self._name,
            digests=self._runs.digests,
            seed=self._seed_of(piece),
            mark=mark,
            keeps_made=own,
        )

    def _touch(self, stream: OpaqueStream) -> None:
        """It is read now, and others may have to be closed for that."""
        opened = self._pieces.opened
        if not opened.used(id(self)):
            self._pieces.read_by(id(self))
            opened.add(id(self), partial(self._runs.close_for_others, stream, self._name))

    def _leave(self) -> None:
        if self._stream is not None:
            self._pieces.opened.forget(id(self))
            self._stream.close()

    def _move_on(self) -> None:
        self._leave()
        self._turn += 1
        self._stream = self._new(None) if self._turn < len(self._run) else None

    # ---- its end

    def _count(self) -> int | None:
        counts = self._pieces.counts
        return None if counts is None else counts[self._run[self._turn]]

    def _rest(self) -> int | None:
        count = self._count()
        return None if count is None or self._stream is None else count - self._stream.passed

    def _is_full(self, stream: OpaqueStream) -> bool:
        count = self._count()
        return count is not None and stream.passed >= count

    def _expect_end(self, stream: OpaqueStream) -> None:
        """All came that counts says; there must not be more."""
        count = self._count()
        if stream.passed != count or (stream.is_open and stream.skip(1)):
            raise DatasetError(f"{self._name}: it goes on after {count} records, and counts says that these are all")

    def _check_end(self, stream: OpaqueStream) -> None:
        count = self._count()
        if count is not None and stream.passed != count:
            raise DatasetError(f"{self._name}: it ends after {stream.passed} records, and counts says {count}")

    # ---- tokens

    def _piece(self, turn: int) -> int | None:
        return self._run[turn] if turn < len(self._run) else None

    def _go(self, token: Token) -> None:
        try:
            turn, piece, stream = token["turn"], token["piece"], token["stream"]
        except (KeyError, TypeError) as error:
            raise StateCorruptError(f"a place in a shard of pieces that cannot be: {token!r:.200}") from error
        if type(turn) is not int or not 0 <= turn <= len(self._run) or piece != self._piece(turn):
            raise StateCorruptError(
                f"a place in a shard of {len(self._run)} pieces that cannot be: piece {piece!r} at turn {turn!r}"
            )
        self._turn = turn
        if turn == len(self._run):
            self._stream = None
        else:
            self._stream = self._new(None if stream is None else StreamMark.of(stream, self._pieces.name(piece)))
