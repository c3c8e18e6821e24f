"""Samples of TFRecord files: a record is a sample, a file and its file of offsets are a shard.

    record: [length: 8] [checksum of the length: 4] [data] [checksum of the data: 4]

A checksum is CRC32C, rotated and moved by a constant ("masked"). The format has no index, so `index_tfrecord` reads the
lengths once (records/offset_file.py). Every record is checked when it is read.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.formats.raw_files import open_file
from penstock.data.formats.records.record_file import RecordFile, record_shard
from penstock.data.formats.shards import Shard
from penstock.data.formats.tfrecord.example_messages import example_of, is_example
from penstock.proto.errors import DatasetError, ShardCorruptError

LENGTH = struct.Struct("<QI")
CHECKSUM = struct.Struct("<I")
FRAME = LENGTH.size + CHECKSUM.size
READ_AT_ONCE = 1 << 20
"""Bytes that are read at a time while records are counted."""


@cache
def _crc32c() -> Callable[[bytes], int]:
    try:
        value: Callable[[bytes], int] = importlib.import_module("google_crc32c").value
    except ImportError as error:
        raise DatasetError(
            "TFRecord files need the package google-crc32c. Run pip install 'penstock[tfrecord]'"
        ) from error
    return value


def _masked(data: bytes) -> int:
    crc = _crc32c()(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecordReader(RecordFile):
    """A sample is the dict of an Example's features (see `example_of`); for other records {"record": bytes}."""

    def __init__(self, shard: Shard, *paths: Any) -> None:
        super().__init__(shard, *paths)
        self._is_example = shard.settings["records"] == "example"
        _crc32c()

    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        size = len(record)
        length, checksum = LENGTH.unpack_from(record) if size >= FRAME else (-1, 0)
        if length != size - FRAME or checksum != _masked(record[:8]):
            self._corrupt(index, f"is damaged: its stored length must be {size - FRAME} bytes with a matching checksum")
        data = record[LENGTH.size : -CHECKSUM.size]
        if CHECKSUM.unpack_from(record, size - CHECKSUM.size)[0] != _masked(data):
            self._corrupt(index, "is damaged: its checksum differs")
        if not self._is_example:
            return {"record": data}
        try:
            return example_of(data)
        except ValueError as error:
            remedy = 'Index the folder with format="tfrecord-bytes" to read any bytes'
            self._undecodable(index, f"must be a tf.train.Example: {error}", remedy=remedy)


def index_tfrecord(path: Path, name: str, out: Path) -> Shard:
    """Write the file of a TFRecord file's offsets to the index's folder `out`, and return the shard; all records are
    Examples if the first is. Raises DatasetError if it cannot be written; ShardCorruptError for a damaged file."""
    size, offsets, first = _scanned(path, name)
    kind = "example" if is_example(first) else "bytes"
    return record_shard("tfrecord", path, out, name, size, offsets, {"records": kind})


def _scanned(path: Path, name: str) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]], bytes]:
    file, size = open_file(path, name)
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
                f"file.{packed or ' Write it again, or move it out of the folder'}"
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
