"""Loaders over a sharded dataset."""

from __future__ import annotations

from typing import Any

from penstock.data import StreamingDataset, StreamingLoader


def streamed(where: str, cache: str, **options: Any) -> StreamingLoader:
    return StreamingLoader(StreamingDataset(where, cache), **options)
