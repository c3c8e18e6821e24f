"""Conversion of pyarrow's scalars to Python objects, or to numpy objects for times finer than Python's.

Numbers, texts, and lists of numbers without nulls do not come here: they are read from their buffers
(parquet_columns.py, arrow_columns.py). Scalars are for all other types, such as times, decimals and structs.

Python's datetime, timedelta and time resolve microseconds. Parquet also has times in nanoseconds, which Spark writes by
default. Such times become numpy's datetime64[ns] and timedelta64[ns], even if their last three digits are 0, and
whether or not pandas is installed: the type of a column's values must depend neither on a value nor on other packages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["value_of"]

Value = Callable[[Any], Any]
"""Function that converts a pyarrow scalar to the value in a sample."""


def value_of(kind: Any) -> Value:
    """Return the function that converts pyarrow scalars of type `kind` to the values in samples."""
    return _fine(kind) or _as_py


def _as_py(scalar: Any) -> Any:
    return scalar.as_py()


def _fine(kind: Any) -> Value | None:
    """Return the function that converts scalars of a type of times in nanoseconds, or of a nested type that contains
    one; None for any other type."""
    types = importlib.import_module("pyarrow.types")
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time64(kind):
        if kind.unit != "ns":
            return None
        make = np.datetime64 if types.is_timestamp(kind) else np.timedelta64
        return lambda scalar: make(scalar.value, "ns") if scalar.is_valid else None
    if types.is_dictionary(kind):
        chosen = _fine(kind.value_type)
        return chosen and (lambda scalar: chosen(scalar.value) if scalar.is_valid else None)
    if types.is_map(kind):
        keys, values = _fine(kind.key_type), _fine(kind.item_type)
        return _map(keys or _as_py, values or _as_py) if keys or values else None
    if types.is_struct(kind):
        fields = {kind.field(i).name: _fine(kind.field(i).type) for i in range(kind.num_fields)}
        return _struct({name: fine or _as_py for name, fine in fields.items()}) if any(fields.values()) else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _fine(kind.value_type)
        return inner and (lambda scalar: [inner(each) for each in scalar.values] if scalar.is_valid else None)
    return None


def _struct(fields: dict[str, Value]) -> Value:
    return lambda scalar: {name: fields[name](scalar[name]) for name in fields} if scalar.is_valid else None


def _map(key: Value, value: Value) -> Value:
    def pairs(scalar: Any) -> list[tuple[Any, Any]] | None:
        # The result is that of pyarrow's own conversion of a map. `scalar.values` is an array of structs.
        return [(key(each[0]), value(each[1])) for each in scalar.values] if scalar.is_valid else None

    return pairs
