"""Speed of reading other libraries' files beside their own readers: `python -m benchmarks.formats [FORMAT ...]`.

Penstock's reader and the other library's read the same files (some MB, in the page cache) in one process, sample by
sample, in sequence and in a shuffled order, and take turns. The result is a ratio: Penstock's samples per second
divided by the other reader's, as the median of the rounds. A format whose library is not installed is left out.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CASES", "main", "measured"]

ROUNDS = 3
Read = Callable[[int], Any]
Stream = Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Readers:
    """Readers of the same files: Penstock's, and those of other libraries."""

    count: int
    """Number of samples in the files."""
    ours: Read
    theirs: Mapping[str, Read]
    """Readers of other libraries that read a sample by its number, by name."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Readers of other libraries that only read in sequence, by name."""


Case = Callable[[Path], Readers]
"""Function that writes the files of one format into a folder, and returns readers of them."""


def _library(name: str) -> Any:
    return importlib.import_module(name)


def megatron(folder: Path) -> Readers:
    """Write Megatron token files: 20,000 documents of 100 to 2,000 tokens, uint16. Return their readers."""
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
        """Return a reader that copies a document's tokens, as packing does. A document is mapped memory, which is read
        only when its tokens are used."""

        def read(number: int) -> None:
            tokens = documents[number]
            line[: len(tokens)] = tokens

        return read

    readers = {
        "IndexedDataset, mapped": touched(library.IndexedDataset(prefix)),
        "IndexedDataset, mmap=False": touched(library.IndexedDataset(prefix, mmap=False)),
    }
    return Readers(20_000, touched(MegatronDocuments(prefix)), readers)


def saved_dataset(folder: Path) -> Readers:
    """Write a dataset saved by Hugging Face datasets: 10,000 rows with 2,049 tokens (int32) and a text. Return its
    readers."""
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
    return Readers(
        10_000,
        ours.__getitem__,
        {"datasets, numpy": saved.with_format("numpy").__getitem__, "datasets, Python": saved.__getitem__},
    )


def tfrecord(folder: Path) -> Readers:
    """Write TFRecord files by TensorFlow: 10,000 examples with 1,024 tokens and a text. Return their readers."""
    from penstock.data import StreamingDataset, index_folder

    tf, draw = _library("tensorflow"), np.random.default_rng(0)
    path = str(folder / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for i in range(10_000):
            tokens = tf.train.Int64List(value=draw.integers(0, 50_000, 1024).tolist())
            text = tf.train.BytesList(value=[f"row {i}".encode()])
            features = {"tokens": tf.train.Feature(int64_list=tokens), "text": tf.train.Feature(bytes_list=text)}
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    index_folder(folder)
    ours = StreamingDataset(local=folder)
    schema = {"tokens": tf.io.FixedLenFeature([1024], tf.int64), "text": tf.io.FixedLenFeature([], tf.string)}

    def one_by_one() -> Iterable[Any]:
        parsed = tf.data.TFRecordDataset(path).map(lambda each: tf.io.parse_single_example(each, schema))
        numpy: Iterable[Any] = parsed.as_numpy_iterator()
        return numpy

    def in_batches() -> Iterable[Any]:
        parsed = tf.data.TFRecordDataset(path).batch(64).map(lambda each: tf.io.parse_example(each, schema))
        numpy: Iterable[Any] = parsed.as_numpy_iterator()
        return numpy

    streams = {"TensorFlow": one_by_one, "TensorFlow, batches of 64": in_batches}
    return Readers(10_000, ours.__getitem__, {}, streams)


def array_record(folder: Path) -> Readers:
    """Write ArrayRecord files: 10,000 records of 2,000 bytes that cannot be compressed. Return their readers."""
    from penstock.data import StreamingDataset, index_folder

    library, draw = _library("array_record.python.array_record_module"), np.random.default_rng(0)
    path = str(folder / "a.array_record")
    writer = library.ArrayRecordWriter(path, "group_size:1")
    for _ in range(10_000):
        writer.write(draw.bytes(2000))
    writer.close()
    index_folder(folder, "array_record-bytes")
    theirs = _library("array_record.python.array_record_data_source").ArrayRecordDataSource(path)
    ours = StreamingDataset(local=folder)
    return Readers(10_000, ours.__getitem__, {"ArrayRecordDataSource": theirs.__getitem__})


def lance(folder: Path) -> Readers:
    """Write a Lance dataset: 10,000 rows with 512 tokens and a text. Return its readers, which read batches of 64 rows,
    each counted as a sample."""
    import pyarrow

    from penstock.data import LanceRows

    library, draw = _library("lance"), np.random.default_rng(0)
    tokens = pyarrow.array(list(draw.integers(0, 50_000, (10_000, 512), np.int32)))
    table = pyarrow.table({"tokens": tokens, "text": [f"row {i}" for i in range(10_000)]})
    theirs = library.write_dataset(table, str(folder / "rows.lance"))
    ours = LanceRows(folder / "rows.lance")
    batches = 10_000 // 64

    def rows(batch: int) -> list[int]:
        return [(batch * 64 + at * 157) % 10_000 for at in range(64)]

    return Readers(
        batches,
        lambda batch: ours.__getitems__(rows(batch)),
        {
            "take, to_pylist": lambda batch: theirs.take(rows(batch)).to_pylist(),
            "take alone": lambda batch: theirs.take(rows(batch)),
        },
    )


def json_lines(folder: Path) -> Readers:
    """Write a file of JSON lines: 50,000 lines of about 500 bytes. Return its readers."""
    from penstock.data import StreamingDataset, index_folder

    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"number": i, "text": "word " * 100}) + "\n" for i in range(50_000)))
    index_folder(folder)

    def lines() -> Iterable[Any]:
        with path.open() as file:
            yield from map(json.loads, file)

    return Readers(50_000, StreamingDataset(local=folder).__getitem__, {}, {"json.loads of each line": lines})


def csv_table(folder: Path) -> Readers:
    """Write a CSV file: 50,000 records of about 500 bytes. Return its readers."""
    from penstock.data import StreamingDataset, index_folder

    path = folder / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["number", "text"], *([i, "word " * 100] for i in range(50_000))])
    index_folder(folder)

    def records() -> Iterable[Any]:
        with path.open(newline="") as file:
            yield from csv.DictReader(file)

    return Readers(50_000, StreamingDataset(local=folder).__getitem__, {}, {"csv.DictReader": records})


CASES: Mapping[str, tuple[str, Case]] = {
    "megatron": ("megatron.core", megatron),
    "saved_dataset": ("datasets", saved_dataset),
    "tfrecord": ("tensorflow", tfrecord),
    "array_record": ("array_record", array_record),
    "lance": ("lance", lance),
    "jsonl": ("json", json_lines),
    "csv": ("csv", csv_table),
}
"""Package that each format needs, and function that writes its files, by the format's name."""


def measured(readers: Readers, rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Return the samples per second of each reader, by order ("in sequence", "shuffled") and name: the median of rounds
    in which the readers take turns."""
    count = readers.count
    orders = {"in sequence": list(range(count)), "shuffled": random.Random(1).sample(range(count), count)}
    by_number = {"ours": readers.ours, **readers.theirs}
    speeds: dict[str, dict[str, list[float]]] = {order: {} for order in orders}

    def timed(order: str, name: str, run: Callable[[], object]) -> None:
        started = time.perf_counter()
        run()
        speeds[order].setdefault(name, []).append(count / (time.perf_counter() - started))

    for _ in range(rounds):
        for order, numbers in orders.items():
            for name, read in by_number.items():
                timed(order, name, partial(_read_all, read, numbers))
        for name, stream in readers.streams.items():
            timed("in sequence", name, lambda stream=stream: deque(stream(), maxlen=0))  # type: ignore[misc]
    return {
        order: {name: statistics.median(own) for name, own in readers_of.items()}
        for order, readers_of in speeds.items()
    }


def _read_all(read: Read, numbers: Sequence[int]) -> None:
    for number in numbers:
        read(number)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}; all by default")
    for name in parser.parse_args(arguments).formats:
        needed, case = CASES[name]
        if importlib.util.find_spec(needed.partition(".")[0]) is None:
            print(f"{name}: left out, {needed} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for order, speeds in measured(case(Path(folder))).items():
                ours = speeds.pop("ours")
                print(f"{name}, {order}: {ours:,.0f} samples/s")
                for reader, speed in speeds.items():
                    print(f"    {reader}: {speed:,.0f}, ratio {ours / speed:.2f}")


if __name__ == "__main__":
    main()
