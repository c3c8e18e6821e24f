"""Ranges of a remote file as separate files in a cache, so that a reader fetches only the samples that it needs.

A file is fetched in parts. The parts are its blocks (row groups of Parquet, record batches of Arrow), or, in formats
without blocks, its spans: consecutive samples of about SPAN_BYTES together. The cache has one file for each part: it
lies in the folder `NAME.ranges`, and is fetched, locked and evicted like any other file of the cache.

A shuffle keeps the samples of a block near each other, because a block is decoded as a whole. Spans have no influence
on the order of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.ordering.permutation import Ints

__all__ = ["are_large_parts", "file_range", "has_ranges", "part_shard", "spans_of", "with_spans"]

MIN_RANGE_BYTES = 256 << 10
"""Smallest mean size in bytes of a file's parts for which parts are fetched one by one. Below it the file is fetched as
a whole: a request takes as long as a transfer of about this size."""
SPAN_BYTES = 4 << 20
"""Smallest size in bytes of a span (consecutive samples that are fetched together), except the last span of a file.
With this size a few requests at a time use the whole bandwidth, and little is fetched besides the sample that is
needed."""


def has_ranges(shard: Shard) -> bool:
    """Return True if the parts of a shard's file are to be fetched one by one: it has several, the index lists their
    ranges, the file is not compressed, and the parts are large enough (MIN_RANGE_BYTES on average)."""
    packed = any(file.packed for file in shard.files)
    return bool(shard.ranges) and not packed and are_large_parts(len(shard.parts), shard.files[0].raw.size)


def are_large_parts(count: int, size: int) -> bool:
    """Return True if a file of `size` bytes has several parts, and these have MIN_RANGE_BYTES on average."""
    return count > 1 and size >= count * MIN_RANGE_BYTES


def part_shard(shard: Shard, part: int) -> Shard:
    """Return part number `part` of a shard's file as a shard of its own."""
    samples = shard.parts[part]
    file = file_range(shard, *shard.ranges[2 * part : 2 * part + 2])
    blocks = (samples,) if shard.blocks else ()
    return replace(shard, samples=samples, files=(file,), blocks=blocks, decoded_bytes=0, spans=(), ranges=())


def file_range(shard: Shard, begin: int, end: int) -> ShardFile:
    """Return the bytes from `begin` to `end` of a shard's first file as a file of its own, with a name in the cache."""
    return ShardFile(StoredFile(f"{shard.name}.ranges/{begin}-{end}", end - begin, source=shard.name, begin=begin))


def with_spans(shard: Shard, offsets: Ints) -> Shard:
    """Return the shard with its file divided into spans (consecutive samples that are fetched together). `offsets`:
    offset in the file of each sample, then of the end of the last one; shape (samples + 1,), in bytes."""
    firsts = spans_of(offsets)
    if len(firsts) <= 2:  # one span is the whole file
        return shard
    ranges = [(int(offsets[first]), int(offsets[end])) for first, end in pairwise(firsts)]
    spans = tuple(end - first for first, end in pairwise(firsts))
    return replace(shard, spans=spans, ranges=(*(at for pair in ranges for at in pair), shard.files[0].raw.size))


def spans_of(offsets: Ints) -> Sequence[int]:
    """Return the number of the first sample of each span, then the number of samples. `offsets`: as in `with_spans`."""
    firsts, last = [0], len(offsets) - 1
    while firsts[-1] < last:
        end = int(np.searchsorted(offsets, offsets[firsts[-1]] + SPAN_BYTES))
        firsts.append(min(max(end, firsts[-1] + 1), last))
    return firsts
