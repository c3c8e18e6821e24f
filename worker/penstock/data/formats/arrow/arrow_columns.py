"""Rows of a column of an Arrow record batch, each read by itself.

A row of a list of numbers takes two reads: its two offsets, and its numbers, which go straight into a numpy array. So a
row costs the same in any order, no record batch is read as a whole, and only small buffers are kept in memory. Columns
of numbers, texts and bytes are read in the same way. Other columns (times, structs, nested lists) become a pyarrow
array of the wanted row alone. Dictionaries, unions and views cannot be read row by row, so a file with such a column is
read by whole record batches.
"""

from __future__ import annotations

import importlib
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from penstock.data.formats.arrow.ipc_messages import BatchLayout
from penstock.data.formats.parquet.extension_types import conversion_of, storage_of
from penstock.data.formats.parquet.parquet_scalars import value_of

__all__ = ["Batch", "Column", "column_plans"]


KEPT_ROW_BYTES = 16
"""Largest size in bytes per row of a buffer that is kept in memory: about 16,000 bytes in a record batch of 1,000
rows."""
KEPT_BUFFER_BYTES = 1 << 20
"""Largest size in bytes of a buffer that is kept in memory."""
PART_COST_BYTES = 4096
"""Cost of one read call, as the number of bytes that are read from the page cache in the same time. A buffer is read as
a whole once the calls for its parts have cost as much as its bytes."""

_CODES = {
    f"{kind}{size}": code
    for kind, codes in (("i", "bhiq"), ("u", "BHIQ"))
    for size, code in zip((1, 2, 4, 8), codes, strict=True)
}
_CODES |= {"f2": "e", "f4": "f", "f8": "d"}


@dataclass(frozen=True, slots=True)
class Batch:
    """Record batch in an open file, and the functions that read its bytes. A record batch consists of buffers (arrays
    of bytes), several for each column."""

    layout: BatchLayout
    body: int
    """Offset in the file of the first byte of the record batch's buffers."""
    body_size: int
    """Size in bytes of all buffers together, with the gaps between them."""
    read: Callable[[int, int], bytes]
    """Function (begin, size) that returns exactly these bytes of the file."""
    fill: Callable[[np.ndarray[Any, Any], int], None]
    """Function (array, begin) that fills an array with bytes of the file from offset `begin` on."""
    count: Callable[[int], None]
    """Function (size) that is told the size in bytes of all buffers of this record batch in memory, whenever one is
    added."""
    kept: dict[int, bytes] = field(default_factory=dict)
    """Buffers of the record batch that are in memory, by the buffer's number."""
    asked: Counter[int] = field(default_factory=Counter)
    """Number of reads of parts of a buffer, by the buffer's number. Only buffers that are small enough to be kept in
    memory, and are not there yet, are counted."""

    def part(self, buffer: int, begin: int, size: int) -> bytes:
        """Return `size` bytes of a buffer from offset `begin`. Raises ValueError if the buffer is shorter.

        A buffer of a few bytes for each row (numbers, offsets, validity) is at first read in parts. After many parts it
        is read as a whole and kept in memory, because that costs less than more reads of parts.
        """
        kept = self.kept.get(buffer)
        if kept is None:
            place = self.place(buffer, begin, size)
            if not self._is_worth(buffer):
                return self.read(place, size)
            kept = self._keep(buffer)
        data = kept[begin : begin + size]
        if begin < 0 or len(data) != size:
            self.place(buffer, begin, size)  # raises ValueError
        return data

    def _is_worth(self, buffer: int) -> bool:
        length = self.layout.buffers[2 * buffer + 1]
        if length > min(KEPT_ROW_BYTES * self.layout.rows + 64, KEPT_BUFFER_BYTES):
            return False
        self.asked[buffer] += 1
        return self.asked[buffer] * PART_COST_BYTES >= length

    def _keep(self, buffer: int) -> bytes:
        length = self.layout.buffers[2 * buffer + 1]
        kept = self.kept[buffer] = self.read(self.place(buffer, 0, length), length)
        self.count(sum(map(len, list(self.kept.values()))))
        return kept

    def place(self, buffer: int, begin: int, size: int) -> int:
        """Return the offset in the file of byte `begin` of a buffer. Raises ValueError if the buffer has fewer than
        `size` bytes from there."""
        first, length = self.layout.buffers[2 * buffer : 2 * buffer + 2]
        if min(begin, size, first) < 0 or begin + size > length or first + length > self.body_size:
            raise ValueError(
                f"bytes {begin} to {begin + size} must lie within buffer {buffer} of the record batch, which is damaged"
            )
        return self.body + first + begin

    def nulls(self, node: int) -> int:
        """Return the number of nulls of a column or child column. `node`: its number in `BatchLayout.nodes`."""
        return int(self.layout.nodes[2 * node + 1])


class Column(ABC):
    """Reader of single rows of one Arrow column.

    `kind`: pyarrow type in which the column is stored. `node`: number of the column in `BatchLayout.nodes`. `buffer`:
    number of the column's first buffer in `BatchLayout.buffers`.
    """

    def __init__(self, kind: Any, node: int, buffer: int) -> None:
        self.kind, self.node, self.buffer = kind, node, buffer
        self.name, self.declared = "", kind
        """Name of the column, and its type in the file's schema. This type differs from `kind` for an extension type,
        whose values are stored in another type."""
        self.children: list[Column] = []
        self._value = value_of(kind)

    @cached_property
    def convert(self) -> Callable[[Any], Any] | None:
        """Function that converts a stored value to the value in a sample, for a column of an extension type of Arrow
        (parquet/extension_types.py); None if samples contain the stored values."""
        return conversion_of(self.name, self.declared)

    def value(self, batch: Batch, row: int) -> Any:
        """Return the value of a row as samples contain it: the stored value, converted by `convert`. Raises as `row`
        does."""
        value = self.row(batch, row)
        return value if self.convert is None else self.convert(value)

    def row(self, batch: Batch, row: int) -> Any:
        """Return the stored value of a row, not converted by `convert`; None for a null. Raises ValueError, IndexError,
        or an error of pyarrow if the bytes are damaged."""
        array = self.array(batch, row, row + 1)
        array.validate(full=True)
        return self._value(array[0])

    def array(self, batch: Batch, begin: int, end: int) -> Any:
        """Return rows `begin` to `end` - 1 as a pyarrow array of type `kind`."""
        arrow = importlib.import_module("pyarrow")
        # Validity bits are read by whole bytes, so the rows begin at a whole byte, too.
        first = begin - begin % 8 if batch.nulls(self.node) else begin
        valid = None
        if batch.nulls(self.node):
            valid = arrow.py_buffer(batch.part(self.buffer, first // 8, (end + 7) // 8 - first // 8))
        buffers, children = self.buffers(batch, first, end)
        return arrow.Array.from_buffers(
            self.kind,
            end - begin,
            [valid, *(arrow.py_buffer(data) for data in buffers)],
            -1 if valid is not None else 0,
            begin - first,
            children or None,
        )

    @abstractmethod
    def buffers(self, batch: Batch, begin: int, end: int) -> tuple[list[bytes], list[Any]]:
        """Return, for rows `begin` to `end` - 1, the column's buffers after the validity buffer, and the arrays of its
        child columns."""

    def valid(self, batch: Batch, row: int) -> bool:
        """Return True if the value in a row is not null."""
        if not batch.layout.nodes[2 * self.node + 1]:  # number of nulls, read without a call for each row
            return True
        return bool(batch.part(self.buffer, row // 8, 1)[0] >> row % 8 & 1)

    def all_valid(self, batch: Batch, begin: int, end: int) -> bool:
        """Return True if no row from `begin` to `end` - 1 is null."""
        if not batch.nulls(self.node) or begin >= end:
            return True
        first = begin // 8
        bits = int.from_bytes(batch.part(self.buffer, first, (end + 7) // 8 - first), "little")
        wanted = (1 << end - begin) - 1
        return bits >> begin % 8 & wanted == wanted


class _Fixed(Column):
    """Column of values that all have the same number of bits."""

    def __init__(self, kind: Any, node: int, buffer: int) -> None:
        super().__init__(kind, node, buffer)
        self.bits: int = kind.bit_width
        self.dtype = _dtype(kind)
        self._plain = struct.Struct(f"<{_code(self.dtype)}" if self.dtype is not None else "")
        """Struct that unpacks one number of the column; empty for values that are not numbers."""

    def row(self, batch: Batch, row: int) -> Any:
        if self.dtype is None and self.bits > 1:
            return super().row(batch, row)
        if not self.valid(batch, row):
            return None
        if self.dtype is None:
            return bool(batch.part(self.buffer + 1, row // 8, 1)[0] >> row % 8 & 1)
        kept = batch.kept.get(self.buffer + 1)
        if kept is not None:
            return self._plain.unpack_from(kept, row * self._plain.size)[0]
        return self._plain.unpack(batch.part(self.buffer + 1, row * self._plain.size, self._plain.size))[0]

    def buffers(self, batch: Batch, begin: int, end: int) -> tuple[list[bytes], list[Any]]:
        if self.bits % 8:
            # Bits of booleans are moved so that the first row begins at a whole byte.
            bits = np.frombuffer(batch.part(self.buffer + 1, begin // 8, (end + 7) // 8 - begin // 8), np.uint8)
            unpacked = np.unpackbits(bits, bitorder="little")[begin % 8 : begin % 8 + end - begin]
            return [np.packbits(unpacked, bitorder="little").tobytes()], []
        size = self.bits // 8
        return [batch.part(self.buffer + 1, begin * size, (end - begin) * size)], []


class _Varying(Column):
    """Column of texts, bytes or lists. Each value lies between two offsets, which another buffer stores."""

    def __init__(self, kind: Any, node: int, buffer: int, *, large: bool) -> None:
        super().__init__(kind, node, buffer)
        self._size = 8 if large else 4
        self._pair = struct.Struct("<2q" if large else "<2i")

    def bounds(self, batch: Batch, row: int) -> tuple[int, int]:
        """Return the offsets between which the value of a row lies."""
        kept = batch.kept.get(self.buffer + 1)
        if kept is not None:
            begin, end = self._pair.unpack_from(kept, row * self._size)
        else:
            begin, end = self._pair.unpack(batch.part(self.buffer + 1, row * self._size, 2 * self._size))
        if not 0 <= begin <= end:
            raise ValueError(f"the offsets of row {row} of the record batch must ascend, but are damaged")
        return begin, end

    def offsets(self, batch: Batch, begin: int, end: int) -> tuple[bytes, int, int]:
        """Return (offsets, first, last) of rows `begin` to `end` - 1. `offsets`: bytes of all their offsets, reduced by
        the first one, so that they begin at 0. `first`, `last`: the first and the last offset as stored."""
        data = batch.part(self.buffer + 1, begin * self._size, (end - begin + 1) * self._size)
        offsets = np.frombuffer(data, f"<i{self._size}")
        first, last = int(offsets[0]), int(offsets[-1])
        if first < 0 or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"the offsets of rows {begin} to {end - 1} of the record batch must ascend, but are not")
        return (offsets - offsets[0]).tobytes(), first, last


class _Text(_Varying):
    def __init__(self, kind: Any, node: int, buffer: int, *, large: bool, text: bool) -> None:
        super().__init__(kind, node, buffer, large=large)
        self._text = text

    def row(self, batch: Batch, row: int) -> Any:
        if not self.valid(batch, row):
            return None
        begin, end = self.bounds(batch, row)
        data = batch.read(batch.place(self.buffer + 2, begin, end - begin), end - begin) if end > begin else b""
        return data.decode() if self._text else data

    def buffers(self, batch: Batch, begin: int, end: int) -> tuple[list[bytes], list[Any]]:
        offsets, first, last = self.offsets(batch, begin, end)
        return [offsets, batch.part(self.buffer + 2, first, last - first) if last > first else b""], []


class _List(_Varying):
    def row(self, batch: Batch, row: int) -> Any:
        if not self.valid(batch, row):
            return None
        begin, end = self.bounds(batch, row)
        return _numbers(self.children[0], batch, begin, end, lambda: super(_List, self).row(batch, row))

    def buffers(self, batch: Batch, begin: int, end: int) -> tuple[list[bytes], list[Any]]:
        offsets, first, last = self.offsets(batch, begin, end)
        return [offsets], [self.children[0].array(batch, first, last)]


class _FixedList(Column):
    def row(self, batch: Batch, row: int) -> Any:
        if not self.valid(batch, row):
            return None
        size = self.kind.list_size
        return _numbers(
            self.children[0], batch, row * size, row * size + size, lambda: super(_FixedList, self).row(batch, row)
        )

    def buffers(self, batch: Batch, begin: int, end: int) -> tuple[list[bytes], list[Any]]:
        size = self.kind.list_size
        return [], [self.children[0].array(batch, begin * size, end * size)]


class _Struct(Column):
    def buffers(self, batch: Batch, begin: int, end: int) -> tuple[list[bytes], list[Any]]:
        return [], [child.array(batch, begin, end) for child in self.children]


class _Null(Column):
    def row(self, batch: Batch, row: int) -> Any:
        return None

    def array(self, batch: Batch, begin: int, end: int) -> Any:
        return importlib.import_module("pyarrow").nulls(end - begin)

    def buffers(self, batch: Batch, begin: int, end: int) -> tuple[list[bytes], list[Any]]:
        return [], []


def _numbers(child: Column, batch: Batch, begin: int, end: int, otherwise: Callable[[], Any]) -> Any:
    """Return numbers `begin` to `end` - 1 of a list's child column as an array. If these values are not numbers or
    booleans, or if one of them is null, return the result of `otherwise()`."""
    if not isinstance(child, _Fixed) or not child.all_valid(batch, begin, end):
        return otherwise()
    if child.bits == 1:
        first = begin // 8
        bits = np.frombuffer(batch.part(child.buffer + 1, first, (end + 7) // 8 - first), np.uint8)
        return np.unpackbits(bits, bitorder="little")[begin % 8 : begin % 8 + end - begin].astype(np.bool_)
    if child.dtype is None:
        return otherwise()
    array = np.empty(end - begin, child.dtype)
    if end > begin:
        batch.fill(array, batch.place(child.buffer + 1, begin * array.itemsize, array.nbytes))
    return array


def column_plans(schema: Any) -> list[tuple[str, Column]] | None:
    """Return (name, Column) for each column of a pyarrow schema; None if a column cannot be read row by row."""
    node, buffer = 0, 0

    def plan(kind: Any) -> Column | None:
        nonlocal node, buffer
        made = _plan(kind, node, buffer)
        if made is None:
            return None
        node += 1
        buffer += _buffers(made)
        for within in _within(made.kind):
            child = plan(within)
            if child is None:
                return None
            made.children.append(child)
        return made

    plans = []
    for one in schema:
        column = plan(storage_of(one.type))
        if column is None:
            return None
        column.name, column.declared = one.name, one.type
        plans.append((one.name, column))
    return plans


def _plan(kind: Any, node: int, buffer: int) -> Column | None:
    types = importlib.import_module("pyarrow.types")
    if types.is_null(kind):
        return _Null(kind, node, buffer)
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        large, text = types.is_large_string(kind) or types.is_large_binary(kind), types.is_string(kind)
        return _Text(kind, node, buffer, large=large, text=text or types.is_large_string(kind))
    if types.is_list(kind) or types.is_large_list(kind):
        return _List(kind, node, buffer, large=types.is_large_list(kind))
    if types.is_map(kind):
        return _Map(kind, node, buffer, large=False)
    if types.is_fixed_size_list(kind):
        return _FixedList(kind, node, buffer)
    if types.is_struct(kind):
        return _Struct(kind, node, buffer)
    if types.is_dictionary(kind) or types.is_nested(kind):
        return None
    return _Fixed(kind, node, buffer) if _has_bits(kind) else None


class _Map(_List):
    def row(self, batch: Batch, row: int) -> Any:
        return Column.row(self, batch, row)


def _within(kind: Any) -> Iterator[Any]:
    types = importlib.import_module("pyarrow.types")
    if types.is_struct(kind):
        yield from (kind.field(number).type for number in range(kind.num_fields))
    elif types.is_map(kind):
        arrow = importlib.import_module("pyarrow")
        yield arrow.struct([kind.key_field, kind.item_field])
    elif types.is_nested(kind):
        yield kind.value_type


def _buffers(column: Column) -> int:
    """Return the number of buffers of a column, without its child columns' buffers."""
    return {_Null: 0, _Fixed: 2, _Text: 3, _List: 2, _Map: 2, _FixedList: 1, _Struct: 1}[type(column)]


def _has_bits(kind: Any) -> bool:
    try:
        return int(kind.bit_width) > 0
    except ValueError:  # a type without a fixed width, such as a view
        return False


def _dtype(kind: Any) -> np.dtype[Any] | None:
    """Return the dtype of a pyarrow type of integers or floats; None for other types."""
    types = importlib.import_module("pyarrow.types")
    plain = types.is_integer(kind) or types.is_floating(kind)
    return np.dtype(kind.to_pandas_dtype()) if plain else None


def _code(dtype: np.dtype[Any]) -> str:
    """Return the letter that stands for a dtype in formats of Python's module struct."""
    return _CODES[dtype.kind + str(dtype.itemsize)]
