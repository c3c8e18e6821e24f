"""tf.train.Example, decoded without TensorFlow.

An Example is a protobuf message: a map from names to features, each of which is a list of bytes, of floats or of
integers. Only these few messages are read here, by their wire format; unknown fields are skipped. The type of a feature
depends only on its stored kind: bytes become a list, floats an array of float32, integers an array of int64, also if
the feature has one value or no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.data.formats.fields import InvalidField

__all__ = ["check_records", "example_of", "is_example"]

KINDS = ("example", "bytes")
"""Allowed values of the setting `records`: tf.train.Example, or any bytes."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Numbers by which protobuf marks how the value of a field is stored (wire types)."""
SHORT = 16
"""Largest size in bytes of a packed list of integers that is decoded integer by integer; numpy decodes longer lists."""


def example_of(data: bytes) -> dict[str, Any]:
    """Return the features of a serialized Example by name: lists of bytes, arrays of float32 of shape (values,), or
    arrays of int64 of shape (values,); None for a feature without any of these lists. Raises ValueError if the bytes
    are not an Example."""
    sample: dict[str, Any] = {}
    view = memoryview(data)
    for number, kind, features in _fields(view):
        if number != 1 or kind != LENGTH:
            continue
        for field, wire, entry in _fields(features):
            if field == 1 and wire == LENGTH:
                name, value = _entry(entry)
                sample[name] = value
    return sample


def is_example(record: bytes) -> bool:
    """Return True if the bytes of a record are an Example with at least one feature. A SequenceExample (its second
    field has lists of features) does not count."""
    try:
        return bool(example_of(record)) and all(number == 1 for number, _, _ in _fields(memoryview(record)))
    except ValueError:
        return False


def check_records(settings: dict[str, Any]) -> None:
    """Check the setting `records` of a shard in the dataset's index: the kind of its records. Raises InvalidField."""
    if settings.get("records") not in KINDS:
        raise InvalidField("records", f"must be one of {', '.join(KINDS)}, got {settings.get('records')!r:.100}")


def _entry(entry: memoryview) -> tuple[str, Any]:
    name, value = "", None
    for number, kind, data in _fields(entry):
        if number == 1 and kind == LENGTH:
            name = str(data, "utf-8")
        elif number == 2 and kind == LENGTH:
            value = _feature(data)
    return name, value


def _feature(feature: memoryview) -> Any:
    """Return the values of a feature. If the message has lists of several kinds, the last list counts, as protobuf
    requires."""
    value: Any = None
    for number, kind, values in _fields(feature):
        if kind == LENGTH and number == 1:
            value = [bytes(each) for field, wire, each in _fields(values) if field == 1 and wire == LENGTH]
        elif kind == LENGTH and number == 2:
            value = _numbers(values, FIXED32)
        elif kind == LENGTH and number == 3:
            value = _numbers(values, VARINT)
    return value


def _numbers(values: memoryview, plain: int) -> np.ndarray[Any, Any]:
    """Return the floats (`plain` is FIXED32) or integers (`plain` is VARINT) of a list, whether it is packed or not."""
    parts: list[np.ndarray[Any, Any]] = []
    for number, kind, data in _fields(values):
        if number != 1:
            continue
        if kind == LENGTH and plain == FIXED32:
            if len(data) % 4:
                raise ValueError("a list of floats must have a multiple of 4 bytes")
            parts.append(np.frombuffer(data, "<f4"))
        elif kind == LENGTH:
            parts.append(_packed(data))
        elif kind == plain == FIXED32:
            parts.append(np.frombuffer(data, "<f4"))
        elif kind == plain:
            parts.append(_packed(data))
    if len(parts) == 1:
        return parts[0].copy()
    return np.concatenate(parts) if parts else np.zeros(0, np.float32 if plain == FIXED32 else np.int64)


def _packed(data: memoryview) -> np.ndarray[Any, Any]:
    """Return the integers in packed varints, as int64. A varint has 7 bits of its number in each byte, the lowest bits
    first, and the top bit set in all but its last byte."""
    if len(data) <= SHORT:
        few, at = [], 0
        while at < len(data):
            value, at = _varint(data, at)
            few.append(value - (1 << 64) if value >> 63 else value)
        return np.array(few, np.int64)
    octets = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(octets < 128)
    if len(last) == len(octets):
        return octets.astype(np.int64)
    if not len(last) or last[-1] != len(octets) - 1:
        raise ValueError("an integer is truncated")
    sizes: np.ndarray[Any, Any] = np.empty(len(last), np.uint16 if len(octets) < 1 << 16 else np.int64)
    sizes[0], sizes[1:] = last[0] + 1, last[1:] - last[:-1]
    longest = int(sizes.max())
    if longest > 10:
        raise ValueError("an integer has more than 10 bytes")
    kind = np.dtype(np.uint32 if longest <= 4 else np.uint64)  # 28 bits fit into 32, which takes half the time
    values: np.ndarray[Any, Any] = octets[last].astype(kind)
    low = octets & 127
    for place in range(1, longest):  # from the highest bits down
        longer = values << 7
        longer |= low[last - place]
        np.copyto(values, longer, where=sizes > place)
    integers: np.ndarray[Any, Any] = values.astype(np.int64)
    return integers


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield (number, wire type, bytes of the value) for each field of a message. Raises ValueError for a damaged
    message."""
    at, size = 0, len(message)
    while at < size:
        key, at = _varint(message, at)
        kind = key & 7
        if kind == LENGTH:
            length, at = _varint(message, at)
            end = at + length
        elif kind == VARINT:
            _, end = _varint(message, at)
        elif kind in (FIXED32, FIXED64):
            end = at + (4 if kind == FIXED32 else 8)
        else:
            raise ValueError(f"wire type {kind} is unknown")
        if end > size or not key >> 3:
            raise ValueError("a field of the message is truncated or has number 0")
        yield key >> 3, kind, message[at:end]
        at = end


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the 64-bit integer that begins at byte `at`, and the offset of the byte after it. Raises ValueError if it
    is damaged."""
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise ValueError("an integer is truncated")
        octet = data[at]
        at += 1
        value |= (octet & 127) << shift
        if octet < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise ValueError("an integer has more than 10 bytes")
