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
    """Cursor states of several shards: for each shard the index of a sample, and the cursor's saved position before it.
    They are stored in two dicts, because a thousand states then take 20 us to build, and 200 us as separate objects."""

    indices: dict[int, int] = field(default_factory=dict)
    saved: dict[int, SavedPosition] = field(default_factory=dict)
    """Saved position of each shard's cursor, by shard. The dict has the same keys as `indices`, in the same order."""

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
    """Restore key of the sample; None without restore keys."""
    origins: Sequence[Origin] = ()
    """Origins of all samples that one call of the cursor's `take` read, this sample among them; empty if they have
    none."""
    number: int = 0
    """Index of this sample among the samples of that call."""

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
        """
        Args:
            source: source whose shards are read.
            epoch, seed: arguments with which `source.open` is called.
            states: cursor states at which the shards are opened. A shard without one is opened at its beginning.
            position_of: function from a shard's number to the argument `position_of` of `source.open`; None:
                `source.open` gets None, which means that the shards are read round robin.
            key: function from (shard, index, saved position before the sample) to the sample's restore key, which `get`
                returns with the sample; None: samples have no keys.
        """
        self._source, self._epoch, self._seed, self._position_of, self._key = source, epoch, seed, position_of, key
        self._cursors: dict[int, Cursor] = {}
        self._at: dict[int, int] = {}
        """Index of the sample that each shard's cursor returns next, by the shard's number."""
        self._latest = -1
        """Number of the shard that was read last; -1 if no shard was read yet."""
        self._states = states.copy()
        self._touched: set[int] = set()
        """Numbers of the shards that were read since their cursor states in `_states` were saved."""
        self._ahead: dict[int, tuple[int, SavedPosition]] = {}
        """Cursor states of the shards from which samples of later batches were read ahead, taken before that. `states`
        returns them, because the present ones are newer than the position."""
        self._held: dict[tuple[int, int], HeldSample] = {}
        self._second: dict[int, tuple[Cursor, int]] = {}
        """Second cursor of a shard and the index of its next sample, by the shard's number. It reads samples of the
        epoch's beginning again, to pad the last batch."""

    def get(self, shard: int, index: int, *, again: bool = False, following: int = 0) -> HeldSample:
        """Return sample `index` of a shard, with its restore key and origin.

        Args:
            again: True if the shard's cursor may be beyond the sample, so that a second cursor reads it: the sample
                pads a batch, or serves as a template (WorkerShare.template).
            following: number of directly following samples of the shard that will be asked for, too. They may be read
                in the same call.

        Raises DatasetError if the shard ends before the sample.
        """
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
        """Read sample `index` of a shard, and keep it for `get`. Up to `following` of the samples after it may be read
        and kept, too. Return False if the shard ends before the sample."""
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
        """Skip a shard's samples before `index`. Return the index of the shard's next sample, which is smaller than
        `index` if the shard ends earlier."""
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
        """Keep a shard's present cursor state, which `states` then returns for the shard. Call this method before
        samples of later batches are read from the shard."""
        if shard not in self._ahead:
            cursor = self._open(shard)
            self._ahead[shard] = self._at[shard], cursor.saved_position()

    def begin(self) -> None:
        """Begin the next batch: drop the cursor states that `look_ahead` kept for the batch before, so that `states`
        returns newer ones."""
        self._touched.update(self._ahead)
        self._ahead.clear()

    def done(self) -> None:
        """Drop the samples of the batch that was yielded. Samples that were read ahead for later batches are kept."""
        for cursor, _ in self._second.values():
            cursor.close()
        self._second.clear()
        ahead = self._ahead
        self._held = {at: found for at, found in self._held.items() if at[0] in ahead and at[1] >= ahead[at[0]][0]}

    def states(self, *, up_to_date: bool) -> CursorStates:
        """Return the cursor states of all shards that were read. `up_to_date`: True: take the present states of the
        cursors, which is possible only between two batches; False: return the states that were taken last."""
        if up_to_date:
            for shard in self._touched:
                if shard in self._ahead:
                    self._states.put(shard, *self._ahead[shard])
                elif shard in self._cursors:
                    self._states.put(shard, self._at[shard], self._cursors[shard].saved_position())
            self._touched.clear()
        return self._states.copy()

    def latest(self) -> tuple[int, SavedPosition] | None:
        """Return the number of the shard that was read last, and the saved position of its cursor; None if no shard was
        read."""
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
        """Read up to `count` samples from a cursor whose next sample is `index`, and keep them for `get`. Return the
        number of samples that were read."""
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
        """Close the cursor of a shard after an error, because the cursor may not be at the right sample. The next read
        opens the shard at the cursor state that was taken last."""
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
