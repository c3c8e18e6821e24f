"""Values of Arrow's extension types, which are stored as values of another type.

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
    """Functions from stored values of an extension type to values of a sample. Nulls stay None."""

    value: Callable[[Any], Any]
    """Function from a stored value to its meaning."""
    array: Callable[[Any], Any]
    """Function from an array of the stored values of several rows to an array of their meanings."""

    def one(self, stored: Any) -> Any:
        return None if stored is None else self.value(stored)

    def many(self, stored: Any) -> Any:
        """Return the meanings of an array, or of a list, of stored values, in the same form."""
        return self.array(stored) if isinstance(stored, np.ndarray) else [self.one(value) for value in stored]


def is_extension(kind: Any) -> bool:
    """Return True for an extension type of pyarrow."""
    return hasattr(kind, "storage_type")


def meaning_of(kind: Any) -> Meaning:
    """Return what the stored values of an extension type mean."""
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
    """Return the meaning of tensors that are stored as flat lists in the order of `shape`, whose axes are then taken in
    the order of `permutation`."""
    axes = tuple(permutation or range(len(shape)))

    def value(stored: Any) -> Any:
        kept = stored if isinstance(stored, np.ndarray) else np.array(stored, object if None in stored else dtype)
        return np.ascontiguousarray(kept.reshape(shape).transpose(axes))

    def array(stored: Any) -> Any:
        shaped = stored.reshape(len(stored), *shape).transpose(0, *(axis + 1 for axis in axes))
        return np.ascontiguousarray(shaped)

    return Meaning(value, array)
