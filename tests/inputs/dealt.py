"""Loaders over sources in logical shards."""

from __future__ import annotations

from typing import Any

import numpy as np
from listed import Listed

from penstock.data import Balance, Counts, LogicalShards, Packed, Repeated, ShardLoader, WindowShuffled


def listed(lengths: list[int], **options: Any) -> ShardLoader:
    """Finite, with lengths that are not known beforehand. It counts its samples by their last digit."""
    counts = Counts(by=lambda sample: sample % 10, tokens=lambda sample: sample % 100)
    return ShardLoader(Listed(lengths, known=False), keys="keys", counts=counts, **options)


def balanced(**options: Any) -> ShardLoader:
    """Endless, of whole numbers whose cost is their square; counted."""
    costs = np.arange(1000.0) ** 2
    source = Repeated(LogicalShards([range(400), range(400, 1000)], shards=12, shuffle=True))
    return ShardLoader(source, keys="keys", balance=Balance(costs), counts=Counts(), **options)


def numbers(batch_size: int) -> ShardLoader:
    """Endless, of whole numbers."""
    source = LogicalShards([range(1000)], shards=4, shuffle=True)
    return ShardLoader(Repeated(source), batch_size=batch_size, keys="key")


def packed(length: int, times: int = 1, **options: Any) -> ShardLoader:
    """Endless, of lines of documents: document n is n * 100 + 1, + 2 and so on, `times` times each."""
    documents = [[100 * n + token for token in range(1, 2 + n % 9) for _ in range(times)] for n in range(1, 2001)]
    source = Repeated(LogicalShards([documents], shards=12, shuffle=True))
    lines = Packed(source, length=length, pad=0, split=False, window=7)
    return ShardLoader(WindowShuffled(lines, 5), partitions=2, **options)
