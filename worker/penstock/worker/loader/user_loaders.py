"""Refusal of some users' loaders, skips of quarantined batches, and repeats of a first batch
(PENSTOCK_SYNTHETIC)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from torch.utils.data import _DatasetKind

from penstock.proto.errors import InputFnError

_DEPTH = 8


def refuse_separate_barriers(loader: Any, name: str) -> None:
    """Raise InputFnError if a slot's loader reads a mosaicml-streaming StreamingDataset made as one of several workers.

    Workers of a torch DataLoader meet at a barrier in shared memory at each epoch's start. If each slot makes a
    dataset, it waits for as many workers as get_worker_info() named, but they share no barrier. One made in the
    training process and sent to the slots works. The library is recognised by names, without an import.
    """
    for _ in range(_DEPTH):
        if _is_mosaicml(loader) and getattr(getattr(loader, "_unique_rank_world", None), "workers_per_rank", 1) > 1:
            raise InputFnError(
                f"{name}: StreamingDatasets of mosaicml-streaming in several slots would wait for each other for ever. "
                "Use penstock.data.StreamingDataset (docs/from_mosaicml_streaming.md), or num_workers_per_box=1"
            )
        loader = getattr(loader, "dataset", None)


def _is_mosaicml(value: Any) -> bool:
    return any(
        base.__name__ == "StreamingDataset" and base.__module__.partition(".")[0] == "streaming"
        for base in type(value).__mro__
    )


class CannotSkipError(Exception):
    """This loader's batches cannot be skipped, for the reason in the text."""


class _FetchesNothing:
    def fetch(self, index: Any) -> None:
        return None


def skip_batch(loader: Any, iterator: Any) -> None:
    """Skip a loader's next batch without making it, because making it kills the process: by a method `skip_batch()` of
    the loader or its iterator, or, for torch's DataLoader and StatefulDataLoader with num_workers=0 and a map-style
    dataset, by a fetcher that fetches nothing, so that all else advances. Raises StopIteration at the epoch's end,
    CannotSkipError."""
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


NOT_SAVED = "PENSTOCK_SYNTHETIC repeats the first batch of each worker: unset it to save"


class FirstBatch:
    """Loader that repeats `loader`'s first batch `len(loader)` times an epoch, or without end. `loader` makes one
    batch, and is then dropped."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._no_length: Exception | None = None
        try:
            self._length = len(loader)  # type: ignore[arg-type]
        except Exception as error:
            self._length, self._no_length = -1, error.with_traceback(None)
        self._loader: Iterable[Any] | None = loader
        self._batches: list[Any] = []

    def __len__(self) -> int:
        if self._no_length is not None:
            raise self._no_length
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if self._loader is not None:
            for batch in self._loader:
                self._batches.append(batch)
                break
            self._loader = None
        for batch in self._batches:
            return repeat(batch) if self._no_length is not None else repeat(batch, self._length)
        return iter(())
