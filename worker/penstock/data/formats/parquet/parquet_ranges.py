"""Row groups of a remote Parquet file as separate files in a cache (ranges/file_ranges.py), and the file's footer,
which the reader of any row group needs."""

from __future__ import annotations

import importlib
import io
import os
from dataclasses import dataclass
from typing import Any

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.parquet.parquet_footer import RowGroup, footer_length, row_groups
from penstock.data.formats.parquet.parquet_shards import pyarrow_parquet, ranges_of
from penstock.data.formats.ranges.file_ranges import file_range
from penstock.data.formats.shards import Shard

__all__ = ["Footer", "RowGroupPart", "footer_of", "footer_shard", "opened_range"]

_PAST_END = 128
"""Number of bytes after a column's end that pyarrow may ask for, because old writers understated the column's size."""


@dataclass(frozen=True, slots=True)
class Footer:
    """Parsed footer of a Parquet file."""

    groups: list[RowGroup]
    metadata: Any
    """Sizes and types that the footer gives: pyarrow's FileMetaData."""
    schema: Any
    """Names and types of the columns: pyarrow's Schema."""

    @staticmethod
    def parse(tail: bytes) -> Footer:
        """Return the parsed footer. `tail`: bytes from the footer's beginning to the file's end. Raises ValueError, or
        an error of pyarrow."""
        if footer_length(tail[-8:], len(tail) + 4) != len(tail):
            raise ValueError("the footer must have the length that the dataset's index lists")
        groups = row_groups(tail[:-8])  # checked before pyarrow reads it (parquet_footer.py)
        metadata = pyarrow_parquet().read_metadata(io.BytesIO(tail))
        return Footer(groups, metadata, metadata.schema.to_arrow_schema())


@dataclass(frozen=True, slots=True)
class RowGroupPart:
    """Row group of a remote Parquet file, stored in the cache as a separate file."""

    footer: Footer
    group: int
    """Number of the row group in the file, from 0."""
    begin: int
    """Offset of the row group's first byte in the whole file."""
    size: int
    """Size of the whole file, in bytes."""


def footer_shard(shard: Shard) -> Shard:
    """Return a shard without samples: the footer of a shard's file. The cache fetches it alone
    (`format_table.PartReading.table`)."""
    return Shard("parquet", 0, (file_range(shard, shard.ranges[-1], shard.size),))


def footer_of(shard: Shard, tail: bytes) -> Footer:
    """Return the parsed footer of a shard's file. `tail`: bytes from the footer's beginning to the file's end. Raises
    ValueError if the footer does not match the dataset's index, or an error of pyarrow."""
    footer = Footer.parse(tail)
    if ranges_of(footer.groups, shard.ranges[-1]) != shard.ranges or shard.blocks != tuple(
        group.rows for group in footer.groups
    ):
        raise ValueError("the row groups must be those in the dataset's index, but differ")
    return footer


def opened_range(opened: Descriptor, part: RowGroupPart) -> Any:
    """Return a file object for pyarrow in which the bytes of a row group have the offsets that they have in the whole
    file."""
    return importlib.import_module("pyarrow").PythonFile(_RangeFile(opened, part), mode="r")


class _RangeFile(io.RawIOBase):
    def __init__(self, opened: Descriptor, part: RowGroupPart) -> None:
        self._opened, self._begin, self._size = opened, part.begin, part.size
        self._end = part.begin + os.fstat(opened.fileno()).st_size
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
        """Return bytes of the row group from the current position. Up to _PAST_END bytes after the row group are
        zeros. Raises OSError for other bytes outside of the row group."""
        end = min(self._size, self._at + size) if size >= 0 else self._size
        if self._at < self._begin or end > self._end + _PAST_END:
            raise OSError(f"bytes {self._at} to {end} must lie in the row group, {self._begin} to {self._end}")
        data = self._opened.read(min(end, self._end) - self._at, self._at - self._begin)
        self._at += len(data)
        past = end - self._at if self._at == self._end else 0
        self._at += past
        return data + bytes(past)
