"""Round robin over shards of any lengths: which sample of which shard is at which position of the stream.

A finite source's epoch is read in rounds: sample 0 of each shard, then sample 1, and so on; a shard that is over
leaves. With the lengths known that is arithmetic, and no shard has to be read to find a position. A length that is not
known yet is taken for endless: all positions before the first that this makes wrong are right, so a reader that goes
along and tells what it finds is never misled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from penstock.data.ordering.permutation import Ints

__all__ = ["RoundRobin", "Tail"]

Tail = Literal["emit", "pad", "drop", "emit apart"]
"""What becomes of an epoch's last batch that is not full: those of ordering/dealing.py that need no other epoch."""

UNKNOWN = 1 << 62


class RoundRobin:
    """The positions of one epoch."""

    def __init__(self, shards: int, lengths: Sequence[int] | Mapping[int, int]) -> None:
        """`lengths`: samples of each shard; or of those of which it is known."""
        self._lengths: Ints = np.full(shards, UNKNOWN, np.int64)
        if isinstance(lengths, Mapping):
            for shard, length in lengths.items():
                self._lengths[shard] = length
        else:
            self._lengths[:] = lengths
        self._lay_out()

    def _lay_out(self) -> None:
        """Cut the rounds into stretches with the same live shards."""
        known = self._lengths[self._lengths < UNKNOWN]
        ends, leaving = np.unique(known, return_counts=True)
        self._first_round: Ints = np.concatenate([[0], ends]).astype(np.int64)
        self._live: Ints = len(self._lengths) - np.concatenate([[0], np.cumsum(leaving)]).astype(np.int64)
        self._first_position: Ints = np.concatenate([[0], np.cumsum(np.diff(self._first_round) * self._live[:-1])])
        self._stretch, self._ids = -1, self._lengths

    @property
    def length(self) -> int | None:
        """Samples of all shards, once all lengths are known."""
        return int(self._first_position[-1]) if self._live[-1] == 0 else None

    def end(self, shard: int, length: int) -> None:
        """The shard was found to have so many samples."""
        self._lengths[shard] = length
        self._lay_out()

    def at(self, positions: Ints) -> tuple[list[int], list[int]]:
        """Shard and index in it of the sample at each position, which must be one before `length`."""
        shards, indices = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        stretches = np.searchsorted(self._first_position, positions, side="right") - 1
        for stretch in np.unique(stretches):
            identity = stretches == stretch
            beyond, rank = np.divmod(positions[identity] - self._first_position[stretch], self._live[stretch])
            shards[identity] = self._live_in(int(stretch))[rank]
            indices[identity] = self._first_round[stretch] + beyond
        return shards.tolist(), indices.tolist()

    def counts(self, position: int) -> Ints:
        """Of each shard, how many of its samples are before this position."""
        stretch = int(np.searchsorted(self._first_position, position, side="right")) - 1
        if self._live[stretch] == 0:
            return self._lengths.copy()
        beyond, rank = divmod(position - int(self._first_position[stretch]), int(self._live[stretch]))
        counts: Ints = np.minimum(self._lengths, self._first_round[stretch] + beyond)
        counts[self._live_in(stretch)[:rank]] += 1
        return counts

    def _live_in(self, stretch: int) -> Ints:
        """The shards of a stretch of rounds, by number."""
        if stretch != self._stretch:
            self._stretch, self._ids = stretch, np.flatnonzero(self._lengths > self._first_round[stretch])
            if stretch == 0:
                self._ids = np.arange(len(self._lengths))
        return self._ids
