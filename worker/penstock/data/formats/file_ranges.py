"""Ranges of a remote file as separate files in a cache (in `NAME.ranges`), so that a reader fetches only what it needs.

Parts are blocks (row groups of Parquet, record batches of Arrow), or, in formats without, spans of about SPAN_BYTES. A
shuffle keeps a block's samples near each other, because it is decoded as a whole. Spans do not affect the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.ordering.permutation import Ints

MIN_RANGE_BYTES = 256 << 10
"""Smallest mean size of parts that are fetched one by one: a request takes as long as a transfer of about this size."""
SPAN_BYTES = 4 << 20
"""Smallest span except the last: a few requests at a time use the whole bandwidth, and little else is fetched."""


def has_ranges(shard: Shard) -> bool:
    """Return True if parts are fetched one by one: several large ones, listed in the index, not compressed."""
    packed = any(file.packed for file in shard.files)
    return bool(shard.ranges) and not packed and are_large_parts(len(shard.parts), shard.files[0].raw.size)


def are_large_parts(count: int, size: int) -> bool:
    return count > 1 and size >= count * MIN_RANGE_BYTES


def part_shard(shard: Shard, part: int) -> Shard:
    samples = shard.parts[part]
    file = file_range(shard, *shard.ranges[2 * part : 2 * part + 2])
    blocks = (samples,) if shard.blocks else ()
    return replace(shard, samples=samples, files=(file,), blocks=blocks, decoded_bytes=0, spans=(), ranges=())


def file_range(shard: Shard, begin: int, end: int) -> ShardFile:
    """Return a range of a shard's first file as a file of its own, with a name in the cache."""
    name, whole = f"{shard.name}.ranges/{begin}-{end}", shard.files[0].raw
    return ShardFile(StoredFile(name, end - begin, source=whole.name, begin=begin, version=whole.version))


def with_spans(shard: Shard, offsets: Ints) -> Shard:
    """Divide the shard into spans. `offsets`: of each sample, then the end of the last; (samples + 1,), in bytes."""
    firsts = spans_of(offsets)
    if len(firsts) <= 2:  # one span is the whole file
        return shard
    ranges = [(int(offsets[first]), int(offsets[end])) for first, end in pairwise(firsts)]
    spans = tuple(end - first for first, end in pairwise(firsts))
    return replace(shard, spans=spans, ranges=(*(at for pair in ranges for at in pair), shard.files[0].raw.size))


def spans_of(offsets: Ints) -> Sequence[int]:
    """Return the first sample of each span, then the number of samples."""
    firsts, last = [0], len(offsets) - 1
    while firsts[-1] < last:
        end = int(np.searchsorted(offsets, offsets[firsts[-1]] + SPAN_BYTES))
        firsts.append(min(max(end, firsts[-1] + 1), last))
    return firsts
