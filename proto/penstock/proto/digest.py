"""The cheap fingerprint of a delivered batch, kept in the flight record and compared after a replay.

It tells a wrong batch from the right one; it is no checksum of every byte. It covers the structure, all shapes, and
of the data everything up to 16 KiB, above that the first and last 4 KiB and from 64 blocks of 64 bytes (a large
batch) to 190 (a small one) spread between: a batch of other samples differs in nearly all of them, and it costs 2 us
at any size, where all of 1 MiB takes 10 to 18. The distance of the blocks is an odd multiple of 64 bytes, so that
with rows of a power of two (images, padded sequences) they do not all fall on one column.

xxh3 of the same bytes is the same on every machine of one byte order; Python's own hash() is not.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

__all__ = ["FULL_BELOW", "batch_digest"]

FULL_BELOW: Final = 16 << 10
"""Bytes up to which a region is covered in full."""

EDGE: Final = 4 << 10
"""Bytes at each end of a larger one."""

BLOCKS: Final = 64
BLOCK: Final = 64
"""Samples between the ends at least, and bytes of each."""

_U8: Final = np.dtype(np.uint8)


def batch_digest(structure_key: int, region: Any, offset: int, nbytes: int, shapes: Sequence[int]) -> int:
    """The digest of the batch whose data are `nbytes` at `offset` of the buffer `region`; unsigned, 64 bits.

    structure_key: Structure.key. shapes: FlatBatch.shapes. Padding between leaves is covered: FlatBatch.write_to
    zeroes it. Raises ValueError if the region does not lie in the buffer.
    """
    memory = memoryview(region)
    if memory.format != "B" or memory.ndim != 1:
        memory = memory.cast("B")
    if offset < 0 or nbytes < 0 or offset + nbytes > len(memory):
        raise ValueError(f"a region of {nbytes} bytes at {offset} in a buffer of {len(memory)}")
    seed = xxh3_64_intdigest(array("Q", (nbytes, *shapes)).tobytes(), structure_key)
    end = offset + nbytes
    if nbytes <= FULL_BELOW:
        return xxh3_64_intdigest(memory[offset:end], seed)
    blocks = (nbytes - 2 * EDGE) // BLOCK
    step = (blocks // BLOCKS - 1) | 1  # odd, and no larger
    sample = np.ndarray(((blocks - 1) // step + 1, BLOCK), _U8, memory, offset + EDGE, (step * BLOCK, 1))
    hasher = xxh3_64(memory[offset : offset + EDGE], seed)
    hasher.update(sample.tobytes())
    hasher.update(memory[end - EDGE : end])
    return hasher.intdigest()
