"""Synthetic input: a loader that repeats the first batch of the user's loader (`Appliance(synthetic=True)`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

__all__ = ["NOT_SAVED", "FirstBatch"]

NOT_SAVED = (
    "Appliance(synthetic=True) repeats the first batch of each worker, so it has no position to save. Measure without "
    "saving states, or remove synthetic=True and PENSTOCK_SYNTHETIC"
)


class FirstBatch:
    """Loader that yields the first batch of `loader` again and again: `len(loader)` times in each epoch, or without end
    if `loader` has no length.

    `loader` makes one batch, and is then dropped with its worker processes.
    """

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
