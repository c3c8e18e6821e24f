"""Row groups of a remote Parquet file as separate files in a cache, so that a reader fetches only the row groups that
it needs.

The cache has one file for each row group, and one for the footer: each is a range of the remote file, lies in the
folder `NAME.ranges`, and is fetched, locked and evicted like any other file of the cache.
"""

from __future__ import annotations

import importlib
import io
import os
from dataclasses import dataclass, replace
from typing import Any

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.parquet.parquet_footer import RowGroup, footer_length, row_groups
from penstock.data.formats.parquet.parquet_shards import pyarrow_parquet
from penstock.data.formats.shards import Shard, ShardFile, StoredFile

__all__ = ["FileRange", "Footer", "block_shard", "footer_shard", "has_ranges", "opened_range"]

MIN_RANGE_BYTES = 256 << 10
"""Smallest mean size in bytes of a file's row groups for which row groups are fetched one by one. A request takes as
long as a transfer of about this size."""
_PAST_END = 128
"""Bytes after a column's end that pyarrow may ask for, because old writers understated the column's size."""


@dataclass(frozen=True, slots=True)
class Footer:
    """Parsed footer of a Parquet file."""

    groups: list[RowGroup]
    metadata: Any
    """pyarrow's FileMetaData."""
    schema: Any
    """pyarrow's Schema."""

    @staticmethod
    def parse(tail: bytes) -> Footer:
        """Return the parsed footer. `tail`: bytes from the footer's beginning to the file's end. Raises ValueError, or
        an error of pyarrow."""
        if footer_length(tail[-8:], len(tail) + 4) != len(tail):
            raise ValueError("the footer must have the length that the dataset's index lists")
        groups = row_groups(tail[:-8])  # before pyarrow reads it, see parquet_footer.py
        metadata = pyarrow_parquet().read_metadata(io.BytesIO(tail))
        return Footer(groups, metadata, metadata.schema.to_arrow_schema())


@dataclass(frozen=True, slots=True)
class FileRange:
    """Row group of a remote Parquet file, stored in the cache as a separate file."""

    footer: Footer
    group: int
    """Number of the row group."""
    begin: int
    """Offset of the row group's first byte in the whole file."""
    size: int
    """Size of the whole file, in bytes."""


def has_ranges(shard: Shard) -> bool:
    """Return True if the row groups of a file are large enough to be fetched one by one."""
    count = len(shard.blocks)
    return count > 1 and bool(shard.ranges) and not shard.files[0].packed and shard.size >= count * MIN_RANGE_BYTES


def block_shard(shard: Shard, block: int) -> Shard:
    """Return row group `block` of a file as a shard of its own."""
    rows = shard.blocks[block]
    file = _range(shard, *shard.ranges[2 * block : 2 * block + 2])
    return replace(shard, samples=rows, files=(file,), blocks=(rows,), decoded_bytes=0, ranges=())


def footer_shard(shard: Shard) -> Shard:
    """Return the footer of a file as a shard of its own, without samples."""
    return Shard("parquet", 0, (_range(shard, shard.ranges[-1], shard.size),))


def _range(shard: Shard, begin: int, end: int) -> ShardFile:
    return ShardFile(StoredFile(f"{shard.name}.ranges/{begin}-{end}", end - begin, source=shard.name, begin=begin))


def opened_range(opened: Descriptor, place: FileRange) -> Any:
    """Return a file object for pyarrow in which the bytes of a row group have the offsets that they have in the whole
    file."""
    return importlib.import_module("pyarrow").PythonFile(_RangeFile(opened, place), mode="r")


class _RangeFile(io.RawIOBase):
    def __init__(self, opened: Descriptor, place: FileRange) -> None:
        self._opened, self._begin, self._size = opened, place.begin, place.size
        self._end = place.begin + os.fstat(opened.fileno()).st_size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Return bytes of the row group. Raises OSError for bytes outside of it."""
        end = min(self._size, self._at + size) if size >= 0 else self._size
        if self._at < self._begin or end > self._end + _PAST_END:
            raise OSError(f"bytes {self._at} to {end} must lie in the row group, {self._begin} to {self._end}")
        data = self._opened.read(min(end, self._end) - self._at, self._at - self._begin)
        self._at += len(data)
        past = end - self._at if self._at == self._end else 0
        self._at += past
        return data + bytes(past)
