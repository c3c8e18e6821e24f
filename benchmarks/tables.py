"""Tables of many commits with deletes, beside plain files of the same rows.

    PYTHONPATH=tests/support python -m benchmarks.tables [--rows 1000000] [--commits 50] [--rounds 5] [--folder DIR]

Each commit adds rows, and one in ten of the rows added before is deleted by then, by vectors of Delta Lake and by
position deletes of Iceberg. Penstock reads both in place, and the live rows once more from plain Parquet files of as
many rows each, compressed alike; they take turns. A pass of StreamingLoader is timed, and the look at rows anywhere.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow
import pyarrow.parquet
from delta_vectors import delete_by_vector
from iceberg_deletes import DeleteCommit
from pyiceberg.catalog.memory import InMemoryCatalog

from penstock.data import StreamingDataset, StreamingLoader, index_folder, index_table

__all__ = ["main"]

BATCH = 256
TOKENS = 64
SEEKS = 200


def rows(begin: int, count: int) -> Any:
    numbers = np.arange(begin, begin + count)
    tokens = (numbers[:, None] * 31 + np.arange(TOKENS)).astype(np.int32)
    lists = pyarrow.ListArray.from_arrays(
        np.arange(0, (count + 1) * TOKENS, TOKENS, dtype=np.int32), tokens.reshape(-1)
    )
    return pyarrow.table({"number": numbers, "tokens": lists, "text": [f"row {number}" for number in numbers]})


def deleted_of(each: int) -> list[int]:
    return list(range(3, each, 10))


def delta(folder: Path, commits: int, each: int) -> None:
    for number in range(commits):
        deltalake.write_deltalake(folder, rows(number * each, each), mode="append")
    paths = [action["path"] for action in pyarrow.table(deltalake.DeltaTable(folder).get_add_actions()).to_pylist()]
    for path in paths:
        delete_by_vector(folder, {path: deleted_of(each)}, ["deletionVectors"], inline=False)
    index_table(folder)


def iceberg(folder: Path, commits: int, each: int) -> None:
    catalog = InMemoryCatalog("benchmark", warehouse=str(folder.parent / "warehouse"))
    catalog.create_namespace("a")
    table = catalog.create_table("a.b", rows(0, 1).schema, location=str(folder))
    for number in range(commits):
        table.append(rows(number * each, each))
    for file in DeleteCommit(folder).data_files():
        change = DeleteCommit(folder)
        change.positions({file.file_path: deleted_of(each)})
        change.commit()
    index_table(folder)


def plain(folder: Path, commits: int, each: int, codec: str) -> None:
    folder.mkdir()
    live = np.setdiff1d(np.arange(each), deleted_of(each))
    for number in range(commits):
        pyarrow.parquet.write_table(
            rows(number * each, each).take(live), folder / f"{number:03}.parquet", compression=codec
        )
    index_folder(folder)


MADE: dict[str, Callable[[Path, int, int], None]] = {
    "plain, snappy": partial(plain, codec="snappy"),
    "Delta Lake": delta,
    "plain, zstd": partial(plain, codec="zstd"),
    "Iceberg": iceberg,
}
BESIDE = {"Delta Lake": "plain, snappy", "Iceberg": "plain, zstd"}
"""Plain files with the codec that each library writes, by kind of table."""


def read(folder: Path, *, shuffle: bool) -> tuple[float, float, int, int]:
    """Return the rows of a pass per second, and per second of a processor; the number of rows, and the sum of their
    numbers."""
    with closing(StreamingDataset(folder)) as dataset:
        loader = StreamingLoader(dataset, batch_size=BATCH, shuffle=shuffle, seed=1)
        began, busy, count, total = time.perf_counter(), time.process_time(), 0, 0
        for batch in loader:
            count += len(batch["number"])
            total += int(batch["number"].sum())
        return count / (time.perf_counter() - began), count / (time.process_time() - busy), count, total


def seek_ms(folder: Path) -> float:
    """Return the median time until a row anywhere is there, in row groups that are decoded and in others."""
    with closing(StreamingDataset(folder)) as dataset:
        chance, found = random.Random(1), list[float]()
        for _ in range(SEEKS):
            began = time.perf_counter()
            dataset[chance.randrange(len(dataset))]
            found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.tables", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--commits", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder for the files; default: a temporary one")
    options = parser.parse_args(given)
    each = options.rows // options.commits
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folders = {name: Path(scratch, name) for name in MADE}
        results: dict[str, Any] = {}
        for name, make in MADE.items():
            began = time.perf_counter()
            make(folders[name], options.commits, each)
            results[name] = {"made_s": time.perf_counter() - began, "seek_ms": seek_ms(folders[name])}
        for shuffle in (False, True):
            rates: dict[str, list[tuple[float, float]]] = {name: [] for name in MADE}
            said = set()
            for _ in range(options.rounds):
                for name, folder in folders.items():
                    rate, busy, *rest = read(folder, shuffle=shuffle)
                    rates[name].append((rate, busy))
                    said.add(tuple(rest))
            assert len(said) == 1, f"the rows differ: {said}"
            order = "shuffled" if shuffle else "in sequence"
            for name, own in rates.items():
                pairs = list(zip(own, rates[BESIDE.get(name, name)], strict=True))
                results[name][order] = {
                    "rows_per_s": statistics.median(rate for rate, _ in own),
                    "of_plain": statistics.median(one / other for (one, _), (other, _) in pairs),
                    "of_plain, by processor": statistics.median(one / other for (_, one), (_, other) in pairs),
                }
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
