"""View of a user's state for people and for JSON, from which it cannot be loaded.

JSON has no tensors, bytes, tuples as keys or NaN. Such a value becomes an object whose key "$" names its type: {"$":
"tensor", "dtype": "int64", "shape": [3]} (with a "value" if it has no dimension), {"$": "bytes", "size": 5, "base64":
"aGVsbG8="}, {"$": "dict", "items": [[key, value], ...]}, {"$": "float", "value": "nan"}. Tuples become lists.
"""

from __future__ import annotations

import base64
import math
import reprlib
from collections.abc import Mapping
from typing import Any

BYTES_IN_FULL = 1024
"""Largest bytes value that is shown in full; of a longer one only the size."""


def as_json(value: Any) -> Any:
    """Return `value` for json.dumps, as any JSON reader can read it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$": "float", "value": str(value)}
    if isinstance(value, bytes | bytearray):
        data = base64.b64encode(value).decode() if len(value) <= BYTES_IN_FULL else None
        return {"$": "bytes", "size": len(value), "base64": data}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and "$" not in value:
            return {key: as_json(item) for key, item in value.items()}
        return {"$": "dict", "items": [[as_json(key), as_json(item)] for key, item in value.items()]}
    shape = _shape(value)
    if shape is not None:
        summary = {"$": _kind(value), "dtype": _dtype(value), "shape": shape}
        return summary if shape else {**summary, "value": as_json(value.item())}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"$": "set", "items": [as_json(item) for item in value]}
    return {"$": type(value).__name__, "text": str(value)}


class _Brief(reprlib.Repr):
    """One line for a state: names and small values in full, the rest as type and size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 48, 64
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 8

    def repr1(self, x: Any, level: int) -> str:
        shape = _shape(x)
        if shape is None:
            return super().repr1(x, level)
        return f"{_dtype(x)}[{', '.join(map(str, shape))}]" if shape else f"{x.item()!r} ({_dtype(x)})"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return f"{len(x)} bytes"


brief = _Brief().repr


def _shape(value: Any) -> list[int] | None:
    """Return the shape of a tensor, array or numpy scalar, from attributes: this module must not import torch."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return None if shape is None or dtype is None else [int(length) for length in shape]


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _kind(value: Any) -> str:
    return "tensor" if type(value).__module__.startswith("torch") else "array"
