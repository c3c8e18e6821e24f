"""Digest of a batch: a number of 64 bits that is cheap to compute. Readers, replays and stream digests use it.

It distinguishes a wrong batch from the right one; unless it covers all bytes, it is no checksum of every byte. It
always covers the structure and all shapes. **No leaf is ever left out**, because a wrong label beside a right image is
a wrong batch. Covered are

- all bytes of a batch of up to 256 KiB (5 us);
- of a larger one all leaves of up to 16 KiB in full, and leaves of up to 256 KiB in full if they have 256 KiB together;
- of each other leaf both ends, of 4 KiB divided by the number of such leaves, and at least 64 words of 8 bytes spread
  between: a leaf of other samples differs in nearly all of these. If there are more than 8 such leaves, the ends of
  each have 256 bytes, and it has 8 words.

A batch of one leaf above 256 KiB takes 1.5 us, one of six 3; all bytes of 1 MiB would take 20. What is covered is a
function of the structure and the shapes (`Sampling`), so runner, reader and replay cover the same bytes.

DigestCover.ROWS sums the digests of the batch's rows: row i is element i of each tensor and array whose first dimension
is the number of rows (`rows_in`). Sums over all boxes do not depend on the number of boxes. They do not cover the order
of rows, nor values that are not rows: the chain of an epoch's batches, which a replay compares, covers these by another
digest of all bytes (`rows_digests`).

The hash is xxh3, the same on every machine of one byte order; Python's own hash() is not."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from penstock.proto.batch.structure import Structure
    from penstock.proto.v1 import records_pb2


class DigestCover(IntEnum):
    """Bytes that a batch's digest covers: a SAMPLE, all (FULL), or each row by itself. In a BATCH frame's flags."""

    SAMPLE = 0
    FULL = 1
    ROWS = 2


def cover_of(options: records_pb2.Options) -> DigestCover:
    if options.row_digest:
        return DigestCover.ROWS
    return DigestCover.FULL if options.full_digest else DigestCover.SAMPLE


MASK: Final = (1 << 64) - 1

FULL_BELOW: Final = 256 << 10
"""Bytes of a batch up to which its digest covers all of it, and of its leaves above SMALL_LEAF together."""

SMALL_LEAF: Final = 16 << 10
"""Bytes up to which a leaf is covered in full in any batch."""

FEW_LEAVES: Final = 8
"""Sampled leaves up to which each has WORDS and a share of EDGES; with more, WORDS_OF_MANY and EDGE_OF_MANY."""

EDGES: Final = 4 << 10
"""Bytes at the beginnings of all sampled leaves together that the digest covers, and at their ends."""
EDGE_OF_MANY: Final = 256

WORDS: Final = 64
WORDS_OF_MANY: Final = 8
"""Smallest number of covered 8-byte words between the two ends of a sampled leaf."""

_GATHERED: Final = 1 << 10
"""Bytes up to which a span is gathered with the words, because a hash of its own would take longer."""

_KEPT_BYTES: Final = 1 << 20
"""Largest memory of one cache of shapes, about. Most streams have only a few different shapes."""

_LEAF_BYTES: Final = 1 << 10


class Sampling:
    """Bytes of a batch that its digest covers if not all: `words`, slices as 8-byte words, and `spans`, slices as
    bytes.

    numpy gathers the words of several slices (0.4 us, and 1.3 ns a word; 0.7 us a slice otherwise), but not for the
    first batch: the preparation would cost more, and a stream may have other shapes in each batch."""

    __slots__ = ("_gather", "_only", "_spans", "_used", "_words", "leaves")

    def __init__(self, leaves: int, words: list[slice], spans: list[slice]) -> None:
        self.leaves = leaves
        self._words = words
        self._only = words[0] if len(words) == 1 else None
        self._spans = spans
        self._used = False
        self._gather: Callable[[memoryview, int, int], Any] | None = None

    def digest(self, seed: int, memory: memoryview, offset: int, nbytes: int) -> int:
        region = memory[offset : offset + nbytes]
        if self._only is not None:
            seed = xxh3_64_intdigest(region.cast("Q")[self._only].tobytes(), seed)
        elif self._gather is not None:
            seed = xxh3_64_intdigest(self._gather(memory, offset, nbytes), seed)
        else:
            words = region.cast("Q")
            seed = xxh3_64_intdigest(b"".join([words[part].tobytes() for part in self._words]), seed)
            if self._used:
                self._gather = _gatherer(self._words)
            self._used = True
        for span in self._spans:  # Each part seeds the next: one call fewer per part than updating a hash object.
            seed = xxh3_64_intdigest(region[span], seed)
        return seed


def _gatherer(words: list[slice]) -> Callable[[memoryview, int, int], Any]:
    import numpy as np  # here: the receiver imports this module, and computes no digests

    index = np.concatenate([np.arange(part.start, part.stop, part.step, dtype=np.intp) for part in words])
    array, word = np.ndarray, np.dtype(np.uint64)
    return lambda memory, offset, nbytes: array(nbytes >> 3, word, memory, offset)[index]


def sampling_of(structure: Structure, nbytes: int, shapes: Sequence[int]) -> Sampling | None:
    """Return which bytes a digest covers; None: all, also for a malformed frame, which is refused later.

    A leaf counts with the gap behind it, which is zero, so that it is one span with what follows."""
    if nbytes <= FULL_BELOW:
        return None
    leaves = _large_leaves(structure, nbytes, shapes)
    if sum([size for _, size in leaves if size <= FULL_BELOW]) <= FULL_BELOW:
        leaves = [leaf for leaf in leaves if leaf[1] > FULL_BELOW]
    if not leaves:
        return None
    edge, count = EDGES // len(leaves) & -64, WORDS
    if len(leaves) > FEW_LEAVES:
        edge, count = EDGE_OF_MANY, WORDS_OF_MANY
    words: list[slice] = []
    spans: list[slice] = []
    begin = 0
    for start, size in leaves:
        _add_span(begin, start + edge, words, spans)
        inner = size - 2 * edge
        # An odd number of words apart: if each row of an image or padded sequence has a power-of-two number of bytes,
        # all words could fall on one column otherwise.
        step = max(1, inner // (8 * count) - 1) | 1  # odd, and no larger
        begin = start + edge + inner
        words.append(slice(start + edge >> 3, begin >> 3, step))
    _add_span(begin, nbytes, words, spans)
    return Sampling(len(leaves), words, spans)


def _add_span(begin: int, end: int, words: list[slice], spans: list[slice]) -> None:
    if end - begin > _GATHERED:
        spans.append(slice(begin, end))
    else:
        words.append(slice(begin >> 3, end >> 3, 1))


def _large_leaves(structure: Structure, nbytes: int, shapes: Sequence[int]) -> list[tuple[int, int]]:
    large: list[tuple[int, int]] = []
    if len(shapes) != structure.dims:
        return large
    at = start = 0
    for itemsize, dims in structure.sizes:
        if dims == 1:
            size = (itemsize * shapes[at] + 63) & -64
        else:
            size = (prod(shapes[at : at + dims], start=itemsize) + 63) & -64
        at += dims
        if size > SMALL_LEAF:
            if start + size > nbytes:
                return []
            large.append((start, size))
        start += size
    return large if start == nbytes else []


class _Cache(dict[Any, Any]):
    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = 0

    def keep(self, key: Any, value: Any, dims: int, sampling: Sampling | None) -> None:
        size = 300 + 64 * dims + (_LEAF_BYTES * sampling.leaves if sampling is not None else 0)
        self._held += size
        if self._held > _KEPT_BYTES:
            self.clear()
            self._held = size
        if size <= _KEPT_BYTES:
            self[key] = value


_plans = _Cache()


def plan_digest(structure: Structure, nbytes: int, shapes: Sequence[int]) -> tuple[int, bytes, Sampling | None]:
    """Return a digest's hash seed (a hash of structure, shapes and size), the packed shapes, and what is sampled."""
    key = structure.key, nbytes, tuple(shapes)
    plan: tuple[int, bytes, Sampling | None] | None = _plans.get(key)
    if plan is None:
        packed = struct.pack(f"<{1 + len(shapes)}Q", nbytes, *shapes)
        sampling = sampling_of(structure, nbytes, shapes)
        plan = xxh3_64_intdigest(packed, structure.key), packed[8:], sampling
        _plans.keep(key, plan, len(shapes), sampling)
    return plan


class ShapesCache:
    """Cache for a reader of batches with one structure: (size, packed shapes) -> shapes, hash seed, sampling."""

    __slots__ = ("_known", "_structure")

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._known = _Cache()

    def find(self, nbytes: int, dims: bytes) -> tuple[list[int], int, Sampling | None]:
        """Return a batch's shapes, which the caller must not change, and the hash seed and sampling of its digest."""
        found: tuple[list[int], int, Sampling | None] | None = self._known.get((nbytes, dims))
        if found is None:
            shapes = list(struct.unpack(f"<{len(dims) >> 3}Q", dims))
            seed = xxh3_64_intdigest(nbytes.to_bytes(8, "little") + dims, self._structure.key)
            sampling = sampling_of(self._structure, nbytes, shapes)
            found = shapes, seed, sampling
            self._known.keep((nbytes, dims), found, len(shapes), sampling)
        return found


def batch_digest(
    structure: Structure, region: Any, offset: int, nbytes: int, shapes: Sequence[int], full: bool = False
) -> int:
    """Return the digest. `full`: cover every byte. Raises ValueError if the data are not inside `region`."""
    memory = _checked(region, offset, nbytes)
    seed, _, sampling = plan_digest(structure, nbytes, shapes)
    return region_digest(seed, memory, offset, nbytes, None if full else sampling)


def _checked(region: Any, offset: int, nbytes: int) -> memoryview:
    memory = memoryview(region)
    if memory.format != "B" or memory.ndim != 1:
        memory = memory.cast("B")
    if offset < 0 or nbytes < 0 or offset + nbytes > len(memory):
        raise ValueError(f"a batch of {nbytes} bytes at {offset} must lie within {len(memory)} bytes")
    return memory


def rows_in(structure: Structure, shapes: Sequence[int]) -> int:
    """Return the first dimension of a batch's first tensor or array that has a dimension; 1 if none has."""
    dims = 0
    for leaf in structure.leaves:
        if leaf.rank:
            return shapes[dims]
        dims += leaf.dims
    return 1


def digests_of(
    cover: DigestCover, structure: Structure, shapes: Sequence[int], region: Any, offset: int, nbytes: int
) -> tuple[int, int]:
    """Return a batch's digest, and the one that the chain of its epoch's batches links."""
    if cover == DigestCover.ROWS:
        seed = plan_digest(structure, nbytes, shapes)[0]
        return rows_digests(seed, structure, shapes, region, offset, nbytes)
    digest = batch_digest(structure, region, offset, nbytes, shapes, cover == DigestCover.FULL)
    return digest, digest


def rows_digests(
    seed: int, structure: Structure, shapes: Sequence[int], region: Any, offset: int, nbytes: int
) -> tuple[int, int]:
    """Return the sum, modulo 2^64, of the digests of a batch's rows (`row_digests`), and a digest that covers the rows
    in their order and all values that are not rows. `seed`: from `plan_digest`."""
    digests, others = _by_rows(structure, shapes, region, offset, nbytes)
    for value in others:
        seed = xxh3_64_intdigest(value, seed)
    return sum(digests) & MASK, xxh3_64_intdigest(array("Q", digests), seed)


def row_digests(structure: Structure, shapes: Sequence[int], region: Any, offset: int, nbytes: int) -> list[int]:
    """Return the digest of each row of a batch; an empty list if no tensor or array has rows.

    It chains one xxh3_64 for each tensor or array: the hash of the row's bytes in one is the hash seed for the next.
    The first seed is the structure's key. Raises ValueError for shapes that do not match `nbytes`."""
    return _by_rows(structure, shapes, region, offset, nbytes)[0]


def _by_rows(
    structure: Structure, shapes: Sequence[int], region: Any, offset: int, nbytes: int
) -> tuple[list[int], list[memoryview]]:
    """Digest of each row of a batch, and the bytes of all values that are not rows."""
    if len(shapes) != structure.dims:
        raise ValueError(f"a batch needs {structure.dims} dimensions in shapes, got {len(shapes)}")
    memory = _checked(region, offset, nbytes)
    count = rows_in(structure, shapes)
    columns: list[tuple[int, int]] = []
    others: list[memoryview] = []
    at = start = 0
    for leaf in structure.leaves:
        shape = shapes[at : at + leaf.dims]
        at += leaf.dims
        size = prod(shape, start=leaf.itemsize)
        if start + size > nbytes:
            raise ValueError(f"a tensor must end within the {nbytes} bytes of its batch, got {start + size}")
        if leaf.rank and size and shape[0] == count:
            columns.append((offset + start, size // count))
        elif size:
            others.append(memory[offset + start : offset + start + size])
        start += (size + 63) & -64
    digests, key = [], structure.key
    for row in range(count if columns else 0):
        digest = key
        for begin, size in columns:
            begin += row * size
            digest = xxh3_64_intdigest(memory[begin : begin + size], digest)
        digests.append(digest)
    return digests, others


def region_digest(seed: int, memory: memoryview, offset: int, nbytes: int, sampling: Sampling | None) -> int:
    """Return the digest of the batch at `offset`. Bounds are not checked. sampling None: cover every byte."""
    if sampling is None:
        return xxh3_64_intdigest(memory[offset : offset + nbytes], seed)
    return sampling.digest(seed, memory, offset, nbytes)
