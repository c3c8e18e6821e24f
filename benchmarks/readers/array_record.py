"""ArrayRecord, by Grain, and Penstock over the same files.

As Grain's page on ArrayRecord says, files are written with `group_size:1`. A MapDataset is shuffled, parsed and
batched, and read by `to_iter_dataset` with its default threads (16, 500 elements ahead): 0 and 1 threads were slower
in five of six tries. A record is the number in 8 bytes, and the value; both sides parse it with the same function.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.readers import batch_reader
from benchmarks.readers.batch_reader import SEED, BatchReader, all_samples, value_column
from benchmarks.streaming_data import BATCH

from penstock.data import StreamingDataset, StreamingLoader, index_folder
from penstock.worker.batch.building import collate

__all__ = ["Ours", "Theirs"]

# By name, because the type checker's environment lacks them.
records: Any = importlib.import_module("array_record.python.array_record_module")

NUMBER = struct.Struct("<q")


def parsed(column: str, record: bytes) -> dict[str, Any]:
    value: Any = np.frombuffer(record, np.int32, offset=NUMBER.size) if column == "tokens" else record[NUMBER.size :]
    return {"number": NUMBER.unpack_from(record)[0], column: value}


class Theirs(BatchReader):
    packages = ("grain", "array-record", "numpy")

    def write(self, kind: str, folder: str, samples: int) -> None:
        Path(folder).mkdir()
        writer = records.ArrayRecordWriter(f"{folder}/rows.array_record", "group_size:1")
        for sample in all_samples(kind, samples):
            writer.write(NUMBER.pack(sample["number"]) + bytes(sample[value_column(kind)]))
        writer.close()

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        grain: Any = importlib.import_module("grain")
        rows = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(f"{folder}/rows.array_record"))
        rows = rows.shuffle(SEED) if shuffle else rows
        rows = rows.map(partial(parsed, value_column(kind)))
        rows = rows.batch(BATCH, batch_fn=None if value_column(kind) == "tokens" else _lists)
        batches: Iterable[Any] = rows.to_iter_dataset()
        return batches


def _lists(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate samples with values of bytes to a batch with a list of bytes. Grain's own function would make an array of
    them, of objects or of texts that end at the first zero."""
    return {
        "number": np.array([sample["number"] for sample in samples]),
        "data": [sample["data"] for sample in samples],
    }


class Ours(batch_reader.Ours):
    def write(self, kind: str, folder: str, samples: int) -> None:
        index_folder(folder, "array_record-bytes")

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        column = value_column(kind)

        def made(rows: list[Any]) -> Any:
            return collate([parsed(column, row["record"]) for row in rows])

        return StreamingLoader(
            StreamingDataset(local=folder), batch_size=BATCH, shuffle=shuffle, seed=SEED, collate_fn=made
        )
