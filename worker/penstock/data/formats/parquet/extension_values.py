"""Values of Arrow's extension types. A value of an extension type is stored as a value of another type (its storage).

The types that Arrow itself defines are read as what they mean: a fixed-shape tensor is a numpy array of its shape, a
bool8 is a bool, and a UUID is its text, because batches hold no UUIDs. Values of all other extension types are the
stored ones, whether or not some package has registered the type: the values must not depend on what was imported.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Meaning", "is_extension", "meaning_of"]


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Meaning:
    """Functions that convert the stored values of an extension type to the values in samples. Nulls stay None."""

    value: Callable[[Any], Any]
    """Function that converts one stored value."""
    array: Callable[[Any], Any]
    """Function that converts an array of the stored values of several rows."""

    def one(self, stored: Any) -> Any:
        return None if stored is None else self.value(stored)

    def many(self, stored: Any) -> Any:
        """Return the converted values of an array, or of a list, of stored values, in the same form."""
        return self.array(stored) if isinstance(stored, np.ndarray) else [self.one(value) for value in stored]


def is_extension(kind: Any) -> bool:
    """Return True if a type of pyarrow is an extension type."""
    return hasattr(kind, "storage_type")


def meaning_of(kind: Any) -> Meaning:
    """Return the functions that convert the stored values of an extension type."""
    match kind.extension_name:
        case "arrow.fixed_shape_tensor":
            return _tensors(tuple(kind.shape), kind.permutation, np.dtype(kind.value_type.to_pandas_dtype()))
        case "arrow.bool8":
            return Meaning(bool, lambda stored: stored.astype(np.bool_))
        case "arrow.uuid":
            return Meaning(lambda stored: str(uuid.UUID(bytes=stored)), _unchanged)
        case _:
            return Meaning(_unchanged, _unchanged)


def _tensors(shape: tuple[int, ...], permutation: list[int] | None, dtype: np.dtype[Any]) -> Meaning:
    """Return the functions for tensors that are stored as flat lists in the order of `shape`. The tensors' axes are
    then taken in the order of `permutation`."""
    axes = tuple(permutation or range(len(shape)))

    def value(stored: Any) -> Any:
        kept = stored if isinstance(stored, np.ndarray) else np.array(stored, object if None in stored else dtype)
        return np.ascontiguousarray(kept.reshape(shape).transpose(axes))

    def array(stored: Any) -> Any:
        shaped = stored.reshape(len(stored), *shape).transpose(0, *(axis + 1 for axis in axes))
        return np.ascontiguousarray(shaped)

    return Meaning(value, array)
