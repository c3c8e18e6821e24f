"""Loaders over a sharded dataset."""

from __future__ import annotations

from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.data import StreamingDataset, StreamingLoader


def streamed(where: str, cache: str, **options: Any) -> StreamingLoader:
    return StreamingLoader(StreamingDataset(where, cache), **options)


def forked(where: str, cache: str, workers: int, **options: Any) -> Any:
    """The same through worker processes of a StatefulDataLoader."""
    return StatefulDataLoader(streamed(where, cache, **options), batch_size=None, num_workers=workers)
