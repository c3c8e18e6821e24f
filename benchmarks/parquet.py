"""Speed of reading Parquet by row group: Penstock compared with the readers of Hugging Face datasets and of Lance.

    python -m benchmarks.parquet [--groups 300] [--rounds 3] [--columns text tokens] [--folder FOLDER] [--json FILE]

The file of the first case has 300 row groups of 1,000 rows with some 4 KB of text; the second one has lists of 1,025
tokens in place of texts. In each round each reader has one turn, first in order, then shuffled, over `--samples` rows
at most. The medians of samples per second are reported; only their ratios are comparable. All readers make batches of
32: lists of texts, or one tensor of tokens. The peers are measured if they are installed (datasets, pylance).

`datasets, streaming` shuffles in a buffer of 10,000 rows. `datasets, Arrow` and Lance read a copy of the data in their
own format, which was made before, and shuffle all rows with each other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet
import torch

from penstock.data import StreamingDataset, StreamingLoader, index_parquet

__all__ = ["COLUMNS", "main", "measure", "write"]

ROWS = 1000
"""Number of rows of a row group."""
BATCH = 32
TOKENS = 1025
BUFFER = 10_000
"""Number of rows in the shuffle buffer of the streaming reader of Hugging Face datasets."""
COLUMNS = ("text", "tokens")

Reader = Callable[[bool], Iterable[Any]]
"""Function that begins an epoch, shuffled if its argument is True, and returns an iterable of batches of BATCH
samples."""


def write(folder: Path, column: str, groups: int) -> Path:
    """Write the Parquet file of a case in a folder of its own, and return the file's path. `column`: name of the column
    of values, "text" or "tokens"."""
    path = folder / column / "rows.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    letters = random.integers(97, 123, (5000, 6), np.uint8)
    words = np.array([bytes(word).decode() for word in letters])
    writer: Any = None
    for group in range(groups):
        if column == "text":
            values = arrow.array([" ".join(words[chosen]) for chosen in random.integers(0, 5000, (ROWS, 585))])
        else:
            numbers = random.integers(0, 50_000, ROWS * TOKENS).astype(np.int32)
            offsets = np.arange(0, len(numbers) + 1, TOKENS).astype(np.int32)
            values = arrow.ListArray.from_arrays(offsets, numbers)
        table = arrow.table({"number": np.arange(group * ROWS, (group + 1) * ROWS), column: values})
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=ROWS)
    writer.close()
    return path


def ours(path: Path, column: str) -> Reader:
    index_parquet(path.parent)

    def epoch(shuffle: bool) -> Iterable[Any]:
        dataset = StreamingDataset(path.parent, columns=[column])
        return StreamingLoader(dataset, batch_size=BATCH, shuffle=shuffle, seed=1)

    return epoch


def streaming(path: Path, column: str) -> Reader:
    """Return the reader of Hugging Face datasets that streams the Parquet file."""
    datasets: Any = importlib.import_module("datasets")

    def epoch(shuffle: bool) -> Iterable[Any]:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True, columns=[column])
        rows = rows.shuffle(seed=1, buffer_size=BUFFER) if shuffle else rows
        return (rows.with_format("torch") if column == "tokens" else rows).iter(BATCH)  # type: ignore[no-any-return]

    return epoch


def mapped(path: Path, column: str) -> Reader:
    """Return the reader of Hugging Face datasets that maps a copy of the data in Arrow's format."""
    datasets: Any = importlib.import_module("datasets")
    rows = datasets.Dataset.from_parquet(str(path), columns=[column], cache_dir=str(path.parent / ".datasets"))
    rows = rows.with_format("torch") if column == "tokens" else rows

    def epoch(shuffle: bool) -> Iterator[Any]:
        for chosen in _numbers(len(rows), shuffle):
            yield rows[chosen if shuffle else slice(chosen[0], chosen[-1] + 1)]

    return epoch


def lance(path: Path, column: str) -> Reader:
    library: Any = importlib.import_module("lance")
    where = path.parent / ".lance"
    file = pyarrow.parquet.ParquetFile(path)
    schema = arrow.schema([file.schema_arrow.field(column)])
    rows = library.write_dataset(file.iter_batches(columns=[column]), where, schema=schema, mode="overwrite")

    def made(batch: Any) -> Any:
        values = batch[column]
        values = values.combine_chunks() if isinstance(values, arrow.ChunkedArray) else values
        if column == "text":
            return values.to_pylist()
        return torch.from_numpy(values.flatten().to_numpy().reshape(len(values), -1).copy())

    def epoch(shuffle: bool) -> Iterator[Any]:
        if shuffle:
            return (made(rows.take(chosen)) for chosen in _numbers(rows.count_rows(), shuffle))
        return (made(batch) for batch in rows.to_batches(batch_size=BATCH))

    return epoch


def _numbers(count: int, shuffle: bool) -> Iterator[list[int]]:
    numbers = np.random.default_rng(1).permutation(count) if shuffle else np.arange(count)
    for begin in range(0, count - BATCH + 1, BATCH):
        yield numbers[begin : begin + BATCH].tolist()


READERS: dict[str, tuple[str, Callable[[Path, str], Reader]]] = {
    "Penstock": ("penstock.data", ours),
    "datasets, streaming": ("datasets", streaming),
    "datasets, Arrow": ("datasets", mapped),
    "Lance": ("lance", lance),
}
"""Package that each reader needs, and function that makes the reader from a file and a column, by the reader's name."""


def rate(reader: Reader, samples: int, shuffle: bool) -> float:
    """Return the samples per second of a reader over `samples` samples, measured from the second batch on."""
    batches = iter(reader(shuffle))
    next(batches)
    began = time.perf_counter()
    taken = sum(1 for _ in islice(batches, samples // BATCH))
    return taken * BATCH / (time.perf_counter() - began)


def measure(path: Path, column: str, rounds: int, samples: int) -> dict[str, dict[str, float]]:
    """Return the samples per second of each reader, by name and by order ("in order", "shuffled"), as medians of the
    rounds."""
    readers = {}
    for name, (package, make) in READERS.items():
        try:
            importlib.import_module(package)
        except ImportError:
            continue
        readers[name] = make(path, column)
    found: dict[str, dict[str, list[float]]] = {name: {"in order": [], "shuffled": []} for name in readers}
    for _ in range(rounds):
        for name, reader in readers.items():
            for kind, rates in found[name].items():
                rates.append(rate(reader, samples, kind == "shuffled"))
    return {name: {kind: statistics.median(rates) for kind, rates in kinds.items()} for name, kinds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--folder", type=Path, help="folder to keep the files in; by default a temporary one")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    figures = {}
    with tempfile.TemporaryDirectory() as temporary:
        for column in given.columns:
            path = write(given.folder or Path(temporary), column, given.groups)
            figures[column] = measure(path, column, given.rounds, given.samples)
            print(f"{column}: {given.groups} row groups of {ROWS} rows, {path.stat().st_size >> 20} MiB")
            for name, kinds in figures[column].items():
                print(
                    f"  {name:20} in order {kinds['in order']:9,.0f}/s   shuffled {kinds['shuffled']:9,.0f}/s   "
                    f"shuffled/in order {kinds['shuffled'] / kinds['in order']:.2f}"
                )
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
