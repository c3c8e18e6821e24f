"""Loaders over sources in logical shards."""

from __future__ import annotations

from typing import Any

from listed import Counting, Listed

from penstock.worker.datasets import ShardLoader


def listed(lengths: list[int], **options: Any) -> ShardLoader:
    """Finite, with lengths that are not known beforehand."""
    return ShardLoader(Listed(lengths, known=False), keys="keys", **options)


def counting(shards: int, **options: Any) -> ShardLoader:
    return ShardLoader(Counting(shards), keys="keys", **options)
