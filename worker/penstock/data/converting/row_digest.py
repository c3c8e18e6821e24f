"""Digest of rows that depends on their values, and not on the format that they were read from.

Readers of formats return a value in different types. Here these are equal: arrays, lists and tuples of the same values;
numbers of different widths; numpy's scalars and Python's; decimals such as 1.0 and 1.00; in arrays and lists of
integers numbers from 2^63 on and the negative ones with the same 64 bits. All else differs: an integer from a float,
None from an empty value, text from bytes, and columns of different names.
"""

from __future__ import annotations

import datetime
import decimal
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from penstock.proto.errors import DatasetError

_HEAD = struct.Struct("<cQ").pack
_FLOAT = struct.Struct("<d").pack
_NAN = _FLOAT(float("nan"))
_TIMES = (datetime.datetime, datetime.date, datetime.time)


class RowDigest:
    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self.rows = 0

    def add(self, row: Mapping[str, Any]) -> int:
        """Add a row, in any order of columns; return about its bytes. Raises DatasetError for an unknown type."""
        parts = []
        for name in sorted(row):
            try:
                parts += [_tagged(b"c", name.encode()), value_bytes(row[name])]
            except (TypeError, ValueError, RecursionError) as error:
                raise DatasetError(f"column {name!r}: {error}. Leave the column out of `columns`") from None
        data = b"".join(parts)
        self._digest.update(_tagged(b"r", data))
        self.rows += 1
        return len(data)

    def hexdigest(self) -> str:
        """Return the digest of all rows so far, as 32 hexadecimal digits."""
        return self._digest.hexdigest()


def value_bytes(value: Any) -> bytes:
    """Return the same bytes for values that count as equal, others for others. Raise TypeError for an unknown type."""
    if value is None:
        return b"0"
    if isinstance(value, np.generic):
        return _of_numpy_scalar(value)
    if isinstance(value, np.ndarray):
        return _of_array(value)
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        return _tagged(b"i", str(value).encode())
    if isinstance(value, float):
        return b"f" + (_FLOAT(value) if value == value else _NAN)
    if isinstance(value, str):
        return _tagged(b"s", value.encode(errors="surrogatepass"))
    if isinstance(value, bytes | bytearray | memoryview):
        return _tagged(b"b", bytes(value))
    if isinstance(value, Mapping):
        items = sorted((value_bytes(key), value_bytes(each)) for key, each in value.items())
        return _tagged(b"m", b"".join(part for item in items for part in item))
    if isinstance(value, list | tuple):
        return _of_list(value)
    return _of_other(value)


def _tagged(tag: bytes, data: bytes) -> bytes:
    return _HEAD(tag, len(data)) + data


def _of_numpy_scalar(value: np.generic) -> bytes:
    if isinstance(value, np.datetime64 | np.timedelta64):
        return _tagged(b"t", f"{value.dtype.kind}{value.astype(f'{value.dtype.kind}8[ns]').astype(np.int64)}".encode())
    return value_bytes(value.item())


def _of_array(value: np.ndarray[Any, Any]) -> bytes:
    if not value.size and value.ndim <= 1:
        return _tagged(b"l", b"")
    if value.ndim != 1:
        return value_bytes(value.item()) if not value.ndim else _of_items(list(value))
    if value.dtype.kind in "iu":
        return _tagged(b"I", value.astype(np.int64).tobytes())
    if value.dtype.kind == "f":
        floats = value.astype(np.float64)
        floats[np.isnan(floats)] = np.nan
        return _tagged(b"D", floats.tobytes())
    return _of_items(value.tolist() if value.dtype.kind == "b" else list(value))


def _of_list(value: Sequence[Any]) -> bytes:
    kinds = {type(each) for each in value}
    if kinds == {int} and all(-(1 << 63) <= each < 1 << 64 for each in value):
        return _of_array(np.array([each if each < 1 << 63 else each - (1 << 64) for each in value], np.int64))
    return _of_array(np.array(value)) if kinds == {float} else _of_items(value)


def _of_items(value: Sequence[Any]) -> bytes:
    return _tagged(b"l", b"".join(map(value_bytes, value)))


def _of_other(value: Any) -> bytes:
    if isinstance(value, _TIMES):
        moment = value
        if isinstance(value, datetime.datetime) and value.tzinfo is not None:
            moment = value.astimezone(datetime.UTC)
        return _tagged(b"t", f"{type(value).__name__}{moment.isoformat()}".encode())
    if isinstance(value, datetime.timedelta):
        return _tagged(b"t", repr(value).encode())
    if isinstance(value, decimal.Decimal):
        return _tagged(b"d", str(value.normalize()).encode())
    if hasattr(value, "mode") and hasattr(value, "tobytes") and hasattr(value, "size"):  # an image of Pillow
        return _tagged(b"p", f"{value.mode} {value.size} ".encode() + value.tobytes())
    raise TypeError(f"the value must have a type that can be converted, got {type(value).__name__}")
