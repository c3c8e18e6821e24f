"""Sizes of row groups, from the footer of a Parquet file, without pyarrow: one damaged byte in a footer may kill the
process (std::terminate, in pyarrow 26.0), because its C++ library throws an exception that its binding does not expect.

The footer is one struct in the compact protocol of Thrift. Fields that are not needed are skipped by their type. All
loops end, because each repetition consumes at least one byte of the footer.

https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md

https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from penstock.data.formats.descriptors import Descriptor

TAIL_BYTES = 64 << 10
"""Bytes at the end of a remote file that are fetched first: the whole footer of most files."""

PAGE_HEADER_BYTES = 256
"""Number of bytes that contain the header of any dictionary page."""
TEXT = 6
"""Number of the physical type BYTE_ARRAY."""
DELTA_LENGTH, DELTA_PREFIX = 6, 7
"""Numbers of the encodings DELTA_LENGTH_BYTE_ARRAY and DELTA_BYTE_ARRAY."""
_DICTIONARY_PAGE = 2

_BYTES = (1, 4, 8, 12, 4, 8, 4, 1)
"""Bytes of a decoded value, by its physical type: BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE, BYTE_ARRAY,
FIXED_LEN_BYTE_ARRAY. A text counts 4 for its offset or its number in a dictionary: its length is unknown."""
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_DEEPEST = 32
"""Most structs and lists within each other in a footer; the format needs 8."""

Wanted = dict[int, Any]
"""Fields to read, by number: None for a number, a Wanted for a struct, a list with one of them for a list."""
_COLUMN: Wanted = {3: {1: None, 2: [None], 5: None, 6: None, 7: None, 9: None, 11: None}}
"""ColumnChunk.meta_data: type, encodings, num_values, total_uncompressed_size, total_compressed_size, data_page_offset,
dictionary_page_offset."""
_FILE: Wanted = {4: [{1: [_COLUMN], 3: None}]}
"""FileMetaData.row_groups: columns, num_rows."""


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """Column of a row group. A nested column is several: one for each plain column in which Parquet stores it."""

    kind: int
    """Physical type, an index of _BYTES."""
    encodings: tuple[int, ...]
    """Numbers of the encodings of its pages."""
    values: int
    stored: int
    """Size in bytes in the file, decompressed."""
    dictionary: int
    """Offset in the file of its dictionary page; 0 if it has none."""

    @property
    def nbytes(self) -> int:
        return max(self.stored, self.values * _BYTES[self.kind])


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Size and position of a row group in the file, in bytes."""

    rows: int
    columns: tuple[ColumnChunk, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Estimated bytes in memory: a lower bound, except for bools and integers below 32 bits, which count with their
        size during decoding. A billion equal numbers take a few hundred bytes in the file."""
        return sum(column.nbytes for column in self.columns)


def tail_of(file: Descriptor) -> bytes:
    """Return the bytes from the footer's beginning to the end. Raises ValueError if there is no footer."""
    size = os.fstat(file.fileno()).st_size
    length = footer_length(file.read(8, max(0, size - 8)), size)
    return file.read(length, size - length)


def footer_length(end: bytes, size: int) -> int:
    """Return the footer's length from the last 8 bytes of the file. Raises ValueError for another end."""
    length = int.from_bytes(end[:4], "little")
    if end[4:] == _ENCRYPTED:
        raise ValueError("the footer must not be encrypted")
    if end[4:] != _MAGIC or length > size - 12:
        raise ValueError("the file must end with a footer, but it is truncated or not Parquet")
    return length + 8


def row_groups(footer: bytes) -> list[RowGroup]:
    """Raises ValueError if the footer is damaged."""
    try:
        found, _ = _struct(footer, 0, _FILE, 0)
        return [_row_group(group) for group in found.get(4, [])]
    except (IndexError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("the footer is damaged: its structure cannot be read") from error


def dictionary_bytes(page: bytes, otherwise: int) -> int:
    """Return the decompressed size of a page, from its first PAGE_HEADER_BYTES; `otherwise` if damaged."""
    try:
        header, _ = _struct(page, 0, {1: None, 2: None, 3: None}, 0)
        return max(header[2], header[3]) if header[1] == _DICTIONARY_PAGE else otherwise
    except (IndexError, KeyError, TypeError, ValueError):
        return otherwise


def _row_group(group: dict[int, Any]) -> RowGroup:
    columns, begins, ends = [], [], []
    for column in group[1]:
        values = column[3]
        if min(values[5], values[6]) < 0 or not 0 <= values[1] < len(_BYTES):
            raise ValueError("the footer is damaged: a column has a negative size, or an unknown type")
        dictionary = max(0, values.get(11, 0))
        columns.append(ColumnChunk(values[1], tuple(values.get(2, ())), values[5], values[6], dictionary))
        begin = values.get(9, 0)
        # pyarrow reads a column from its dictionary on, if the dictionary comes first
        begins.append(dictionary if 0 < dictionary < begin else begin)
        ends.append(begins[-1] + values.get(7, 0))
    if group[3] < 0:
        raise ValueError("the footer is damaged: a row group has a negative number of rows")
    return RowGroup(group[3], tuple(columns), min(begins, default=0), max(ends, default=0))


def _struct(data: bytes, at: int, wanted: Wanted, depth: int) -> tuple[dict[int, Any], int]:
    """Return the fields `wanted` of the struct at offset `at`, and the offset of its end. `depth`: structs and lists
    around it. Raises IndexError at the end of the data."""
    if depth > _DEEPEST:
        raise ValueError("the footer is damaged: it is nested too deeply")
    found: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head > 15:
            number += head >> 4
        else:
            value, at = _varint(data, at)
            number = (value >> 1) ^ -(value & 1)
        if number not in wanted:
            if kind > 2:
                at = _skip(data, at, kind, depth + 1)
            continue  # a bool has no bytes: its type is its value
        fields = wanted[number]
        if fields is None and kind in (4, 5, 6):
            value, at = _varint(data, at)
            found[number] = (value >> 1) ^ -(value & 1)
        elif isinstance(fields, list) and kind == 9:
            found[number], at = _elements(data, at, fields[0], depth + 1)
        elif isinstance(fields, dict) and kind == 12:
            found[number], at = _struct(data, at, fields, depth + 1)
        else:
            raise ValueError("the footer is damaged: a field has a wrong type")
    return found, at + 1


def _elements(data: bytes, at: int, wanted: Wanted | None, depth: int) -> tuple[list[Any], int]:
    """Return the elements of the list at `at`, structs with the fields `wanted` or numbers, and its end."""
    count, kind, at = _list(data, at)
    if count and kind not in ((4, 5, 6) if wanted is None else (12,)):
        raise ValueError("the footer is damaged: a list has a wrong type")
    elements: list[Any] = []
    for _ in range(count):
        if wanted is None:
            value, at = _varint(data, at)
            elements.append((value >> 1) ^ -(value & 1))
        else:
            element, at = _struct(data, at, wanted, depth)
            elements.append(element)
    return elements, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    for shift in range(7, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("the footer is damaged: a number has more than 64 bits")


def _list(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the length of the list at `at`, the type of its elements, and the offset of the first."""
    head = data[at]
    count, at = (head >> 4, at + 1) if head < 0xF0 else _varint(data, at + 1)
    if count > len(data) - at:
        raise ValueError("the footer is damaged: a list is longer than the footer")
    return count, head & 15, at


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the end of the value at `at`, of Thrift's type `kind`: a list element or a struct field, but not a bool
    field, which has no bytes of its own."""
    if kind == 8:
        length, at = _varint(data, at)
        return at + length
    if kind in (4, 5, 6):
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == 12:
        return _struct(data, at, {}, depth)[1]
    if kind in (1, 2, 3):
        return at + 1
    if kind == 7:
        return at + 8
    if kind not in (9, 10, 11):
        raise ValueError("the footer is damaged: a field has an unknown type")
    if depth > _DEEPEST:
        raise ValueError("the footer is damaged: it is nested too deeply")
    if kind == 11:
        count, at = _varint(data, at)
        kinds = data[at] if count else 0
        at += bool(count)
        for _ in range(count):
            at = _skip(data, _skip(data, at, kinds >> 4, depth + 1), kinds & 15, depth + 1)
        return at
    count, kind, at = _list(data, at)
    for _ in range(count):
        at = _skip(data, at, kind, depth + 1)
    return at
