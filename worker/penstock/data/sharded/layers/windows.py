"""Layers that shuffle or group the samples of a window, a fixed number of consecutive samples of a shard. The content
of a shuffle buffer or of buckets would have to be saved. Windows are independent: the state is the window's beginning
and the number of items that it has yielded, and a resume reads one window again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from penstock.data.arguments import at_least_one
from penstock.data.ordering.permutation import mix
from penstock.data.sharded.layers.layer import Layer, SearchLimit, entered, title
from penstock.data.sharded.layers.left_out import opened
from penstock.data.sharded.protocol import (
    NOWHERE,
    Cursor,
    Origin,
    PositionOf,
    SavedPosition,
    ShardedSource,
    summed,
)
from penstock.data.sharded.runs import Run, RunCursor, take
from penstock.data.stop_iteration import forbid_stop_iteration
from penstock.proto.errors import DatasetError
from penstock.proto.state.generators import derive_seed

_Arrange = Callable[[list[Any], list[Origin], int], tuple[list[Any], list[Origin]]]
"""(samples, origin of each or none, number of the window) -> (items that the layer yields, origin of each)."""


class WindowShuffled(Layer):
    """Layer that shuffles the samples of each shard within windows of bounded size.

    WindowShuffled(source, window=10_000)
    """

    keyed = True

    def __init__(self, source: ShardedSource, window: int) -> None:
        """
        Args:
            source: source whose samples are shuffled.
            window: number of a shard's samples that are shuffled with each other. An epoch's last window has fewer,
                unless the source is a Repeated. A worker keeps one window in memory for each shard that it reads.
        """
        super().__init__(source)
        self._window = at_least_one("window", window)

    def settings(self) -> dict[str, Any]:
        return {"window": self._window}

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return self.source.lengths(epoch)

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        (number, done), inner = entered(saved, "WindowShuffled", "window", "done")
        key = derive_seed(seed, "windows", self.depth, epoch, shard)
        where = f"shard {shard}, epoch {epoch}"
        # position_of is not passed on: samples are yielded in another order than they are read, so a mixture below
        # would compute its shares at wrong positions.
        cursor = opened(self.source, shard, epoch, seed, inner)

        def shuffled(samples: list[Any], origins: list[Origin], number: int) -> tuple[list[Any], list[Origin]]:
            # All at once: sorting by random words is faster than a Feistel network that computes each position by
            # itself.
            order: list[int] = np.argsort(mix(key, number, np.arange(len(samples))), kind="stable").tolist()
            return [samples[at] for at in order], [origins[at] for at in order] if origins else []

        return WindowCursor(cursor, self._window, shuffled, number, done, where)


class Grouped(Layer):
    """Layer that groups samples with the same key, such as shape, language or length, into lists of equal size, in each
    shard.

    Samples are grouped within windows: memory is bounded, and a sample with a rare key waits at most for its window's
    end. To make batches of the lists, apply a Mapped that collates, and give that to a ShardLoader with
    `unbatched=True`.
    """

    keyed = True

    def __init__(
        self,
        source: ShardedSource,
        key: Callable[[Any], Hashable],
        size: int,
        *,
        window: int,
        drop_rest: bool = False,
        name: str | None = None,
    ) -> None:
        """
        Args:
            source: source whose samples are grouped.
            key: function from a sample to its key. All samples of a list have the same key.
            size: number of samples in a list. Lists are yielded in the order in which they become complete.
            window: number of consecutive samples of a shard that are grouped together.
            drop_rest: True: leave out the incomplete lists of a window. False: yield them after the complete ones.
            name: name of the key function in states; None: its qualified name. Change it when the function changes.
        """
        super().__init__(source)
        self._key, self._name, self._rest = key, title(key, name), not drop_rest
        self._size, self._window = at_least_one("size", size), at_least_one("window", window)

    def settings(self) -> dict[str, Any]:
        return {"function": self._name, "size": self._size, "window": self._window, "drop_rest": not self._rest}

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        (number, done), inner = entered(saved, "Grouped", "window", "done")
        cursor = opened(self.source, shard, epoch, seed, inner)
        limit = SearchLimit(self.source, f"Grouped {self._name}", shard)
        where = f"shard {shard}, epoch {epoch}"
        return WindowCursor(cursor, self._window, self._grouped, number, done, where, limit)

    def _grouped(self, samples: list[Any], origins: list[Origin], number: int) -> tuple[list[Any], list[Origin]]:
        open_lists: dict[Hashable, list[int]] = {}
        full: list[list[int]] = []
        for at, sample in enumerate(samples):
            with forbid_stop_iteration(f"the key of Grouped {self._name}"):
                key = self._key(sample)
            group = open_lists.setdefault(key, [])
            group.append(at)
            if len(group) == self._size:
                full.append(open_lists.pop(key))
        lists = [*full, *(open_lists.values() if self._rest else ())]
        held = [[samples[at] for at in group] for group in lists]
        return held, [_joined([origins[at] for at in group]) for group in lists] if origins else []


class WindowCursor(RunCursor):
    def __init__(
        self,
        inner: Cursor,
        window: int,
        arrange: _Arrange,
        number: int,
        done: int,
        where: str,
        limit: SearchLimit | None = None,
    ) -> None:
        """`done`: yielded items of window `number`; `limit`: for layers that may yield no items for a window."""
        self._inner, self._window, self._arrange, self._where = inner, window, arrange, where
        self._limit = limit
        self._number = number
        self._done = done
        self._held: list[Any] | None = None
        """Items of the present window, None in place of yielded ones; None if it still has to be read."""
        self._origins: list[Origin] = []
        self._begin: SavedPosition = None
        """Source's saved position before the window."""

    def take(self, count: int) -> Run:
        held = self._hold()
        first, number, begin = self._done, self._number, self._begin
        until = min(first + count, len(held))
        samples, held[first:until] = held[first:until], [None] * (until - first)  # do not keep yielded samples alive
        origins = self._origins[first:until]
        if samples:
            self._advance(len(samples))

        def position(after: int) -> SavedPosition:
            return {"window": number, "done": first + after, "source": begin}

        return Run(samples, len(samples), position, origins)

    def skip(self, count: int) -> int:
        left = count
        while left:
            if self._limit is None and self._held is None and not self._done and left >= self._window:
                passed = self._inner.skip(self._window)
                self._number += passed > 0
                left -= passed
                if passed < self._window:
                    break
            else:
                passed = min(left, len(self._hold()) - self._done)
                if not passed:
                    break
                self._advance(passed)
                left -= passed
        return count - left

    def saved_position(self) -> SavedPosition:
        begin = self._inner.saved_position() if self._held is None else self._begin
        return {"window": self._number, "done": self._done, "source": begin}

    def close(self) -> None:
        self._held = None
        self._inner.close()

    def _hold(self) -> list[Any]:
        """Return the items of the present window; none after the last window."""
        while self._held is None:
            self._begin = self._inner.saved_position()
            read, origins = self._window_of()
            held, self._origins = self._arrange(read, origins, self._number)
            if self._done and self._done >= len(held):
                raise DatasetError(
                    f"{self._where}: window {self._number} must have more than {self._done} items, got {len(held)}"
                )
            if held or len(read) < self._window or self._limit is None:
                self._held = held
            else:  # all samples of the window were left out
                self._number += 1
                self._limit.left_out(len(read))
        if self._limit is not None:
            self._limit.yielded()
        return self._held

    def _window_of(self) -> tuple[list[Any], list[Origin]]:
        read: list[Any] = []
        origins: list[Origin] = []
        while len(read) < self._window and (run := take(self._inner, self._window - len(read))).size:
            read += run.samples
            origins += run.origins or [NOWHERE] * run.size
        return read, origins if any(origin is not NOWHERE for origin in origins) else []

    def _advance(self, count: int) -> None:
        self._done += count
        if self._held is not None and self._done == len(self._held):
            self._number, self._done, self._held = self._number + 1, 0, None


def _joined(own: list[Origin]) -> Origin:
    """Return the origin of a list of samples: "(mixed)" if they have different sources."""
    source = own[0].source if len({each.source for each in own}) == 1 else "(mixed)"
    skipped: dict[str, int] = {}
    for each in own:
        skipped = summed(skipped, each.skipped)
    return Origin(source, skipped, tuple(part for each in own for part in each.parts))
