"""Cursors that read the shards of one epoch, and the cursor states that a loader's state contains.

The cursor state of a shard is a pair: the index of a sample, and the cursor's saved position before this sample. It may
be older than the loader's state that contains it, because a resume skips the samples between the two. It must not be
newer. Therefore:

- Cursor states are taken when a loader's state is saved between two batches, of the shards that were read since the
  last save.
- Before samples of later batches are read ahead from a shard, its cursor state is taken, too, and kept.

Samples are kept until their batch was yielded. If reading or collating fails, the same batch can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.data.sharded.protocol import (
    NOWHERE,
    Cursor,
    Origin,
    PositionOf,
    SavedPosition,
    ShardedSource,
    cursor_origin,
)
from penstock.data.sharded.runs import take
from penstock.proto.errors import DatasetError, StateCorruptError

__all__ = ["CursorStates", "HeldSample", "ShardReaders"]


@dataclass
class CursorStates:
    """Cursor states of several shards, in two dicts: a thousand take 20 us to build, and 200 us as separate objects."""

    indices: dict[int, int] = field(default_factory=dict)
    saved: dict[int, SavedPosition] = field(default_factory=dict)
    """With the same keys as `indices`, in the same order."""

    def put(self, shard: int, index: int, saved: SavedPosition) -> None:
        self.indices[shard] = index
        self.saved[shard] = saved

    def copy(self) -> CursorStates:
        return CursorStates(self.indices.copy(), self.saved.copy())

    def among(self, shards: Container[int]) -> CursorStates:
        return CursorStates(
            *({shard: has for shard, has in column.items() if shard in shards} for column in self.columns)
        )

    @property
    def columns(self) -> tuple[dict[int, int], dict[int, SavedPosition]]:
        return self.indices, self.saved


class HeldSample(NamedTuple):
    """Sample that was read for a batch, and is kept until the batch has been yielded."""

    sample: Any
    key: str | None = None
    origins: Sequence[Origin] = ()
    """Origins of all samples that were read in the same call; empty if they have none."""
    number: int = 0
    """Index of this sample in that call."""

    @property
    def origin(self) -> Origin:
        return self.origins[self.number] if self.origins else NOWHERE


class ShardReaders:
    """Cursors of the shards of one epoch, each opened when its shard is first read."""

    def __init__(
        self,
        source: ShardedSource,
        epoch: int,
        seed: int,
        states: CursorStates,
        *,
        position_of: Callable[[int], PositionOf] | None = None,
        key: Callable[[int, int, SavedPosition], str] | None = None,
    ) -> None:
        """Args: | epoch, seed: with which `source.open` is called. | states: cursor states at which the shards are
        opened. | position_of: function from a shard's number to the argument `position_of` of `source.open`. | key:
        function from (shard, index, saved position before the sample) to the restore key."""
        self._source, self._epoch, self._seed, self._position_of, self._key = source, epoch, seed, position_of, key
        self._cursors: dict[int, Cursor] = {}
        self._at: dict[int, int] = {}
        """Index of the sample that each shard's cursor returns next."""
        self._latest = -1
        """Shard that was read last; -1: none."""
        self._states = states.copy()
        self._touched: set[int] = set()
        """Shards that were read since their cursor states were saved."""
        self._ahead: dict[int, tuple[int, SavedPosition]] = {}
        """Cursor states from before samples of later batches were read ahead: the present ones are newer than the
        position."""
        self._held: dict[tuple[int, int], HeldSample] = {}
        self._second: dict[int, tuple[Cursor, int]] = {}
        """Second cursor of a shard and the index of its next sample, which reads the epoch's beginning again to pad a
        batch."""

    def get(self, shard: int, index: int, *, again: bool = False, following: int = 0) -> HeldSample:
        """Return a sample. `again`: the shard's cursor may be beyond it, so a second cursor reads it. `following`:
        number of directly following samples that will be asked for, too. Raises DatasetError if the shard ends
        before."""
        if not (self._find_again(shard, index) if again else self.find(shard, index, following)):
            raise DatasetError(
                f"shard {shard} of {self._source.num_shards} must have sample {index} in epoch {self._epoch}, because "
                + (
                    "the source is endless"
                    if self._source.endless
                    else "lengths() of the source or earlier reading found more samples"
                )
                + ", but ended before. Use the data with which the run began; they may have changed"
            )
        return self._held[shard, index]

    def find(self, shard: int, index: int, following: int = 0) -> bool:
        """Read a sample, and keep it for `get`, perhaps with some of the `following` ones. Return False if the shard
        ends before it."""
        if (shard, index) in self._held:
            return True
        reached = self.reach(shard, index)
        if reached > index:
            raise StateCorruptError(
                f"the state is damaged: the saved position of shard {shard} must not lie beyond its next sample, "
                f"number {index}, got number {reached}. Load an older state"
            )
        return reached == index and self._read(shard, index, self._cursors[shard], 1 + following)

    def reach(self, shard: int, index: int) -> int:
        """Skip a shard's samples before `index`. Return the index of its next sample, which is smaller if the shard
        ends earlier."""
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
        """Keep a shard's cursor state for `states`. Call this before samples of later batches are read from it."""
        if shard not in self._ahead:
            cursor = self._open(shard)
            self._ahead[shard] = self._at[shard], cursor.saved_position()

    def begin(self) -> None:
        """Begin the next batch: drop the cursor states that `look_ahead` kept."""
        self._touched.update(self._ahead)
        self._ahead.clear()

    def done(self) -> None:
        """Drop the samples of the batch that was yielded, but not those that were read ahead."""
        for cursor, _ in self._second.values():
            cursor.close()
        self._second.clear()
        ahead = self._ahead
        self._held = {at: found for at, found in self._held.items() if at[0] in ahead and at[1] >= ahead[at[0]][0]}

    def states(self, *, up_to_date: bool) -> CursorStates:
        """Return the cursor states of all shards that were read. `up_to_date`: take the present ones, which is possible
        only between two batches; False: those that were taken last."""
        if up_to_date:
            for shard in self._touched:
                if shard in self._ahead:
                    self._states.put(shard, *self._ahead[shard])
                elif shard in self._cursors:
                    self._states.put(shard, self._at[shard], self._cursors[shard].saved_position())
            self._touched.clear()
        return self._states.copy()

    def latest(self) -> tuple[int, SavedPosition] | None:
        """Return the shard that was read last, and its cursor's saved position; None if none was read."""
        cursor = self._cursors.get(self._latest)
        return None if cursor is None else (self._latest, cursor.saved_position())

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
            index, saved = self._states.indices.get(shard, 0), self._states.saved.get(shard)
            cursor = self._cursors[shard] = self._source.open(
                shard, self._epoch, self._seed, saved, self._positions(shard)
            )
            self._at[shard] = index
        return cursor

    def _positions(self, shard: int) -> PositionOf | None:
        return None if self._position_of is None else self._position_of(shard)

    def _read(self, shard: int, index: int, cursor: Cursor, count: int) -> bool:
        self._touched.add(shard)
        try:
            size = self._hold(shard, index, cursor, count)
        except BaseException:
            self._drop(shard)
            raise
        if size:
            self._at[shard], self._latest = index + size, shard
        return size > 0

    def _hold(self, shard: int, index: int, cursor: Cursor, count: int) -> int:
        """Read up to `count` samples from a cursor at `index`, and keep them. Return how many were read."""
        key = self._key
        before = cursor.saved_position() if key is not None else None
        if count == 1:
            for sample in cursor:
                text = None if key is None else key(shard, index, before)
                origin = cursor_origin(cursor)
                self._held[shard, index] = HeldSample(sample, text, () if origin is NOWHERE else (origin,), 0)
                return 1
            return 0
        run = take(cursor, count)
        for number, sample in enumerate(run.samples):
            at = index + number
            text = None if key is None else key(shard, at, run.position(number) if number else before)
            self._held[shard, at] = HeldSample(sample, text, run.origins, number)
        return run.size

    def _drop(self, shard: int) -> None:
        """Close the cursor of a shard after an error. The next read opens the shard at the cursor state that was taken
        last."""
        self._cursors.pop(shard).close()

    def _find_again(self, shard: int, index: int) -> bool:
        if (shard, index) in self._held:
            return True
        cursor, at = self._second.pop(shard, (None, 0))
        if cursor is None:
            cursor = self._source.open(shard, self._epoch, self._seed, None, self._positions(shard))
        try:
            if cursor.skip(index - at) < index - at:
                return False
            if not self._hold(shard, index, cursor, 1):
                return False
        except BaseException:
            cursor.close()
            raise
        self._second[shard] = cursor, index + 1
        return True
