"""The open shards of one epoch, read on demand; and the marks by which a state says how far each is.

A mark is an index and a token: the token before the sample of that index. Any mark will do that does not lie beyond the
place which a state describes, for what lies between is skipped. Two things follow. Tokens are asked for only when a
state is, and only of shards that were touched since; and where a reader has to look ahead, the mark is the one from
before that.

Samples stay here until the batch that they are for was yielded: if collating fails, or reading one of them, the same
batch can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from penstock.data.sharded.protocol import Cursor, Place, ShardedSource, Token
from penstock.proto.errors import DatasetError, StateCorruptError

__all__ = ["CursorStates", "ShardReaders"]


@dataclass
class CursorStates:
    """Of shards, in columns: a state of a thousand is put together in 20 us so, and one by one in 200."""

    indices: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, Token] = field(default_factory=dict)
    """Of the same shards, in the same order."""

    def put(self, shard: int, index: int, token: Token) -> None:
        self.indices[shard] = index
        self.tokens[shard] = token

    def copy(self) -> CursorStates:
        return CursorStates(self.indices.copy(), self.tokens.copy())

    def among(self, shards: Container[int]) -> CursorStates:
        return CursorStates(
            *({shard: has for shard, has in column.items() if shard in shards} for column in self.columns)
        )

    @property
    def columns(self) -> tuple[dict[int, int], dict[int, Token]]:
        return self.indices, self.tokens


class ShardReaders:
    def __init__(
        self,
        source: ShardedSource,
        epoch: int,
        seed: int,
        marks: CursorStates,
        *,
        place: Callable[[int], Place] | None = None,
        key: Callable[[int, int, Token], str] | None = None,
    ) -> None:
        """
        Args:
            place: of the samples of a shard.
            key: (shard, index, token before the sample) -> what is handed out beside the sample.
        """
        self._source, self._epoch, self._seed, self._place, self._key = source, epoch, seed, place, key
        self._cursors: dict[int, Cursor] = {}
        self._at: dict[int, int] = {}
        """Index of each cursor's next sample."""
        self._marks = marks.copy()
        self._touched: set[int] = set()
        """Since their marks were taken."""
        self._ahead: dict[int, tuple[int, Token]] = {}
        """Marks of shards that have been read further than the batch which is made next."""
        self._held: dict[tuple[int, int], tuple[Any, str | None]] = {}
        self._second: dict[int, tuple[Cursor, int]] = {}
        """Cursors that read from the epoch's beginning again, to fill up a batch."""

    def get(self, shard: int, index: int, *, again: bool = False) -> tuple[Any, str | None]:
        """The sample, and its key. `again`: it comes a second time in this epoch.

        Raises DatasetError if the shard is over before.
        """
        if not (self._find_again(shard, index) if again else self.find(shard, index)):
            raise DatasetError(
                f"shard {shard} of {self._source.num_shards} ended before sample {index} of epoch {self._epoch}: "
                + ("the source said that it is endless" if self._source.endless else "it has fewer than was said")
                + ". Were the data changed?"
            )
        return self._held[shard, index]

    def find(self, shard: int, index: int) -> bool:
        """Read the sample and hold it; False if the shard is over before."""
        if (shard, index) in self._held:
            return True
        reached = self.reach(shard, index)
        if reached > index:
            raise StateCorruptError(
                f"a state in which shard {shard} stands before sample {reached}, where sample {index} is to come next"
            )
        return reached == index and self._read(shard, index, self._cursors[shard])

    def reach(self, shard: int, index: int) -> int:
        """Pass over what is before this index; returns the index reached, a smaller one if the shard is over."""
        cursor = self._open(shard)
        at = self._at[shard]
        if at < index:
            self._touched.add(shard)
            try:
                self._at[shard] = at = at + cursor.skip(index - at)
            except BaseException:
                self._drop(shard)
                raise
        return at

    def look_ahead(self, shard: int) -> None:
        """The shard is going to be read for later batches: keep the mark that it has now."""
        if shard not in self._ahead:
            cursor = self._open(shard)
            self._ahead[shard] = self._at[shard], cursor.token()

    def begin(self) -> None:
        """Batches are made again: what was ahead is no more."""
        self._touched.update(self._ahead)
        self._ahead.clear()

    def done(self) -> None:
        """The batch was yielded."""
        for cursor, _ in self._second.values():
            cursor.close()
        self._second.clear()
        ahead = self._ahead
        self._held = {at: found for at, found in self._held.items() if at[0] in ahead and at[1] >= ahead[at[0]][0]}

    def marks(self, *, up_to_date: bool) -> CursorStates:
        """Of all shards, after the batch that was yielded last; or as they were known some time before that."""
        if up_to_date:
            for shard in self._touched:
                if shard in self._ahead:
                    self._marks.put(shard, *self._ahead[shard])
                elif shard in self._cursors:
                    self._marks.put(shard, self._at[shard], self._cursors[shard].token())
            self._touched.clear()
        return self._marks.copy()

    def close(self) -> None:
        for cursor in [*self._cursors.values(), *(cursor for cursor, _ in self._second.values())]:
            cursor.close()
        self._cursors.clear()
        self._second.clear()
        self._held.clear()

    # ---- one shard

    def _open(self, shard: int) -> Cursor:
        cursor = self._cursors.get(shard)
        if cursor is None:
            index, token = self._marks.indices.get(shard, 0), self._marks.tokens.get(shard)
            cursor = self._cursors[shard] = self._source.open(
                shard, self._epoch, self._seed, token, self._placed(shard)
            )
            self._at[shard] = index
        return cursor

    def _placed(self, shard: int) -> Place | None:
        return None if self._place is None else self._place(shard)

    def _read(self, shard: int, index: int, cursor: Cursor) -> bool:
        self._touched.add(shard)
        try:
            key = self._key(shard, index, cursor.token()) if self._key is not None else None
            sample = next(cursor)
        except StopIteration:
            return False
        except BaseException:
            self._drop(shard)
            raise
        self._at[shard] = index + 1
        self._held[shard, index] = sample, key
        return True

    def _drop(self, shard: int) -> None:
        """A cursor that failed is not to be trusted: the shard is opened again from its mark."""
        self._cursors.pop(shard).close()

    def _find_again(self, shard: int, index: int) -> bool:
        if (shard, index) in self._held:
            return True
        cursor, at = self._second.pop(shard, (None, 0))
        if cursor is None:
            cursor = self._source.open(shard, self._epoch, self._seed, None, self._placed(shard))
        try:
            if cursor.skip(index - at) < index - at:
                return False
            key = self._key(shard, index, cursor.token()) if self._key is not None else None
            self._held[shard, index] = next(cursor), key
        except StopIteration:
            return False
        except BaseException:
            cursor.close()
            raise
        self._second[shard] = cursor, index + 1
        return True
