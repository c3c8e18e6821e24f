"""Skipping of a quarantined batch: the loader advances without making the batch, because making it kills the process.

A loader can skip a batch itself, by a method `skip_batch()` of the loader or its iterator. Otherwise torch's DataLoader
and StatefulDataLoader are supported, with num_workers=0 and a map-style dataset: for one `next()` their fetcher is
replaced by one that fetches nothing. So sampler, counters and everything else advance as for any batch.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import _DatasetKind

__all__ = ["CannotSkipError", "skip_batch"]


class CannotSkipError(Exception):
    """Error for a loader whose batches cannot be skipped. Its text is the reason."""


class _FetchesNothing:
    """Stand-in for the fetcher of a torch loader, which reads no samples."""

    def fetch(self, index: Any) -> None:
        return None


def skip_batch(loader: Any, iterator: Any) -> None:
    """Skip the next batch of a loader.

    Raises:
        StopIteration: the epoch has no more batches.
        CannotSkipError: this loader's batches cannot be skipped.
    """
    for owner in (iterator, loader):
        method = getattr(owner, "skip_batch", None)
        if callable(method):
            method()
            return
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is None:
        workers = getattr(loader, "num_workers", 0)
        raise CannotSkipError(
            f"the loader makes its batches in worker processes (num_workers={workers}), where no batch can be skipped"
            if workers
            else f"neither the loader, a {type(loader).__qualname__}, nor its iterator has a method skip_batch()"
        )
    if iterator._dataset_kind != _DatasetKind.Map:
        raise CannotSkipError("the loader's dataset is an IterableDataset, which can skip a sample only by making it")
    iterator._dataset_fetcher = _FetchesNothing()
    try:
        next(iterator)
    finally:
        iterator._dataset_fetcher = fetcher
