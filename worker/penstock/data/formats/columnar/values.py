"""Values in samples, from pyarrow's scalars and from Arrow's extension types, for types that columns.py does not read.

Python's times resolve microseconds. Nanoseconds, which Spark writes by default, become numpy's datetime64[ns] and
timedelta64[ns], even if their last digits are 0, and whether or not pandas is installed: the type of a column's values
must depend neither on a value nor on other packages. For the same reason samples contain values of extension types as
they are stored (JSON is text, a UUID 16 bytes), but a tensor is an array of its shape, and a bool8 a bool.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.proto.errors import DatasetError

Conversion = Callable[[Any], Any]
"""From a stored value (of an extension type's storage type, or None) to the value in a sample."""
KEPT_TYPES = 256


@lru_cache(maxsize=KEPT_TYPES)
def storage_of(kind: Any) -> Any:
    """Replace each extension type, also nested, by its storage type. Return `kind` itself if it has none, or has one
    where `conversion_of` refuses it."""
    arrow = importlib.import_module("pyarrow")
    types = arrow.types
    if hasattr(kind, "storage_type"):
        return storage_of(kind.storage_type)
    fields = _fields(kind)
    plain = [field.with_type(storage_of(field.type)) for field in fields]
    if all(now.type is field.type or now.type == field.type for now, field in zip(plain, fields, strict=True)):
        return kind
    if types.is_struct(kind):
        return arrow.struct(plain)
    if types.is_map(kind):
        return arrow.map_(*plain, keys_sorted=kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return arrow.list_(*plain, kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return (arrow.large_list if types.is_large_list(kind) else arrow.list_)(*plain)
    return kind


def _fields(kind: Any) -> list[Any]:
    types = importlib.import_module("pyarrow.types")
    if types.is_map(kind):
        return [kind.key_field, kind.item_field]
    if types.is_struct(kind) or types.is_union(kind):
        return [kind.field(number) for number in range(kind.num_fields)]
    return [kind.value_field] if types.is_nested(kind) and hasattr(kind, "value_field") else []


def conversion_of(column: str, kind: Any) -> Conversion | None:
    """Return the function from values of type `storage_of(kind)` to those in samples; None if they are the same. Raises
    DatasetError for an extension type within a union or a list view, and for a tensor whose axes' order is
    ambiguous."""
    try:
        return _conversion(kind)
    except DatasetError as error:
        raise DatasetError(f"column {column!r}: {error.message}") from None


@lru_cache(maxsize=KEPT_TYPES)
def _conversion(kind: Any) -> Conversion | None:
    arrow = importlib.import_module("pyarrow")
    types = arrow.types
    if hasattr(kind, "storage_type"):
        name = getattr(kind, "extension_name", "")
        if name == "arrow.bool8":
            return _present(bool)
        return _tensor(kind) if name == "arrow.fixed_shape_tensor" else _conversion(kind.storage_type)
    if types.is_struct(kind):
        fields = {field.name: _conversion(field.type) for field in _fields(kind)}
        return _struct({name: each for name, each in fields.items() if each is not None})
    if types.is_map(kind):
        key, item = _conversion(kind.key_type), _conversion(kind.item_type)
        return _map(key or _same, item or _same) if key or item else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _conversion(kind.value_type)
        return inner and _present(lambda values: [inner(each) for each in values])
    if any(storage_of(field.type) != field.type for field in _fields(kind)):
        raise DatasetError(
            f"an extension type must not be within a union or a list view, got {kind}. Leave it out of `columns`"
        )
    return None


def _same(value: Any) -> Any:
    return value


def _present(convert: Conversion) -> Conversion:
    """Return a conversion that leaves None as it is."""
    return lambda value: None if value is None else convert(value)


def _struct(fields: Mapping[str, Conversion]) -> Conversion | None:
    if not fields:
        return None
    return _present(lambda value: {name: fields.get(name, _same)(each) for name, each in value.items()})


def _map(key: Conversion, item: Conversion) -> Conversion:
    return _present(lambda pairs: [(key(one), item(other)) for one, other in pairs])


def _tensor(kind: Any) -> Conversion:
    """Return the conversion of a tensor column, from a flat list to an array, with axes permuted as the type says; or
    to nested lists if an element is null."""
    shape, permutation = tuple(kind.shape), kind.permutation
    if permutation is not None and [permutation[number] for number in permutation] != sorted(permutation):
        # pyarrow 26 writes the inverse of what Arrow's specification says, and reads neither of the two.
        raise DatasetError(
            f"a tensor's permutation must be its own inverse, got {kind}. Leave the column out of `columns`"
        )
    dtype = np.dtype(kind.value_type.to_pandas_dtype())

    def shaped(values: Any) -> Any:
        is_whole = isinstance(values, np.ndarray) or None not in values
        flat = values if isinstance(values, np.ndarray) else np.array(values, dtype if is_whole else object)
        array = flat.reshape(shape)
        array = array if permutation is None else np.ascontiguousarray(array.transpose(permutation))
        return array if is_whole else array.tolist()

    return _present(shaped)


Value = Callable[[Any], Any]


def value_of(kind: Any) -> Value:
    return _fine(kind) or _as_py


def _as_py(scalar: Any) -> Any:
    return scalar.as_py()


def _fine(kind: Any) -> Value | None:
    """Return the conversion of times in nanoseconds, or of a nested type with them; None for any other type."""
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
        return _fine_map(keys or _as_py, values or _as_py) if keys or values else None
    if types.is_struct(kind):
        fields = {kind.field(i).name: _fine(kind.field(i).type) for i in range(kind.num_fields)}
        return _fine_struct({name: fine or _as_py for name, fine in fields.items()}) if any(fields.values()) else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _fine(kind.value_type)
        return inner and (lambda scalar: [inner(each) for each in scalar.values] if scalar.is_valid else None)
    return None


def _fine_struct(fields: dict[str, Value]) -> Value:
    return lambda scalar: {name: fields[name](scalar[name]) for name in fields} if scalar.is_valid else None


def _fine_map(key: Value, value: Value) -> Value:
    def pairs(scalar: Any) -> list[tuple[Any, Any]] | None:
        # The result is that of pyarrow's own conversion of a map. `scalar.values` is an array of structs.
        return [(key(each[0]), value(each[1])) for each in scalar.values] if scalar.is_valid else None

    return pairs
