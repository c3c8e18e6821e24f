"""Row groups of a remote file as files of their own in a cache, so that a file is not fetched as a whole.

The cache has a range of the remote file for each row group, and one for the footer. Each is a file in the folder
`NAME.ranges`, which is fetched, locked and evicted like any other file of a cache.
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

__all__ = ["FileRange", "Footer", "block_shards", "footer_shard", "opened_range"]

MIN_RANGE_BYTES = 256 << 10
"""Smallest mean size of a file's row groups, in bytes, with which they are fetched one by one: a request takes as long
as a transfer of about this size."""
_PAST_END = 128
"""Bytes after a column's end that pyarrow may ask for, of files of old writers which understated its size."""


@dataclass(frozen=True, slots=True)
class Footer:
    """Footer of a file, as it is needed to read it."""

    groups: list[RowGroup]
    metadata: Any
    """pyarrow's FileMetaData."""
    schema: Any
    """pyarrow's Schema."""

    @staticmethod
    def parse(tail: bytes) -> Footer:
        """Return the footer of a file, from its bytes to the file's end. Raises ValueError, or an error of pyarrow."""
        if footer_length(tail[-8:], len(tail) + 4) != len(tail):
            raise ValueError("its footer has another length than its index says")
        groups = row_groups(tail[:-8])  # before pyarrow reads it, see parquet_footer.py
        metadata = pyarrow_parquet().read_metadata(io.BytesIO(tail))
        return Footer(groups, metadata, metadata.schema.to_arrow_schema())


@dataclass(frozen=True, slots=True)
class FileRange:
    """A row group of a file, which lies in a file of its own."""

    footer: Footer
    group: int
    """Number of the row group."""
    begin: int
    """Offset of its first byte in the whole file."""
    size: int
    """Size of the whole file, in bytes."""


def block_shards(shard: Shard) -> list[Shard]:
    """Return a shard for each row group of a file that can be fetched in ranges; otherwise an empty list."""
    count = len(shard.blocks)
    if count < 2 or not shard.ranges or shard.files[0].packed or shard.size < count * MIN_RANGE_BYTES:
        return []
    return [
        replace(
            shard,
            samples=rows,
            files=(_range(shard, *shard.ranges[2 * number : 2 * number + 2]),),
            blocks=(rows,),
            decoded_bytes=0,
            ranges=(),
        )
        for number, rows in enumerate(shard.blocks)
    ]


def footer_shard(shard: Shard) -> Shard:
    """Return the shard that consists of the footer of a file."""
    return Shard("parquet", 0, (_range(shard, shard.ranges[-1], shard.size),))


def _range(shard: Shard, begin: int, end: int) -> ShardFile:
    return ShardFile(StoredFile(f"{shard.name}.ranges/{begin}-{end}", end - begin, source=shard.name, begin=begin))


def opened_range(opened: Descriptor, place: FileRange) -> Any:
    """Return a file for pyarrow that has the bytes of a row group at their offsets in the whole file."""
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
        """Return bytes of the row group. Raises OSError outside of it."""
        end = min(self._size, self._at + size) if size >= 0 else self._size
        if self._at < self._begin or end > self._end + _PAST_END:
            raise OSError(f"bytes {self._at} to {end} must lie in the row group, {self._begin} to {self._end}")
        data = self._opened.read(min(end, self._end) - self._at, self._at - self._begin)
        self._at += len(data)
        past = end - self._at if self._at == self._end else 0
        self._at += past
        return data + bytes(past)
