"""The cheap fingerprint of a delivered batch, kept in the flight record and compared after a replay.

It tells a wrong batch from the right one; it is no checksum of every byte. It covers the structure, all shapes, and
of the data everything up to 64 KiB, above that the first and last 4 KiB and from 64 to 127 words of 8 bytes spread
between: a batch of other samples differs in nearly all of them, and it costs 1 to 2 us at any size, where all of
1 MiB takes 9 to 18. Up to 64 KiB, right after they were written, all bytes cost no more than the sample. The words
lie an odd number of words apart, so that with rows of a power of two (images, padded sequences) they do not all fall
on one column. `full` covers every byte of any batch.

The flight record is the chain of a box's digests in the order of delivery (penstock.proto.position): equal chains at
a step are equal streams up to it.

xxh3 of the same bytes is the same on every machine of one byte order; Python's own hash() is not.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

from xxhash import xxh3_64_intdigest

__all__ = ["FULL_BELOW", "batch_digest"]

FULL_BELOW: Final = 64 << 10
"""Bytes up to which a region is covered in full."""

EDGE: Final = 4 << 10
"""Bytes at each end of a larger one."""

WORDS: Final = 64
"""Of 8 bytes each, between the ends, at least."""

_LAYOUTS_KEPT: Final = 1024
_layouts: dict[tuple[int, int, tuple[int, ...]], int] = {}
"""Seeds of the layouts seen last, for a stream has few of them."""


def _layout_seed(structure_key: int, nbytes: int, shapes: Sequence[int]) -> int:
    layout = structure_key, nbytes, tuple(shapes)
    seed = _layouts.get(layout)
    if seed is None:
        if len(_layouts) >= _LAYOUTS_KEPT:
            _layouts.clear()
        seed = _layouts[layout] = xxh3_64_intdigest(array("Q", (nbytes, *shapes)).tobytes(), structure_key)
    return seed


def batch_digest(
    structure_key: int, region: Any, offset: int, nbytes: int, shapes: Sequence[int], full: bool = False
) -> int:
    """The digest of the batch whose data are `nbytes` at `offset` of the buffer `region`; unsigned, 64 bits.

    structure_key: Structure.key. shapes: FlatBatch.shapes. full: cover every byte. Padding between leaves is covered:
    FlatBatch.write_to zeroes it. Raises ValueError if the region does not lie in the buffer.
    """
    memory = memoryview(region)
    if memory.format != "B" or memory.ndim != 1:
        memory = memory.cast("B")
    if offset < 0 or nbytes < 0 or offset + nbytes > len(memory):
        raise ValueError(f"a region of {nbytes} bytes at {offset} in a buffer of {len(memory)}")
    seed = _layout_seed(structure_key, nbytes, shapes)
    end = offset + nbytes
    if full or nbytes <= FULL_BELOW:
        return xxh3_64_intdigest(memory[offset:end], seed)
    inner = (nbytes - 2 * EDGE) & -8
    step = max(1, inner // 8 // WORDS - 1) | 1  # odd, and no larger
    sample = memory[offset + EDGE : offset + EDGE + inner].cast("Q")[::step].tobytes()
    # Each part seeds the next: one call less for each than an object that is updated.
    head = xxh3_64_intdigest(memory[offset : offset + EDGE], seed)
    return xxh3_64_intdigest(memory[end - EDGE : end], xxh3_64_intdigest(sample, head))
