"""Lance, by pylance: its datasets for torch, and Penstock's LanceRows over the same files.

As its page on PyTorch says, rows in sequence come from `lance.torch.data.LanceDataset`, which reads ahead in threads,
and is told how to convert columns of bytes, which it cannot. Its map-style SafeLanceDataset, for a DataLoader that
shuffles, makes Python lists of all values; so here it hands the table that `take` returns to the same function. Tokens
are lists of a fixed size, which that function reshapes without a copy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow
import torch.utils.data
from benchmarks.readers import batch_reader
from benchmarks.readers.batch_reader import SEED, BatchReader, all_samples, value_column
from benchmarks.streaming_data import BATCH

from penstock.data import LanceRows, MapLoader

__all__ = ["Ours", "Theirs"]

# By name, because the type checker's environment lacks it.
lance: Any = importlib.import_module("lance")
data: Any = importlib.import_module("lance.torch.data")

WRITTEN = 1000
"""Number of rows that are given to Lance's writer at a time."""


class Theirs(BatchReader):
    packages = ("pylance", "pyarrow", "torch", "numpy")

    def write(self, kind: str, folder: str, samples: int) -> None:
        column = value_column(kind)
        schema = _table(list(all_samples(kind, 1)), column).schema

        def batches() -> Iterator[Any]:
            rows: list[Any] = []
            for sample in all_samples(kind, samples):
                rows.append(sample)
                if len(rows) == WRITTEN:
                    yield from _table(rows, column).to_batches()
                    rows = []
            if rows:
                yield from _table(rows, column).to_batches()

        lance.write_dataset(pyarrow.RecordBatchReader.from_batches(schema, batches()), folder)

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        convert = data._to_tensor if value_column(kind) == "tokens" else _with_bytes
        if shuffle:
            # the method that DataLoader calls for a batch; a subclass, so that it returns the table and not lists
            rows: Any = _Rows(folder)

            def collate(table: Any) -> Any:
                return convert(table.combine_chunks().to_batches()[0])

            return torch.utils.data.DataLoader(rows, BATCH, shuffle=True, collate_fn=collate)
        rows = data.LanceDataset(folder, BATCH, batch_readahead=8, to_tensor_fn=convert)
        return torch.utils.data.DataLoader(rows, batch_size=None)


class _Rows(data.SafeLanceDataset):  # type: ignore[misc]  # its base is untyped here
    _ds: Any

    def __getitems__(self, numbers: list[int]) -> Any:
        self._ds = self._ds or lance.dataset(self.uri)
        return self._ds.take(numbers)


def _table(rows: list[dict[str, Any]], column: str) -> Any:
    values: Any = [row[column] for row in rows]
    if column == "tokens":
        values = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.concatenate(values)), len(values[0]))
    return pyarrow.table({"number": [row["number"] for row in rows], column: values})


def _with_bytes(batch: Any, **_: Any) -> dict[str, Any]:
    return {"number": torch.from_numpy(batch["number"].to_numpy()), "data": batch["data"].to_pylist()}


class Ours(batch_reader.Ours):
    packages = ("pylance", "torch", "numpy")

    def write(self, kind: str, folder: str, samples: int) -> None:
        """Write nothing: Penstock reads the Lance dataset without an index of its own."""

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        return MapLoader(LanceRows(folder), batch_size=BATCH, shuffle=shuffle, seed=SEED, reseed=False)
