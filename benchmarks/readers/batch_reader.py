"""Base class of the readers that are compared. A reader yields an epoch in batches; the epoch's samples are the rows of
these batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.streaming_data import BATCH, KINDS, collate
from benchmarks.streaming_player import Reader

from penstock.data import StreamingDataset, StreamingLoader

__all__ = ["SEED", "BatchReader", "Ours", "all_samples", "value_column"]

SEED = 1


def value_column(kind: str) -> str:
    """Return the name of the column that has the samples' values in a kind of data. `kind`: name of the kind."""
    return KINDS[kind].column


def all_samples(kind: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the samples of a kind of data, which are the same for each library that writes them. `kind`: name of the
    kind."""
    return map(KINDS[kind].sample, range(count))


class BatchReader(Reader):
    """Reader whose batches are dicts with the key "number", a tensor, and the column of values: a tensor, or a list of
    bytes."""

    def samples(self, kind: str, folder: str, *, shuffle: bool) -> Iterator[dict[str, Any]]:
        for batch in self.batches(kind, folder, shuffle=shuffle, workers=0):
            for row in zip(*batch.values(), strict=True):
                yield dict(zip(batch, row, strict=True))


class Ours(BatchReader):
    """Penstock's StreamingLoader with its defaults, and images as arrays. `write` of a subclass indexes the files that
    the other library has written."""

    packages: tuple[str, ...] = ("torch", "numpy")

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        images = value_column(kind) == "image"
        dataset = StreamingDataset(local=folder, images="array" if images else "pil")  # as docs/formats.md advises
        function: dict[str, Any] = {"collate_fn": collate} if images else {}
        return StreamingLoader(dataset, batch_size=BATCH, shuffle=shuffle, seed=SEED, **function)
