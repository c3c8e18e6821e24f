"""Order of a map-style dataset, which has no shards. All epochs, of any length, laid end to end, repeat the dataset;
with shuffle each repeat is another permutation, so no sample comes again before all have come:

    epoch, position -> number over all epochs -> repeat, and index in it -> permuted

With blocks, a repeat's blocks are permuted, and samples within each. All are equally long but one with the rest, at a
random place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.permutation import Ints, mix, permuted
from penstock.proto.errors import DatasetError
from penstock.proto.state.generators import derive_seed

SAMPLE_LIMIT = 1 << 48
_BLOCKS, _SHORT, _INSIDE = 0, 1, 2
"""Mixed into keys: for the order of a repeat's blocks, the place of the short block, and the order within a block."""


class UnshardedOrder:
    def __init__(self, count: int, epoch_size: int, *, seed: int, shuffle: bool, block: int | None = None) -> None:
        if not 0 < count < SAMPLE_LIMIT or not 0 < epoch_size < SAMPLE_LIMIT:
            raise DatasetError(
                f"the dataset and an epoch must have 1 to {SAMPLE_LIMIT - 1} samples, got {count} and {epoch_size}"
            )
        self._count, self._length, self._shuffle = count, epoch_size, shuffle
        self._block = count if block is None else min(block, count)
        self._key = derive_seed(seed, "cycle")

    def __len__(self) -> int:
        return self._length

    def ids(self, epoch: int, positions: npt.ArrayLike) -> Ints:
        repeat, first = divmod(epoch * self._length, self._count)  # a Python int: epoch * length may exceed 64 bits
        at = np.asarray(positions, np.int64) + first
        if not self._shuffle:
            return at % self._count
        repeats = (at // self._count).astype(np.uint64) + np.uint64(repeat & (2**64 - 1))
        return self._permuted(at % self._count, mix(self._key, repeats))

    def _permuted(self, at: Ints, keys: npt.NDArray[np.uint64]) -> Ints:
        block, count = self._block, self._count
        if block == count:
            return permuted(at, count, keys)
        blocks, rest = divmod(count, block)
        # The short block has the dataset's last samples. Its key decides how many whole blocks come before it.
        short = _chosen(keys, blocks + 1) * block
        inside_short = (at >= short) & (at < short + rest)
        whole = np.where(at >= short + rest, at - rest, at)
        slot = np.where(inside_short, blocks, whole // block)
        offset = np.where(inside_short, at - short, whole % block)
        chosen = permuted(np.minimum(slot, blocks - 1), blocks, _mixed(keys, _BLOCKS))
        chosen = np.where(inside_short, blocks, chosen)
        size = np.where(inside_short, max(1, rest), block)
        return chosen * block + permuted(offset, size, _mixed(_mixed(keys, _INSIDE), chosen))


def _mixed(keys: npt.NDArray[np.uint64], part: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    return mix(0, keys, part)


def _chosen(keys: npt.NDArray[np.uint64], count: int) -> Ints:
    return (_mixed(keys, _SHORT) % np.uint64(count)).astype(np.int64)
