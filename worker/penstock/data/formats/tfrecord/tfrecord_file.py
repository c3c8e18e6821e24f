"""Samples of TFRecord files: a record is a sample, a file and its file of offsets are a shard.

    record: [length: 8] [checksum of the length: 4] [data] [checksum of the data: 4]

A checksum is CRC32C, rotated and moved by a constant ("masked"). The format has no index, so `tfrecord_shard` reads the
lengths once and stores where each record begins (offset_file.py). Every record is checked when it is read.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.shards import ReadOptions, Shard, ShardFile, StoredFile
from penstock.data.formats.tfrecord.example_messages import example_of, is_example
from penstock.data.formats.tfrecord.offset_file import ENDING, read_offsets, write_offsets
from penstock.proto.errors import DatasetError, ShardCorruptError

__all__ = ["TFRecordReader", "open_tfrecord", "tfrecord_shards"]

LENGTH = struct.Struct("<QI")
CHECKSUM = struct.Struct("<I")
FRAME = LENGTH.size + CHECKSUM.size
"""Bytes of a record besides its data."""
READ_AT_ONCE = 1 << 20
"""Number of bytes that are read at a time while records are counted."""


@cache
def _crc32c() -> Callable[[bytes], int]:
    try:
        value: Callable[[bytes], int] = importlib.import_module("google_crc32c").value
    except ImportError as error:
        raise DatasetError(
            "TFRecord files need the package google-crc32c, which checks them: pip install 'penstock[tfrecord]'"
        ) from error
    return value


def _masked(data: bytes) -> int:
    crc = _crc32c()(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecordReader:
    """Reader of a TFRecord file, see formats.shards.ShardReader. A sample has the features of an Example by name, see
    `example_of`, or is {"record": bytes}."""

    def __init__(self, shard: Shard, data: Path, offsets: Path) -> None:
        stored = shard.files[0].raw
        self.name = stored.name
        self._decode = shard.settings["records"] == "example"
        _crc32c()
        self._file: Descriptor | None = None
        try:
            opened = Descriptor(data)
            size = os.fstat(opened.fileno()).st_size
        except OSError as error:
            raise ShardCorruptError(f"{self.name}: {data} cannot be read: {error}") from error
        if size != stored.size:
            raise ShardCorruptError(f"{self.name}: {data} has {size} bytes, but its index says {stored.size}")
        self._offsets = read_offsets(offsets, shard.files[1].raw, size, shard.samples)
        self._file = opened

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: a sample's number must be at least 0 and below {len(self)}, got {index}")
        record = self._record(index)
        if not self._decode:
            return {"record": record}
        try:
            return example_of(record)
        except ValueError as error:
            raise ShardCorruptError(f"{self.name}: sample {index} is not a tf.train.Example: {error}") from error

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples with these numbers."""
        return [self[row] for row in rows]

    def close(self) -> None:
        """Close the file. Samples that were read stay valid."""
        self._file = None

    def _record(self, index: int) -> bytes:
        file, begin = self._file, self._offsets[index]
        size = self._offsets[index + 1] - begin
        if file is None:
            raise ValueError(f"{self.name} is closed")
        try:
            data = file.read(size, begin)
        except OSError as error:
            raise ShardCorruptError(f"{self.name} cannot be read: {error}") from error
        if len(data) != size:
            self._corrupt(index, f"is truncated: {len(data)} of {size} bytes are left")
        length, checksum = LENGTH.unpack_from(data) if size >= FRAME else (-1, 0)
        if length != size - FRAME or checksum != _masked(data[:8]):
            self._corrupt(index, f"must have {size - FRAME} bytes, but its length is damaged")
        record = data[LENGTH.size : -CHECKSUM.size]
        if CHECKSUM.unpack_from(data, size - CHECKSUM.size)[0] != _masked(record):
            self._corrupt(index, "is damaged: its checksum differs")
        return record

    def _corrupt(self, index: int, why: str) -> NoReturn:
        raise ShardCorruptError(f"{self.name}: sample {index} {why}. Write the file again, or fetch it again")


def open_tfrecord(shard: Shard, paths: Sequence[Path], options: ReadOptions) -> TFRecordReader:
    """Return the reader of a shard, see format_table.Format.open."""
    del options  # there are no pickles, and images are as stored
    return TFRecordReader(shard, *paths)


def tfrecord_shards(files: Sequence[tuple[str, Path]], *, records: str | None = None) -> list[Shard]:
    """Return a shard for each TFRecord file, and write the file of its offsets beside it. `files`: (path relative to
    the dataset's folder, path) for each. `records`: "example" or "bytes"; None: "example" if each file's first record
    is one. Raises DatasetError, ShardCorruptError."""
    found = [(name, *_scanned(path, name)) for name, path in files]
    kind = records or ("example" if all(is_example(first) for _, _, _, first in found) else "bytes")
    shards = []
    for (name, path), (_, size, offsets, _) in zip(files, found, strict=True):
        try:
            written = write_offsets(path, size, offsets)
        except OSError as error:
            raise DatasetError(
                f"{path}{ENDING} cannot be written: {error}. Give a folder that you may write to"
            ) from error
        stored = ShardFile(StoredFile(name, size)), ShardFile(StoredFile(name + ENDING, written))
        shards.append(Shard("tfrecord", len(offsets) - 1, stored, settings={"records": kind}))
    return shards


def _scanned(path: Path, name: str) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]], bytes]:
    """Return (size of a file in bytes, offsets of its records and of its end, data of the first record)."""
    try:
        file = Descriptor(path)
        size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ShardCorruptError(f"{name}: {path} cannot be read: {error}") from error
    offsets, at = [0], 0
    begin, data = 0, b""
    while at < size:
        if not begin <= at <= begin + len(data) - LENGTH.size:
            begin, data = at, file.read(READ_AT_ONCE, at)
        head = data[at - begin : at - begin + LENGTH.size]
        length, checksum = LENGTH.unpack(head) if len(head) == LENGTH.size else (0, -1)
        if checksum != _masked(head[:8]):
            packed = " It is compressed with gzip: decompress it." if data[:2] == b"\x1f\x8b" and not at else ""
            raise ShardCorruptError(
                f"{name}: record {len(offsets) - 1} at byte {at} is truncated or damaged, or this is not a TFRecord "
                f"file.{packed or ' Write it again'}"
            )
        if at + FRAME + length > size:
            raise ShardCorruptError(
                f"{name}: record {len(offsets) - 1} at byte {at} is truncated: it has {length} bytes, but "
                f"{max(0, size - at - FRAME)} are left. Write it again"
            )
        at += FRAME + length
        offsets.append(at)
    first = file.read(offsets[1] - FRAME, LENGTH.size) if size else b""
    return size, np.array(offsets, np.int64), first
