"""Choice of how each column of a dataset is stored in another format, from some of its samples.

A column keeps its values where the target has a type for them. Otherwise they become text: in MDS, JSON for dicts,
lists and columns with missing values, ISO 8601 for times. A value that its type cannot hold is an error, and never
changed silently: unless the user turns that off, rows are read back and compared.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.data.converting.row_digest import value_bytes
from penstock.data.formats.encodings import ENCODINGS, check_encoding
from penstock.proto.errors import DatasetError, InvalidArgumentError

_TIMES = (datetime.datetime, datetime.date, datetime.time, np.datetime64)
_JSON_TYPES = (str, int, float, bool, type(None))
INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class TargetColumn:
    """Name, type, and change of values of a column of the result."""

    name: str
    type: str
    """Encoding (MDS), or Arrow's name of the type (Parquet)."""
    change: str = ""
    """Name in CHANGES of the function from a source's value to the stored one; "" for no change."""


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a key of JSON must be text, got {key!r}")
        return {key: _listed(each) for key, each in value.items()}
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value


def _time_text(value: Any) -> Any:
    if value is None or isinstance(value, np.datetime64):
        return value if value is None else str(value)
    if not isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        raise ValueError(f"all values must be times, as in the rows that decided the type, got {value!r:.80}")
    return value.isoformat()


def _float(value: Any) -> Any:
    if value is None or isinstance(value, float):
        return value
    made = float(value)
    if made != value:
        raise ValueError(f"all values must be numbers that float64 holds exactly, got {value}")
    return made


def _only(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 1:
        raise ValueError(
            f"all values must be lists of one value, as in the rows that decided the type, got {value!r:.80}"
        )
    return value[0]


def _file(value: Any) -> Any:
    if not isinstance(value, Mapping) or not isinstance(value.get("bytes"), bytes):
        raise ValueError(
            f"all values must be dicts with a field 'bytes', as in the rows that decided the type, got {value!r:.80}"
        )
    return value["bytes"]


CHANGES: Mapping[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "json": lambda value: json.dumps(_listed(value), ensure_ascii=False),
    "listed": _listed,
    "time": _time_text,
    "float": _float,
    "only": _only,
    "file": _file,
}
"""Functions from a value of the source to the value that a reader of the result gets."""


def stored_row(row: Mapping[str, Any], columns: Sequence[TargetColumn], number: int) -> dict[str, Any]:
    """Return a row as a reader of the result gets it. Raise DatasetError for a value that cannot be stored."""
    made = {}
    for column in columns:
        name = column.name
        try:
            made[name] = CHANGES[column.change](row[name])
        except KeyError:
            raise _missing(f"sample {number} of the shard", name, row) from None
        except (TypeError, ValueError) as error:
            raise DatasetError(
                f"sample {number} of the shard, column {name!r}: {error}. {_remedy(column.change, name)}"
            ) from None
    return made


def given_json(column: str) -> str:
    """Return the arguments, of the function and of the command, that store a column as JSON."""
    return f"types={{{column!r}: 'json'}} (--as {column}=json)"


def _remedy(change: str, name: str) -> str:
    if change == "float":
        return f"Give the column's type with {given_json(name)}"
    if change in ("only", "file"):
        return "Convert to Parquet, or leave the column out of `columns`"
    return "Leave the column out of `columns`"


def _missing(sample: str, name: str, row: Mapping[str, Any]) -> DatasetError:
    return DatasetError(
        f"{sample} must have the column {name!r}, got {', '.join(map(repr, row))}. Leave it out of `columns`"
    )


def mds_columns(
    samples: Sequence[Mapping[str, Any]], names: Sequence[str], given: Mapping[str, str]
) -> list[TargetColumn]:
    """Return the columns of MDS with the encodings in `given` (of the user or the source), else such as fit `samples`.
    Raises DatasetError, InvalidArgumentError."""
    return [_mds_column(name, _values(samples, name), given.get(name)) for name in names]


def _values(samples: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    for row in samples:
        if name not in row:
            raise _missing("each sample", name, row)
    return [row[name] for row in samples]


def _mds_column(name: str, values: Sequence[Any], given: str | None) -> TargetColumn:
    change, values = _unwrapped(values)
    if given is not None:
        try:
            check_encoding(given)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"types (--as): column {name!r}: {error.message}") from None
        return TargetColumn(name, given, "listed" if given == "json" else change)
    kinds = {type(value) for value in values}
    if change:
        return TargetColumn(name, _file_encoding(values) if change == "file" else "bytes", change)
    known = _mds_encoding(kinds, values)
    if known:
        return TargetColumn(name, known)
    times = kinds - {type(None)}
    if times and all(issubclass(kind, _TIMES) for kind in times):
        return TargetColumn(name, "str" if times == kinds else "json", "time")
    if all(map(_is_json, values)):
        return TargetColumn(name, "json", "listed")
    raise DatasetError(f"column {name!r} must have values that MDS can store, got {_names(kinds)}. Convert to Parquet")


def _unwrapped(values: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """Return (name in CHANGES, changed values) for bytes in a wrapper: "only" for lists of one bytes object, as in
    TensorFlow's features; "file" for dicts with the bytes of a file, as in Hugging Face's images; else ("", values)."""
    for change in ("only", "file"):
        with contextlib.suppress(ValueError):
            made = [CHANGES[change](value) for value in values]
            if made and all(isinstance(value, bytes) for value in made):
                return change, made
    return "", values


def _file_encoding(files: Sequence[bytes]) -> str:
    for encoding, begin in (("jpeg", b"\xff\xd8\xff"), ("png", b"\x89PNG\r\n\x1a\n")):
        if all(file.startswith(begin) for file in files):
            return encoding
    return "bytes"


def _mds_encoding(kinds: set[type], values: Sequence[Any]) -> str | None:
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind is int:
        return "int" if all(value in INT64 for value in values) else "str_int"
    if kind is np.ndarray:
        return _array_encoding(values)
    if issubclass(kind, np.integer | np.floating) and np.dtype(kind).name in ENCODINGS:
        return np.dtype(kind).name
    if hasattr(values[0], "mode") and hasattr(values[0], "tobytes"):
        return "pil"
    return {str: "str", bytes: "bytes", float: "float64", decimal.Decimal: "str_decimal"}.get(kind)


def _array_encoding(values: Sequence[Any]) -> str | None:
    dtypes = {value.dtype for value in values}
    plain = all(dtype.kind in "iuf" and dtype.isnative and dtype.itemsize <= 8 for dtype in dtypes)
    if not plain or not all(value.size and value.ndim for value in values):
        return None
    return f"ndarray:{dtypes.pop().name}" if len(dtypes) == 1 else "ndarray"


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, (*_JSON_TYPES, np.number, np.bool_)) and not isinstance(value, np.timedelta64)


def _names(kinds: set[type]) -> str:
    return " and ".join(sorted(kind.__name__ for kind in kinds)) or "none"


def parquet_columns(
    samples: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    given: Mapping[str, str],
    declared: Mapping[str, Any],
) -> tuple[list[TargetColumn], Any]:
    """Return the columns of Parquet and their pyarrow schema. Types: `given` by the user ("json", or pyarrow's name
    such as "int32"), `declared` by the source, or such as fit `samples`."""
    arrow = importlib.import_module("pyarrow")
    columns, fields = [], []
    for name in names:
        column, kind = _parquet_column(arrow, name, _values(samples, name), given.get(name), declared.get(name))
        columns.append(column)
        fields.append(arrow.field(name, kind))
    return columns, arrow.schema(fields)


def _parquet_column(
    arrow: Any, name: str, values: list[Any], given: str | None, declared: Any
) -> tuple[TargetColumn, Any]:
    if given == "json":
        return TargetColumn(name, "string", "json"), arrow.string()
    if given is not None:
        try:
            kind = arrow.type_for_alias(given)
        except ValueError as error:
            raise InvalidArgumentError(
                f"types (--as): column {name!r}: the type must be json or one of Arrow's, such as int32: {error}"
            ) from None
        return TargetColumn(name, str(kind)), kind
    if declared is not None:
        kind = declared.value_type if arrow.types.is_dictionary(declared) else declared
        if _unchanged(arrow, kind, values):
            return TargetColumn(name, str(kind)), kind
    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    if len(kinds) > 1 and kinds <= {int, float}:
        return TargetColumn(name, "double", "float"), arrow.float64()
    kind = _arrow_type(arrow, kinds, present)
    if kind is not None and _unchanged(arrow, kind, values):
        return TargetColumn(name, str(kind)), kind
    if all(map(_is_json, values)):
        return TargetColumn(name, "string", "json"), arrow.string()
    raise DatasetError(f"column {name!r} must have values that Parquet can store, got {_names(kinds)}. Leave it out")


def _arrow_type(arrow: Any, kinds: set[type], present: Sequence[Any]) -> Any:
    if kinds == {np.datetime64}:
        return arrow.timestamp("ns", "UTC")
    if kinds == {np.timedelta64}:
        return arrow.duration("ns")
    try:
        if kinds == {np.ndarray}:
            dtype = np.result_type(*{value.dtype for value in present})
            (ndim,) = {value.ndim for value in present}
            kind = arrow.from_numpy_dtype(dtype)
            for _ in range(ndim):
                kind = arrow.list_(kind)
            return kind
        if kinds == {int} and max(present) > INT64[-1]:
            return arrow.uint64()
        kind = arrow.array(present).type
        return arrow.decimal128(38, kind.scale) if arrow.types.is_decimal128(kind) else kind
    except (ValueError, TypeError, OverflowError, arrow.ArrowException):
        return None


def _unchanged(arrow: Any, kind: Any, values: Sequence[Any]) -> bool:
    """Return True if an Arrow array of this type returns the values unchanged, or all are numpy's times or None."""
    times = (np.datetime64, np.timedelta64)
    if any(isinstance(value, times) for value in values):  # pyarrow needs pandas to return nanoseconds
        return all(value is None or isinstance(value, times) for value in values)
    try:
        back = arrow.array(list(map(arrow_value, values)), kind).to_pylist()
    except (ValueError, TypeError, OverflowError, arrow.ArrowException):
        return False
    return all(value_bytes(one) == value_bytes(other) for one, other in zip(values, back, strict=True))


def arrow_value(value: Any) -> Any:
    """Return what pyarrow accepts: arrays of 2 or more dimensions as nested lists, of shape () as a number."""
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim != 1 else value
