"""Layer that repeats a finite source, shard by shard. Layers over it do not notice: windows and lines go on."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.data.ordering.permutation import Ints, gathered
from penstock.data.sharded.layers.layer import Layer, entered, position_function
from penstock.data.sharded.protocol import (
    Cursor,
    KnownRecords,
    PositionOf,
    SavedPosition,
    ShardedSource,
    cursor_origin,
    known_records,
)
from penstock.data.sharded.runs import Run, RunCursor, take
from penstock.proto.errors import DatasetError, InvalidArgumentError


class Repeated(Layer):
    """Layer that makes a finite source endless: each shard yields its epochs one after the other."""

    keyed = True

    def __init__(self, source: ShardedSource) -> None:
        """
        Args:
            source: finite source. Each of its shards must have a sample in every epoch: an empty one raises
                DatasetError when it is read; use fewer shards then.

        Raises InvalidArgumentError for a source that is endless.
        """
        super().__init__(source)
        if source.endless:
            raise InvalidArgumentError("Repeated needs a finite source, got one that is endless already")

    @property
    def endless(self) -> bool:
        return True

    def known_records(self) -> KnownRecords | None:
        """Return the source's known records; None without any, for unknown lengths, and for an empty shard."""
        below, lengths = known_records(self.source), self.source.lengths(0)
        if below is None or lengths is None or min(lengths) < 1:
            return None
        sizes, once = np.array(lengths, np.int64), below.numbers

        def numbers(epoch: int, seed: int, shards: Ints, indices: Ints) -> Ints:
            epochs, inside = np.divmod(indices, sizes[shards])
            rows = np.arange(len(epochs))
            return gathered(epochs, rows, lambda each, at: once(each, seed, shards[at], inside[at]))

        return KnownRecords(below.total, numbers)

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        return _Cursor(self.source, shard, seed, saved, position_function(position_of, shard, self.num_shards))


class _Cursor(RunCursor):
    def __init__(
        self, source: ShardedSource, shard: int, seed: int, saved: SavedPosition, position_of: PositionOf
    ) -> None:
        self._source, self._shard, self._seed, self._position_of = source, shard, seed, position_of
        (self._epoch, self._before, self._index), inner = entered(saved, "Repeated", "epoch", "before", "index")
        self._inner = self._opened(inner)

    def __next__(self) -> Any:  # as `take(1)`, in half of its time
        while True:
            for sample in self._inner:
                self.origin = cursor_origin(self._inner)
                self._index += 1
                return sample
            self._next_epoch()

    def take(self, count: int) -> Run:
        while not (run := take(self._inner, count)).size:
            self._next_epoch()
        epoch, before, first, position = self._epoch, self._before, self._index, run.position
        self._index += run.size

        def wrapped(number: int) -> SavedPosition:
            return {"epoch": epoch, "before": before, "index": first + number, "source": position(number)}

        return run._replace(position=wrapped)

    def skip(self, count: int) -> int:
        left = count
        while left:
            passed = self._inner.skip(left)
            self._index += passed
            left -= passed
            if left:
                self._next_epoch()
        return count

    def saved_position(self) -> SavedPosition:
        return {
            "epoch": self._epoch,
            "before": self._before,
            "index": self._index,
            "source": self._inner.saved_position(),
        }

    def close(self) -> None:
        self._inner.close()

    def _next_epoch(self) -> None:
        if self._index == self._before:
            raise DatasetError(
                f"shard {self._shard} of {self._source.num_shards} is empty in epoch {self._epoch}. Use fewer shards"
            )
        self._inner.close()
        self._epoch, self._before = self._epoch + 1, self._index
        self._inner = self._opened(None)

    def _opened(self, saved: SavedPosition) -> Cursor:
        before, position_of = self._before, self._position_of
        return self._source.open(self._shard, self._epoch, self._seed, saved, lambda index: position_of(before + index))
