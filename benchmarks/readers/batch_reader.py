"""Base of the readers that are compared: an epoch is batches, and its samples are the rows of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.streaming_data import BATCH, KINDS, collate
from benchmarks.streaming_player import Reader

from penstock.data import StreamingDataset, StreamingLoader

__all__ = ["SEED", "BatchReader", "Ours", "all_samples", "value_column"]

SEED = 1


def value_column(kind: str) -> str:
    """Return the name of the column that has the values of a kind."""
    return KINDS[kind].column


def all_samples(kind: str, count: int) -> Iterator[dict[str, Any]]:
    """Return the samples of a kind, which are the same for each writer."""
    return map(KINDS[kind].sample, range(count))


class BatchReader(Reader):
    """Reader whose batches are dicts of "number" and the column of values: tensors, or a list of bytes."""

    def samples(self, kind: str, folder: str, *, shuffle: bool) -> Iterator[dict[str, Any]]:
        for batch in self.batches(kind, folder, shuffle=shuffle, workers=0):
            for row in zip(*batch.values(), strict=True):
                yield dict(zip(batch, row, strict=True))


class Ours(BatchReader):
    """Penstock's StreamingLoader with every default. Subclasses index what the other library wrote in `write`."""

    packages: tuple[str, ...] = ("torch", "numpy")

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        images: dict[str, Any] = {"collate_fn": collate} if value_column(kind) == "image" else {}
        return StreamingLoader(StreamingDataset(local=folder), batch_size=BATCH, shuffle=shuffle, seed=SEED, **images)
