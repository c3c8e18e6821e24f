"""Speed of reading other libraries' files beside their own readers: `python -m benchmarks.formats [FORMAT ...]`.

Both read the same files (some MB, in the page cache) in one process, sample by sample, in sequence and in a shuffled
order, and take turns. What is reported is a ratio: our samples per second over theirs, the median of the rounds. A
format whose library is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CASES", "main", "measured"]

ROUNDS = 3
Read = Callable[[int], Any]
Case = Callable[[Path], tuple[int, Read, dict[str, Read]]]
"""Function that writes files into a folder. Returns (number of samples, our reader, other readers by name)."""


def _library(name: str) -> Any:
    return importlib.import_module(name)


def megatron(folder: Path) -> tuple[int, Read, dict[str, Read]]:
    """20,000 documents of 100 to 2,000 tokens, uint16."""
    from penstock.data import MegatronDocuments

    library, torch = _library("megatron.core.datasets.indexed_dataset"), _library("torch")
    prefix = str(folder / "text")
    builder, draw = library.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16), np.random.default_rng(0)
    for length in draw.integers(100, 2000, 20_000):
        builder.add_item(torch.from_numpy(draw.integers(0, 50_000, length)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    line = np.zeros(2000, np.int64)

    def touched(documents: Any) -> Read:
        """Copy the tokens, as packing does: a mapped document that is not looked at has not been read."""

        def read(number: int) -> None:
            tokens = documents[number]
            line[: len(tokens)] = tokens

        return read

    readers = {
        "IndexedDataset, mapped": touched(library.IndexedDataset(prefix)),
        "IndexedDataset, mmap=False": touched(library.IndexedDataset(prefix, mmap=False)),
    }
    return 20_000, touched(MegatronDocuments(prefix)), readers


def saved_dataset(folder: Path) -> tuple[int, Read, dict[str, Read]]:
    """10,000 rows with 2,049 tokens (int32) and a text, saved by Hugging Face datasets."""
    from penstock.data import StreamingDataset, index_folder

    datasets = _library("datasets")
    draw = np.random.default_rng(0)
    rows = [{"tokens": draw.integers(0, 50_000, 2049, np.int32), "text": f"row {i}"} for i in range(10_000)]
    features = {"tokens": datasets.List(datasets.Value("int32")), "text": datasets.Value("string")}
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).save_to_disk(folder / "saved")
    index_folder(folder / "saved")
    saved = datasets.load_from_disk(folder / "saved")
    ours = StreamingDataset(local=folder / "saved")
    return (
        10_000,
        ours.__getitem__,
        {"datasets, numpy": saved.with_format("numpy").__getitem__, "datasets, Python": saved.__getitem__},
    )


CASES: Mapping[str, tuple[str, Case]] = {
    "megatron": ("megatron.core", megatron),
    "saved_dataset": ("datasets", saved_dataset),
}
"""(package that it needs, case) of each format."""


def measured(count: int, readers: Mapping[str, Read], rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Return samples per second of each reader, "in sequence" and "shuffled": the median of rounds in which they take
    turns."""
    orders = {"in sequence": list(range(count)), "shuffled": random.Random(1).sample(range(count), count)}
    speeds: dict[str, dict[str, list[float]]] = {order: {name: [] for name in readers} for order in orders}
    for _ in range(rounds):
        for name, order in orders.items():
            for reader, read in readers.items():
                started = time.perf_counter()
                for number in order:
                    read(number)
                speeds[name][reader].append(count / (time.perf_counter() - started))
    return {
        name: {reader: statistics.median(own) for reader, own in readers.items()} for name, readers in speeds.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}; all by default")
    for name in parser.parse_args(arguments).formats:
        needed, case = CASES[name]
        if importlib.util.find_spec(needed.partition(".")[0]) is None:
            print(f"{name}: left out, {needed} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            count, ours, theirs = case(Path(folder))
            for order, speeds in measured(count, {"ours": ours, **theirs}).items():
                for reader in theirs:
                    print(
                        f"{name}, {order}: {speeds['ours']:,.0f} samples/s, {reader} {speeds[reader]:,.0f}, "
                        f"ratio {speeds['ours'] / speeds[reader]:.2f}"
                    )


if __name__ == "__main__":
    main()
