"""Snapshot of a table, as its log describes it, and what it makes of the columns of each Parquet file.

A table's column has an identity that stays when it is renamed: a number, which the file's schema has as field_id, or
its name in the files. A column that a file lacks was added later.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError

FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, slots=True)
class ListOf:
    element: ColumnType


@dataclass(frozen=True, slots=True)
class MapOf:
    key: ColumnType
    value: ColumnType


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table, or field of a struct."""

    name: str
    type: ColumnType
    stored: tuple[str, ...]
    """Names in files whose columns have no numbers; none for a column that is in no file."""
    number: int | None = None
    """Number in files, if they are told apart by it."""
    default: str | None = None
    """Text of the value in files that lack the column (table_files.text_of_value); None for null."""


ColumnType = str | ListOf | MapOf | tuple[Column, ...]
"""Name of a plain type as Arrow writes it; "" for one whose values are read as they are stored."""


@dataclass(frozen=True, slots=True)
class TableFile:
    name: str
    """Path relative to the table's folder."""
    deleted: Ints | None = None
    """Numbers of the deleted rows, ascending; None if no row is deleted."""
    constants: Mapping[str, str | None] = field(default_factory=dict)
    """Name of a column -> text of its one value, if it is not in the file."""


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    kind: str
    """"Delta Lake" or "Iceberg", for messages."""
    number: int
    columns: tuple[Column, ...]
    files: Sequence[TableFile]


def columns_in(columns: Sequence[Column], constants: Mapping[str, str | None], schema: Any, where: str) -> list[Any]:
    """Return the index's "table" field for a file. `schema`: its pyarrow Schema. `where`: for errors. Raises
    DatasetError."""
    own = [schema.field(number) for number in range(len(schema))]
    numbered = [column for column in columns if column.number is not None and not column.stored]
    if numbered and own and all(_number(each) is None for each in own):
        raise DatasetError(f"{where} has no numbers of its columns, and the table no names for them (name mapping)")
    return [_column(column, own, where, constants) for column in columns]


def are_as_stored(columns: Sequence[Any], schema: Any) -> bool:
    """Return True if a file's columns are the table's."""
    return columns == [[name, name] for name in schema.names]


def _column(column: Column, fields: Sequence[Any], where: str, constants: Mapping[str, str | None]) -> list[Any]:
    found = _find(column, fields)
    if found is None:
        text = constants.get(column.name, column.default)
        if text is not None and (not isinstance(column.type, str) or not column.type):
            raise DatasetError(f"{where}: column {column.name!r} must have a plain type to be a partition's value")
        return [column.name, None] if text is None else [column.name, None, column.type, text]
    change = _change(column.type, found.type, f"{where}: column {column.name!r}")
    return [column.name, found.name] if change is None else [column.name, found.name, change]


def _find(column: Column, fields: Sequence[Any]) -> Any:
    for each in fields:
        number = _number(each)
        if column.number is not None and number is not None:
            if number == column.number:
                return each
        elif each.name in column.stored:
            return each
    return None


def _number(field: Any) -> int | None:
    text = (field.metadata or {}).get(FIELD_ID)
    return None if text is None else int(text)


def _change(kind: ColumnType, stored: Any, where: str) -> Any:
    """Return the type in the index to which values of pyarrow's type `stored` must be changed; None if they stay."""
    types = importlib.import_module("pyarrow").types
    if isinstance(kind, str):
        if _is_nested(types, stored) and kind:
            raise DatasetError(f"{where} must be {kind}, got {stored} in the file. Write the file again")
        return kind if kind and str(stored) != kind and _is_cast(types, stored) else None
    if isinstance(kind, ListOf) and any(
        test(stored) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    ):
        element = _change(kind.element, stored.value_type, where)
        return None if element is None else {"list": element}
    if isinstance(kind, MapOf) and types.is_map(stored):
        parts = [_change(kind.key, stored.key_type, where), _change(kind.value, stored.item_type, where)]
        return None if parts == [None, None] else {"map": parts}
    if isinstance(kind, tuple) and types.is_struct(stored):
        fields = [stored.field(number) for number in range(stored.num_fields)]
        columns = [_column(each, fields, where, {}) for each in kind]
        return None if columns == [[each.name, each.name] for each in fields] else {"struct": columns}
    raise DatasetError(f"{where} has another type than the table, {stored} in the file. Write the file again")


def _is_nested(types: Any, stored: Any) -> bool:
    return bool(types.is_nested(stored))


def _is_cast(types: Any, stored: Any) -> bool:
    """Return True for types whose widths and units tables change. Others, such as texts, stay as they are stored."""
    return bool(
        types.is_integer(stored)
        or types.is_floating(stored)
        or types.is_decimal(stored)
        or types.is_timestamp(stored)
        or types.is_date(stored)
    )
