"""Digest of a batch: a number of 64 bits that is cheap to compute. The reader that delivers a batch compares it, a
replay compares it, and the stream digest of a box includes it.

The digest distinguishes a wrong batch from the right one; it is not a checksum of every byte. The structure, all
shapes, and data up to 64 KiB are covered in full. Of larger data the digest covers the first and last 4 KiB, and 64 to
66 words of 8 bytes spread between. A batch of other samples differs in nearly all of these words. The digest costs 1
to 2 us at any size; all bytes of 1 MiB would take 9 to 18 us. Data up to 64 KiB are still in the cache, where all bytes
cost no more than the words. The words lie an odd number of words apart. Otherwise, if each row of an image or padded
sequence has a power-of-two number of bytes, all words could fall on one column. With DigestCover.FULL the digest covers
every byte of any batch. The stream digest combines the digests of a box's batches in the order of delivery
(penstock.proto.state.position): equal stream digests at a step mean equal streams up to it.

With DigestCover.ROWS the digest is the sum of the digests of the batch's rows. Row i consists of element i of each
tensor and array whose first dimension is the batch's number of rows (`rows_in`). The sums of all boxes' batches at a
step, added up, do not depend on the number of boxes. The sum does not cover the order of the rows within the batch, nor
values that are not rows (a number, a text, a tensor of another length).

The runner computes the digest once, when the batch is in its ring. The BATCH frame contains it, and the reader that
delivers the batch compares it with the bytes: see penstock.client.stream.lane_reader.

The hash is xxh3, because it gives the same value on every machine of one byte order; Python's own hash() does not.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from penstock.proto.batch.structure import Structure
    from penstock.proto.v1 import records_pb2

__all__ = [
    "FULL_BELOW",
    "MASK",
    "DigestCover",
    "ShapesCache",
    "batch_digest",
    "cover_of",
    "region_digest",
    "rows_digest",
    "rows_in",
    "seed_and_dims",
]


class DigestCover(IntEnum):
    """Bytes of a batch that its digest covers: a SAMPLE of a large batch, all bytes (FULL), or each row by itself
    (ROWS). The flags of a BATCH frame contain the value."""

    SAMPLE = 0
    FULL = 1
    ROWS = 2


def cover_of(options: records_pb2.Options) -> DigestCover:
    """Return which bytes the digests of a run must cover, according to the run's options."""
    if options.row_digest:
        return DigestCover.ROWS
    return DigestCover.FULL if options.full_digest else DigestCover.SAMPLE


MASK: Final = (1 << 64) - 1
"""Mask for sums of digests, which are computed modulo 2^64."""

FULL_BELOW: Final = 64 << 10
"""Size in bytes of a batch's data up to which its digest covers all of them."""

EDGE: Final = 4 << 10
"""Number of bytes at each end of a batch's data that the digest covers if the data are larger than FULL_BELOW."""

WORDS: Final = 64
"""Smallest number of 8-byte words between the two ends that the digest covers if the data are larger than
FULL_BELOW."""

_SEEDS_KEPT: Final = 1024
_seeds: dict[tuple[int, int, tuple[int, ...]], tuple[int, bytes]] = {}
"""Cache of `seed_and_dims`: arguments -> result. At _SEEDS_KEPT entries all are dropped, because most streams have only
a few different shapes."""
_DIMS_KEPT: Final = 64 << 10
"""Largest total size of the packed shapes in one `ShapesCache`, in bytes. The unpacked lists in the cache take about
six times as much memory."""


def seed_and_dims(structure_key: int, nbytes: int, shapes: Sequence[int]) -> tuple[int, bytes]:
    """Return the hash seed of a batch's digest, and the batch's shapes packed as a BATCH frame contains them. The seed
    is a hash of the structure, the shapes and the size, so that the digest covers them too.

    structure_key: Structure.key. nbytes: size of the batch. shapes: FlatBatch.shapes.
    """
    key = structure_key, nbytes, tuple(shapes)
    found = _seeds.get(key)
    if found is None:
        if len(_seeds) >= _SEEDS_KEPT:
            _seeds.clear()
        packed = struct.pack(f"<{1 + len(shapes)}Q", nbytes, *shapes)
        found = _seeds[key] = xxh3_64_intdigest(packed, structure_key), packed[8:]
    return found


class ShapesCache:
    """Cache for a reader of batches with one structure: a batch's size and packed shapes, as received -> its unpacked
    shapes, and the hash seed of its digest."""

    __slots__ = ("_held", "_key", "_known")

    def __init__(self, structure_key: int) -> None:
        self._key = structure_key
        self._known: dict[tuple[int, bytes], tuple[list[int], int]] = {}
        self._held = 0

    def find(self, nbytes: int, dims: bytes) -> tuple[list[int], int]:
        """Return a batch's shapes as a list, which the caller must not change, and the hash seed of its digest (see
        `seed_and_dims`). `dims`: packed shapes, 8 bytes for each number."""
        found = self._known.get((nbytes, dims))
        if found is None:
            shapes = list(struct.unpack(f"<{len(dims) >> 3}Q", dims))
            found = shapes, xxh3_64_intdigest(nbytes.to_bytes(8, "little") + dims, self._key)
            if len(dims) > _DIMS_KEPT:
                return found
            self._held += 64 + len(dims)
            if self._held > _DIMS_KEPT:
                self._known.clear()
                self._held = 64 + len(dims)
            self._known[nbytes, dims] = found
        return found


def batch_digest(
    structure_key: int, region: Any, offset: int, nbytes: int, shapes: Sequence[int], full: bool = False
) -> int:
    """Return the digest of a batch, an unsigned number of 64 bits. The batch's data are the `nbytes` bytes at `offset`
    of `region`.

    structure_key: Structure.key. shapes: FlatBatch.shapes. full: cover every byte. Padding between leaves is covered,
    because FlatBatch.write_to sets it to zero. Raises ValueError if the data are not inside `region`.
    """
    memory = _checked(region, offset, nbytes)
    return region_digest(seed_and_dims(structure_key, nbytes, shapes)[0], memory, offset, nbytes, full)


def _checked(region: Any, offset: int, nbytes: int) -> memoryview:
    memory = memoryview(region)
    if memory.format != "B" or memory.ndim != 1:
        memory = memory.cast("B")
    if offset < 0 or nbytes < 0 or offset + nbytes > len(memory):
        raise ValueError(
            f"a batch must lie within its buffer of {len(memory)} bytes, got {nbytes} bytes at offset {offset}"
        )
    return memory


def rows_in(structure: Structure, shapes: Sequence[int]) -> int:
    """Return the number of rows of a batch: the first dimension of its first tensor or array that has a dimension; 1 if
    none has. `shapes`: FlatBatch.shapes."""
    dims = 0
    for leaf in structure.leaves:
        if leaf.rank:
            return shapes[dims]
        dims += leaf.dims
    return 1


def rows_digest(structure: Structure, shapes: Sequence[int], region: Any, offset: int, nbytes: int) -> int:
    """Return the sum, modulo 2^64, of the digests of a batch's rows. The batch's data are the `nbytes` bytes at
    `offset` of `region`.

    The digest of row i chains one xxh3_64 for each tensor or array: the hash of the row's bytes in the first tensor is
    the hash seed for its bytes in the second, and so on. The first seed is the structure's key. Raises ValueError for
    shapes that do not match `nbytes`.
    """
    if len(shapes) != structure.dims:
        raise ValueError(f"the structure of a batch needs {structure.dims} dimensions in shapes, got {len(shapes)}")
    memory = _checked(region, offset, nbytes)
    count = rows_in(structure, shapes)
    columns: list[tuple[int, int]] = []
    at = start = 0
    for leaf in structure.leaves:
        shape = shapes[at : at + leaf.dims]
        at += leaf.dims
        size = prod(shape, start=leaf.itemsize)
        if start + size > nbytes:
            raise ValueError(
                f"the shapes of a batch must fit its {nbytes} bytes, but a tensor of it ends at byte {start + size}"
            )
        if leaf.rank and size and shape[0] == count:
            columns.append((offset + start, size // count))
        start += (size + 63) & -64
    total, key = 0, structure.key
    for row in range(count if columns else 0):
        digest = key
        for begin, size in columns:
            begin += row * size
            digest = xxh3_64_intdigest(memory[begin : begin + size], digest)
        total += digest
    return total & MASK


def region_digest(seed: int, memory: memoryview, offset: int, nbytes: int, full: bool) -> int:
    """Return the digest of the batch whose data are the `nbytes` bytes at `offset` of `memory`. Bounds are not checked.
    `seed`: as returned by `seed_and_dims`; `full`: cover every byte."""
    end = offset + nbytes
    if full or nbytes <= FULL_BELOW:
        return xxh3_64_intdigest(memory[offset:end], seed)
    inner = (nbytes - 2 * EDGE) & -8
    step = max(1, inner // 8 // WORDS - 1) | 1  # odd, and no larger
    sample = memory[offset + EDGE : offset + EDGE + inner].cast("Q")[::step].tobytes()
    # Each part seeds the next: one call fewer per part than updating a hash object.
    head = xxh3_64_intdigest(memory[offset : offset + EDGE], seed)
    return xxh3_64_intdigest(memory[end - EDGE : end], xxh3_64_intdigest(sample, head))
