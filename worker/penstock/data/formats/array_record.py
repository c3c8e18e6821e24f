"""Samples of ArrayRecord files: a record is a sample, a file is a shard. The package array_record reads them. From
files written without group_size:1, it unpacks a whole group for each record."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.data.formats.raw_files import check_samples, open_file
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.formats.tfrecord.example_messages import example_of, is_example
from penstock.proto.errors import DatasetError, SampleCorruptError, ShardCorruptError

OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
"""The library reads nothing ahead, and starts no threads, which a forked child would lack."""
BUFFER = 32 << 10


def _library() -> Any:
    try:
        return importlib.import_module("array_record.python.array_record_module")
    except ImportError as error:
        raise DatasetError(
            "ArrayRecord files need the package array_record. Run pip install 'penstock[array-record]'"
        ) from error


class _Records:
    """Open ArrayRecord file. Several threads, and forked children, may read it at the same time."""

    def __init__(self, path: Path, name: str, expected: int | None = None) -> None:
        library = _library()
        self.name = name
        self._file, self.size = open_file(path, name, expected)
        try:
            self._reader: Any = library.ArrayRecordReader(
                f"/proc/self/fd/{self._file.fileno()}", options=OPTIONS, file_reader_buffer_size=BUFFER
            )
            if not self._reader.ok():
                self._reader.read([0])  # the error of the library says why
                raise ValueError("the index at the file's end cannot be read")
            self.count = int(self._reader.num_records())
        except Exception as error:  # errors of the library have several classes
            raise ShardCorruptError(
                f"{name} must be an ArrayRecord file: {error}. Write the file again, and close its writer"
            ) from error

    def read(self, rows: Sequence[int]) -> list[bytes]:
        """The numbers must be valid. Raises ShardCorruptError if the file is damaged or changed."""
        reader = self._reader
        if reader is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        # The library keeps parts of the file in memory, and does not always notice that the file has become shorter.
        size = os.fstat(self._file.fileno()).st_size
        if size != self.size:
            raise ShardCorruptError(
                f"{self.name} must not change while it is read: it had {self.size} bytes, got {size}"
            )
        try:
            records: list[bytes] = reader.read(rows)
        except RuntimeError as error:
            if self._reader is None:
                raise ValueError(f"{self.name} is closed: open the dataset again to read from it") from error
            more = f" or one of {len(rows) - 5} more" if len(rows) > 5 else ""
            raise ShardCorruptError(
                f"{self.name}: samples {list(rows[:5])}{more} cannot be read: {error}. Write the file again"
            ) from error
        return records

    def close(self) -> None:
        self._reader = None  # the library's reader is freed when the last read has ended


class ArrayRecordReader:
    """A sample is the dict of an Example's features (see `example_of`); for other records {"record": bytes}."""

    def __init__(self, shard: Shard, path: Path) -> None:
        stored = shard.files[0].raw
        self.name = stored.name
        self._decode = shard.settings["records"] == "example"
        self._records = _Records(path, stored.name, stored.size)
        check_samples(self.name, "records", len(self), shard.samples)

    def __len__(self) -> int:
        return self._records.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.get_many([index])[0]

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [self._sample(row, data) for row, data in zip(rows, self._records.read(list(rows)), strict=True)]

    def close(self) -> None:
        self._records.close()

    def _sample(self, index: int, record: bytes) -> dict[str, Any]:
        if not self._decode:
            return {"record": record}
        try:
            return example_of(record)
        except ValueError as error:
            raise SampleCorruptError(
                f"{self.name}: sample {index} must be a tf.train.Example: {error}. Index the folder with "
                'format="array_record-bytes" to read any bytes'
            ) from error


def index_array_record(path: Path, name: str) -> Shard:
    """Index an ArrayRecord file; all records are Examples if the first is. `name`: path relative to the dataset's
    folder. Raises ShardCorruptError, and DatasetError if the package array_record is not installed."""
    opened = _Records(path, name)
    kind = "example" if opened.count and is_example(opened.read([0])[0]) else "bytes"
    stored = ShardFile(StoredFile(name, opened.size))
    return Shard("array_record", opened.count, (stored,), settings={"records": kind})
