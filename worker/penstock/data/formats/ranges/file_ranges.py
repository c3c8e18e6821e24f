"""Ranges of a remote file as separate files in a cache, so that a reader fetches only the samples that it needs.

A file is fetched in parts: its blocks (row groups of Parquet, record batches of Arrow), or else its spans, which are
consecutive samples of about SPAN_BYTES. The cache has one file for each part: it lies in the folder `NAME.ranges`, and
is fetched, locked and evicted like any other file of the cache.

Spans do not decide the order of samples, and blocks do, because a block is decoded as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.ordering.permutation import Ints

__all__ = ["file_range", "has_ranges", "part_shard", "spans_of", "with_spans"]

MIN_RANGE_BYTES = 256 << 10
"""Smallest mean size in bytes of a file's parts for which parts are fetched one by one. A request takes as long as a
transfer of about this size."""
SPAN_BYTES = 4 << 20
"""Smallest size of a span in bytes, except the last one of a file: a few requests at a time then use the whole
bandwidth, and a sample costs little more than itself."""


def has_ranges(shard: Shard) -> bool:
    """Return True if the parts of a file are large enough to be fetched one by one."""
    count = len(shard.parts)
    packed = any(file.packed for file in shard.files)
    return count > 1 and bool(shard.ranges) and not packed and shard.files[0].raw.size >= count * MIN_RANGE_BYTES


def part_shard(shard: Shard, part: int) -> Shard:
    """Return a part of a file as a shard of its own."""
    samples = shard.parts[part]
    file = file_range(shard, *shard.ranges[2 * part : 2 * part + 2])
    blocks = (samples,) if shard.blocks else ()
    return replace(shard, samples=samples, files=(file,), blocks=blocks, decoded_bytes=0, spans=(), ranges=())


def file_range(shard: Shard, begin: int, end: int) -> ShardFile:
    """Return a range of a shard's first file as a file of its own."""
    return ShardFile(StoredFile(f"{shard.name}.ranges/{begin}-{end}", end - begin, source=shard.name, begin=begin))


def with_spans(shard: Shard, offsets: Ints) -> Shard:
    """Return a shard with the spans of its file. `offsets`: offset of each sample, and the end of the last one; shape
    (samples + 1,)."""
    firsts = spans_of(offsets)
    if len(firsts) <= 2:  # one span is the whole file
        return shard
    ranges = [(int(offsets[first]), int(offsets[end])) for first, end in pairwise(firsts)]
    spans = tuple(end - first for first, end in pairwise(firsts))
    return replace(shard, spans=spans, ranges=(*(at for pair in ranges for at in pair), shard.files[0].raw.size))


def spans_of(offsets: Ints) -> Sequence[int]:
    """Return the number of the first sample of each span, and at the end the number of samples. `offsets`: as in
    `with_spans`."""
    firsts, last = [0], len(offsets) - 1
    while firsts[-1] < last:
        end = int(np.searchsorted(offsets, offsets[firsts[-1]] + SPAN_BYTES))
        firsts.append(min(max(end, firsts[-1] + 1), last))
    return firsts
