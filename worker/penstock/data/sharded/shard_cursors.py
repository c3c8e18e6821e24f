"""Cursors that read the shards of one epoch, and their states: the index of a sample, and the cursor's saved position
before it.

A cursor state may be older than the loader's state that contains it, because a resume skips the samples in between, but
never newer. So states are taken between two batches, of the shards read since the last save, and before samples of
later batches are read ahead. Samples are kept until their batch was yielded: if reading or collating fails, the same
batch can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.data.sharded.layers.left_out import opened
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

CursorStates = dict[int, tuple[int, SavedPosition]]
"""By shard: index of the next sample, and the cursor's saved position before it."""


class HeldSample(NamedTuple):
    sample: Any
    key: str | None = None
    origins: Sequence[Origin] = ()
    """Origins of all samples that were read in the same call; empty if they have none."""
    number: int = 0

    @property
    def origin(self) -> Origin:
        return self.origins[self.number] if self.origins else NOWHERE


class ShardReaders:
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
        """`position_of`: by shard, the argument of `open`; `key`: (shard, index, saved position) -> restore key."""
        self._source, self._epoch, self._seed, self._position_of, self._key = source, epoch, seed, position_of, key
        self._cursors: dict[int, Cursor] = {}
        self._at: dict[int, int] = {}
        self._latest = -1
        self._begun, self._states = states, states.copy()
        self._touched: set[int] = set()
        """Shards that were read since their cursor states were saved."""
        self._ahead: dict[int, tuple[int, SavedPosition]] = {}
        """Cursor states from before samples of later batches were read ahead."""
        self._held: dict[tuple[int, int], HeldSample] = {}
        self._second: dict[int, tuple[Cursor, int]] = {}
        """Second cursor of a shard, which reads samples again, to pad a batch or as a template; and its next index."""

    def get(self, shard: int, index: int, *, again: bool = False, following: int = 0) -> HeldSample:
        """Return a sample. `again`: its shard's cursor may be beyond it, so a second one reads it. `following`: how
        many directly following ones will be asked for. Raises DatasetError if the shard ends before."""
        if not (self._find_again(shard, index) if again else self.find(shard, index, following)):
            raise DatasetError(
                f"shard {shard} must have sample {index} in epoch {self._epoch}, but ended before. Use the run's data"
            )
        return self._held[shard, index]

    def find(self, shard: int, index: int, following: int = 0) -> bool:
        """Read a sample for `get`, perhaps with some `following` ones. Return False if the shard ends before it."""
        if (shard, index) in self._held:
            return True
        reached = self.reach(shard, index)
        if reached > index:
            raise StateCorruptError(f"the state is damaged: shard {shard} lies at sample {reached}, not {index}")
        return reached == index and self._read(shard, index, self._cursors[shard], 1 + following)

    def reach(self, shard: int, index: int) -> int:
        """Skip a shard's samples before `index`. Return its next index, smaller if the shard ends earlier."""
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
        if shard not in self._ahead:
            cursor = self._open(shard)
            self._ahead[shard] = self._at[shard], cursor.saved_position()

    def begin(self) -> None:
        self._touched.update(self._ahead)
        self._ahead.clear()

    def done(self) -> None:
        for cursor, _ in self._second.values():
            cursor.close()
        self._second.clear()
        ahead = self._ahead
        self._held = {at: found for at, found in self._held.items() if at[0] in ahead and at[1] >= ahead[at[0]][0]}

    def states(self, *, up_to_date: bool) -> CursorStates:
        """up_to_date=False: as they were taken last; the present ones are valid only between two batches."""
        if up_to_date:
            for shard in self._touched:
                if shard in self._ahead:
                    self._states[shard] = self._ahead[shard]
                elif shard in self._cursors:
                    self._states[shard] = self._at[shard], self._cursors[shard].saved_position()
            self._touched.clear()
        return self._states.copy()

    def latest(self) -> tuple[int, SavedPosition] | None:
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
            index, saved = self._states.get(shard, (0, None))
            cursor = self._cursors[shard] = opened(
                self._source, shard, self._epoch, self._seed, saved, self._positions(shard)
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
        """Close a shard's cursor after an error. The next read opens it at the cursor state taken last."""
        self._cursors.pop(shard).close()

    def _find_again(self, shard: int, index: int) -> bool:
        if (shard, index) in self._held:
            return True
        cursor, at = self._second.pop(shard, (None, 0))
        if cursor is None:
            at, saved = self._begun.get(shard, (0, None))
            at, saved = (at, saved) if at <= index else (0, None)
            cursor = opened(self._source, shard, self._epoch, self._seed, saved, self._positions(shard))
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
