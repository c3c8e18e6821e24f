"""Parquet files of a table (Delta Lake, Iceberg) as one snapshot of it shows them: without the rows that were deleted,
with the table's columns. Samples, blocks and numbers of rows are those of the live rows alone.

A file's entry in the index has two fields more than one of format "parquet":

    "deleted"  bits of the file's rows, 1 for a deleted one, the lowest bit first; compressed by zlib, in base64.
               Absent if no row is deleted.
    "table"    the table's columns in this file; absent if they are the file's own.

A column is [name, source] or [name, source, type], or [name, null, type, text] for a value that all rows share (a field
of a struct has none).
`source` is the name in the file, null for a column that the file lacks: its values are null. `type` is the one to which
the file's values are cast, as Arrow writes it; {"list": type}, {"map": [type, type]} or {"struct": columns} where only
a part of a nested value changes; null for a part that stays.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import re
import zlib
from collections.abc import Sequence
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.formats.columnar.columns import ConstantColumn, constant_column
from penstock.data.formats.fields import InvalidField, names
from penstock.data.formats.parquet.footer import RowGroup
from penstock.data.formats.shards import Shard
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import ShardCorruptError

TABLE_FILE = "parquet_table"
"""Name of the format in the index."""
DEEPEST = 32
"""Most levels of nested values whose parts are cast."""
_DECIMAL = re.compile(r"decimal128\((\d{1,2}), (\d{1,2})\)")
_TIMESTAMP = re.compile(r"(timestamp|time64|time32|duration)\[(s|ms|us|ns)(, tz=UTC)?\]")
_FIXED = re.compile(r"fixed_size_binary\[(\d{1,4})\]")
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_PLAIN = frozenset(["bool", *_INTEGERS, "float", "double", "string", "binary", "date32[day]"])

Bits = npt.NDArray[np.bool_]


def check_table_file(settings: dict[str, Any]) -> None:
    """Raises InvalidField."""
    listed = names(settings, "column_names")
    if "table" not in settings:
        return
    _check_columns(settings["table"], DEEPEST)
    if [column[0] for column in settings["table"]] != listed:
        raise InvalidField("table", "must have the columns of column_names, in their order")


def encoded_rows(deleted: Bits) -> str:
    """Return the field "deleted" of a file's rows, True for a deleted one; "" if none is."""
    if not deleted.any():
        return ""
    return base64.b64encode(zlib.compress(np.packbits(deleted, bitorder="little").tobytes())).decode()


def decoded_rows(text: str, rows: int, name: str) -> Bits:
    """Return which of a file's rows are deleted, True for a deleted one; shape (rows,). No more than a bit for each row
    is decompressed. Raises ShardCorruptError."""
    size = (rows + 7) // 8
    try:
        unpacked = zlib.decompressobj()
        data = unpacked.decompress(base64.b64decode(text, validate=True), size + 1)
    except (ValueError, binascii.Error, zlib.error) as error:
        raise ShardCorruptError(f"{name}: the index's list of deleted rows is damaged: {error}. {_AGAIN}") from error
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if len(data) != size or not unpacked.eof or bits[rows:].any():
        raise ShardCorruptError(f"{name}: the index's list of deleted rows must have {rows} bits. {_AGAIN}")
    return bits[:rows].astype(np.bool_)


_AGAIN = "Call index_table again"


def live_counts(deleted: Bits | None, groups: Sequence[RowGroup]) -> tuple[int, ...]:
    """Return the number of live rows in each row group."""
    if deleted is None:
        return tuple(group.rows for group in groups)
    ends = np.cumsum([0, *(group.rows for group in groups)])
    before = np.concatenate([[0], np.cumsum(~deleted)])
    return tuple(np.diff(before[ends]).tolist())


class TableView:
    """What a snapshot of a table shows of a file. `shard`: its entry, or that of a part of the file."""

    def __init__(self, shard: Shard, groups: Sequence[RowGroup]) -> None:
        rows = sum(group.rows for group in groups)
        self._deleted = decoded_rows(shard.deleted, rows, shard.name) if shard.deleted else None
        self._bounds = np.cumsum([0, *(group.rows for group in groups)])
        self.counts = live_counts(self._deleted, groups)
        """Number of live rows in each row group of the whole file."""
        columns = shard.settings.get("table", [[name, name] for name in shard.settings["column_names"]])
        self.names = [column[0] for column in columns]
        self._columns = {name: (source, *more) for name, source, *more in columns if source is not None}
        self.constants = {name: _constant(name, *more) for name, source, *more in columns if source is None}
        """Columns that the file lacks."""

    def sources(self, wanted: Sequence[str]) -> list[str]:
        """Return the file's columns of which the table's columns `wanted` are made."""
        return [self._columns[name][0] for name in wanted]

    def arrays(self, read: Any, wanted: Sequence[str]) -> dict[str, Any]:
        """Return the columns `wanted` of all rows of a row group. `read`: pyarrow's table of its columns `sources`."""
        return {name: changed(read.column(self._columns[name][0]), *self._columns[name][1:]) for name in wanted}

    def live(self, group: int) -> Ints | None:
        """Return the numbers of a row group's live rows within it, ascending; None if all are."""
        begin, end = self._bounds[group : group + 2].tolist()
        if self._deleted is None or self.counts[group] == end - begin:
            return None
        return np.flatnonzero(~self._deleted[begin:end])


def _constant(name: str, kind: Any = None, text: str | None = None) -> ConstantColumn:
    return constant_column(name, None if text is None else value_of_text(text, kind), _type(kind) if kind else None)


def constant_array(rows: int, kind: Any = None, text: str | None = None) -> Any:
    """Return the values of a constant column as a chunked array."""
    arrow = importlib.import_module("pyarrow")
    value = None if text is None else value_of_text(text, kind)
    return arrow.chunked_array([arrow.array([value] * rows, _type(kind) if kind else None)])


def changed(array: Any, kind: Any = None) -> Any:
    """Return a chunked array as the table has it. `kind`: type in the index, see above."""
    arrow = importlib.import_module("pyarrow")
    if kind is None:
        return array
    if isinstance(kind, str):
        return array.cast(_type(kind), safe=False)
    chunks = array.chunks or [arrow.nulls(0, array.type)]
    return arrow.chunked_array([_conformed(chunk, kind) for chunk in chunks])


def _conformed(array: Any, kind: Any) -> Any:
    """Return an array as the table has it. `kind`: type in the index, see above."""
    arrow = importlib.import_module("pyarrow")
    if kind is None:
        return array
    if isinstance(kind, str):
        return array.cast(_type(kind), safe=False)
    if "struct" in kind:
        children = []
        for _, source, *more in kind["struct"]:
            if source is None:
                children.append(arrow.nulls(len(array)))
            else:
                children.append(_conformed(array.field(source), more[0] if more else None))
        return arrow.StructArray.from_arrays(children, [each[0] for each in kind["struct"]], mask=array.is_null())
    if array.offset:  # `from_arrays` takes no nulls with a slice of the offsets
        array = array.take(arrow.array(np.arange(len(array))))
    empty = np.append(array.is_null().to_numpy(zero_copy_only=False), False)
    offsets = arrow.array(array.offsets.to_numpy(), array.offsets.type, mask=empty if empty.any() else None)
    if "map" in kind:
        return arrow.MapArray.from_arrays(
            offsets, _conformed(array.keys, kind["map"][0]), _conformed(array.items, kind["map"][1])
        )
    is_large = arrow.types.is_large_list(array.type)
    make = arrow.LargeListArray if is_large else arrow.ListArray
    return make.from_arrays(offsets, _conformed(array.values, kind["list"]))


def text_of_value(value: Any) -> str | None:
    """Return a constant's text in the index."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if isinstance(value, (date, datetime, time)) else str(value)


def value_of_text(text: str, kind: str) -> Any:
    """Return the value of a constant's text, for pyarrow. Raises ValueError."""
    if kind == "string":
        return text
    if kind == "bool":
        return text == "True"
    if kind in ("float", "double"):
        return float(text)
    if kind.startswith("decimal"):
        return Decimal(text)
    if kind.startswith("date"):
        return date.fromisoformat(text)
    if kind.startswith("timestamp"):
        return datetime.fromisoformat(text)
    if kind.startswith("time"):
        return time.fromisoformat(text)
    if kind.startswith(("binary", "fixed")):
        return bytes.fromhex(text)
    return int(text)


@lru_cache(maxsize=256)
def _type(kind: str) -> Any:
    """Return pyarrow's type of this name. Raises ValueError for another name."""
    arrow = importlib.import_module("pyarrow")
    if match := _DECIMAL.fullmatch(kind):
        return arrow.decimal128(int(match[1]), int(match[2]))
    if match := _FIXED.fullmatch(kind):
        return arrow.binary(int(match[1]))
    if match := _TIMESTAMP.fullmatch(kind):
        zone = {"tz": "UTC"} if match[3] else {}
        return getattr(arrow, match[1])(match[2], **zone)
    if kind not in _PLAIN:
        raise ValueError(f"{kind!r} is no type of a table's column")
    return arrow.type_for_alias(kind.removesuffix("[day]"))


def _check_columns(columns: Any, depth: int) -> None:
    if not isinstance(columns, list):
        raise InvalidField("table", f"must be a list of columns, got {columns!r:.100}")
    for column in columns:
        is_column = isinstance(column, list) and 2 <= len(column) <= 4 and isinstance(column[0], str)
        if not is_column or not isinstance(column[1], (str, type(None))):
            raise InvalidField("table", f"must have columns [name, source, type, text], got {column!r:.100}")
        _, source, *more = column
        if more:
            _check_kind(more[0], depth - 1)
        if len(more) > 1:
            try:
                if source is not None:
                    raise ValueError("its source must be null")
                if more[1] is not None:
                    value_of_text(more[1], more[0])
            except (ValueError, ArithmeticError, TypeError, AttributeError) as error:
                raise InvalidField(
                    "table", f"must have the texts of its constants, got {column!r:.100}: {error}"
                ) from error


def _check_kind(kind: Any, depth: int) -> None:
    if depth < 0:
        raise InvalidField("table", "must not be nested so deeply")
    if kind is None:
        return
    if isinstance(kind, str):
        if not (kind in _PLAIN or _DECIMAL.fullmatch(kind) or _TIMESTAMP.fullmatch(kind) or _FIXED.fullmatch(kind)):
            raise InvalidField("table", f"must have known types, got {kind!r:.100}")
    elif isinstance(kind, dict) and len(kind) == 1 and "struct" in kind:
        _check_columns(kind["struct"], depth - 1)
    elif isinstance(kind, dict) and len(kind) == 1 and "list" in kind:
        _check_kind(kind["list"], depth - 1)
    elif isinstance(kind, dict) and len(kind) == 1 and isinstance(kind.get("map"), list) and len(kind["map"]) == 2:
        for part in kind["map"]:
            _check_kind(part, depth - 1)
    else:
        raise InvalidField("table", f"must have known types, got {kind!r:.100}")
