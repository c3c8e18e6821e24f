"""Order of a sharded dataset's samples: a function from (epoch, position) to sample, alike for any boxes and workers.

    position -> stream, and position in its sequence -> partition -> shuffled block -> shard and sample

- **Parts.** An epoch is a permuted sequence of whole shards, and of pieces if it takes only a share of a stream or
  repeats a part of it.
- **Partitions.** The sequence is cut into C equal ones; position p takes the next sample of partition p mod C. If the
  number of boxes divides C, each box reads only its own shards.
- **Blocks.** Samples are permuted only within a few neighbouring parts of a partition, so only a few blocks' shards are
  needed at a time (block_shuffle.py). Blocks of files decoded as a whole (row groups) are called shards here.
- **Streams.** Their parts are in one sequence ("shards"), or sequences are interleaved in units of C samples
  ("samples") or a batch ("batches"): every prefix has each stream's share (interleave.py); rests below a unit come at
  the end.

The memory used is a few numbers for each part of an epoch, however many samples there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.block_shuffle import PartSequence, ShardParts, parts_of
from penstock.data.ordering.interleave import Interleaving
from penstock.data.ordering.permutation import Ints
from penstock.data.recent import Recent
from penstock.proto.errors import DatasetError
from penstock.proto.state.generators import derive_seed

Interleave = Literal["shards", "samples", "batches"]

KEPT_EPOCHS = 2
"""Sequences in memory: of the present epoch, and the next, whose shards are prefetched."""
SAMPLE_LIMIT = 1 << 48
"""Exclusive bound of an epoch's samples. Positions are divided as floats, which have 53 bits."""


class ShardedOrder:
    """Order of all epochs' samples. A sample's id counts shard by shard over all streams."""

    def __init__(
        self,
        streams: Sequence[Ints],
        shares: Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        block: int | None,
        partitions: int = 1,
        interleave: Interleave = "shards",
        batch: int = 1,
        files: Sequence[Ints] | None = None,
        inner: int | None = None,
    ) -> None:
        """streams: sizes of each one's shards. shares: samples of each that an epoch takes, fewer or more than it has.
        block, inner: about how many samples are shuffled together, overall and in files with several blocks; None: all
        of a partition, as `block`. interleave: units of `partitions` samples or of `batch`. files: of each shard,
        ascending over all streams; None: each is one."""
        self._streams = [np.asarray(sizes, np.int64) for sizes in streams]
        self._shares = [int(share) for share in shares]
        one = len(self._streams) == 1
        self._sizes = self._streams[0] if one else np.concatenate([np.zeros(0, np.int64), *self._streams])
        self.starts: Ints = np.concatenate([[0], np.cumsum(self._sizes)])
        """First sample of each shard, then the number of all; shape (shards + 1,)."""
        self._length = sum(self._shares)
        if not 0 < self._length < SAMPLE_LIMIT:
            raise DatasetError(
                f"an epoch must have 1 to {SAMPLE_LIMIT - 1} samples, got {self._length}. Check split and epoch_size"
            )
        self._seed, self._shuffle, self._block, self._inner = seed, shuffle, block, inner
        self._files = files
        self._all_files = None if files is None else np.concatenate([np.zeros(0, np.int64), *files])
        self.partitions = partitions
        taken = [number for number, share in enumerate(self._shares) if share]
        self._groups = [taken] if interleave == "shards" else [[number] for number in taken]
        self._unit = batch if interleave == "batches" else partitions
        lengths = np.array([sum(self._shares[number] for number in group) for group in self._groups], np.int64)
        self._units, self._rests = lengths // self._unit, lengths % self._unit
        self._rest_ends = np.cumsum(self._rests)
        self._interleaving = Interleaving(self._units.tolist())
        self._epochs = Recent[int, list[PartSequence]](KEPT_EPOCHS)

    def __len__(self) -> int:
        return self._length

    def ids(self, epoch: int, positions: npt.ArrayLike) -> Ints:
        """Return the ids at positions in [0, len(self)) of an epoch."""
        at = np.asarray(positions, np.int64)
        ids = np.empty_like(at)
        for sequence, chosen, inner in self._split(epoch, at):
            ids[chosen] = sequence.ids(inner)
        return ids

    def shards_of(self, ids: Ints) -> Ints:
        return np.searchsorted(self.starts, ids, side="right") - 1

    def shards(self, epoch: int, positions: npt.ArrayLike) -> Ints:
        """Return all shards of these positions' blocks, in the order in which they are needed."""
        at = np.asarray(positions, np.int64)
        blocks = [
            (int(chosen[index]), shards)
            for sequence, chosen, inner in self._split(epoch, at)
            for index, shards in sequence.blocks(inner)
        ]
        blocks.sort(key=lambda block: block[0])
        needed = np.concatenate([np.zeros(0, np.int64), *(shards for _, shards in blocks)])
        _, first = np.unique(needed, return_index=True)
        return needed[np.sort(first)]

    def _split(self, epoch: int, at: Ints) -> Iterator[tuple[PartSequence, Ints, Ints]]:
        """Yield (sequence, places in `at`, positions in the sequence)."""
        sequences = self._epoch(epoch)
        if len(sequences) == 1:
            yield sequences[0], np.arange(len(at)), at
            return
        whole = self._interleaving.units * self._unit
        in_turn, late = np.flatnonzero(at < whole), np.flatnonzero(at >= whole)
        for number, chosen, units in self._interleaving.split(at[in_turn] // self._unit):
            chosen = in_turn[chosen]
            yield sequences[number], chosen, units * self._unit + at[chosen] % self._unit
        group = np.searchsorted(self._rest_ends, at[late] - whole, side="right")
        for number in np.unique(group).tolist():
            chosen = late[group == number]
            begin = whole + int(self._rest_ends[number] - self._rests[number])
            yield sequences[number], chosen, self._units[number] * self._unit + at[chosen] - begin

    def _epoch(self, epoch: int) -> list[PartSequence]:
        return self._epochs.get(epoch, lambda: [self._sequence(number, epoch) for number in range(len(self._groups))])

    def _sequence(self, group: int, epoch: int) -> PartSequence:
        parts = []
        for number in self._groups[group]:
            first = sum(len(sizes) for sizes in self._streams[:number])
            key = derive_seed(self._seed, "draw", number)
            share, sizes = self._shares[number], self._streams[number]
            files = None if self._files is None else self._files[number]
            parts.append(parts_of(sizes, share, first, epoch=epoch, key=key, shuffle=self._shuffle, files=files))
        return PartSequence(
            ShardParts.joined(parts),
            self._sizes,
            self.starts,
            key=derive_seed(self._seed, "order", group, epoch),
            shuffle=self._shuffle,
            block=self._block,
            partitions=self.partitions,
            files=self._all_files,
            inner=self._inner,
        )
