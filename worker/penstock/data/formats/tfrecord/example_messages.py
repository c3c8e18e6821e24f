"""tf.train.Example, decoded by protobuf without TensorFlow.

    Example {features = 1}    Features {repeated entries = 1}    Entry {key = 1, value = 2}
    Feature {one of: bytes = 1, floats = 2, integers = 3}        List {repeated value = 1}

TensorFlow declares the entries as a map; a list of the same bytes keeps their order. Lists of numbers stay bytes: numpy
decodes long ones in a fraction of protobuf's time. A feature's type depends only on its stored kind: a list of bytes,
an array of float32 or of int64, also for one value or none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.data.formats.fields import InvalidField

KINDS = ("example", "bytes")
"""Values of the setting `records`: tf.train.Example, or any bytes."""
LONG = 512
"""Size in bytes from which numpy decodes a packed list of integers."""

_ONE, _MANY = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.LABEL_REPEATED
_BYTES, _TEXT = FieldDescriptorProto.TYPE_BYTES, FieldDescriptorProto.TYPE_STRING
_MESSAGES: dict[str, list[tuple[str, Any, Any]]] = {
    "BytesList": [("value", _MANY, _BYTES)],
    "FloatList": [("value", _MANY, FieldDescriptorProto.TYPE_FLOAT)],
    "Int64List": [("value", _MANY, FieldDescriptorProto.TYPE_INT64)],
    "Feature": [("bytes", _ONE, "BytesList"), ("floats", _ONE, _BYTES), ("integers", _ONE, _BYTES)],
    "Entry": [("key", _ONE, _TEXT), ("value", _ONE, "Feature")],
    "Features": [("entries", _MANY, "Entry")],
    "Example": [("features", _ONE, "Features")],
}
"""Messages: (name, label, type) of each field, from number 1 on."""


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="example.proto", package="example", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, label, kind) in enumerate(fields, 1):
            made = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                made.type, made.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".example.{kind}"
            else:
                made.type = kind
            if name == "Feature":
                made.oneof_index = 0
        if name == "Feature":
            message.oneof_decl.add(name="kind")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"example.{name}")) for name in _MESSAGES}


_CLASS = _classes()


def example_of(data: bytes) -> dict[str, Any]:
    """Return the features: lists of bytes, arrays (values,) of float32 or int64, or None. Raises ValueError."""
    try:
        entries = _CLASS["Example"].FromString(data).features.entries
        return {entry.key: _value(entry.value) for entry in entries}
    except DecodeError as error:
        raise ValueError(str(error)) from None


def is_example(record: bytes) -> bool:
    """Return True for an Example with a feature. A SequenceExample (its second field has lists) does not count."""
    try:
        return bool(example_of(record)) and not len(UnknownFieldSet(_CLASS["Example"].FromString(record)))
    except ValueError:
        return False


def check_records(settings: dict[str, Any]) -> None:
    if settings.get("records") not in KINDS:
        raise InvalidField("records", f"must be one of {', '.join(KINDS)}, got {settings.get('records')!r:.100}")


def _value(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind == "bytes":
        return list(feature.bytes.value)
    if kind == "floats":
        return _floats(feature.floats)
    return _integers(feature.integers) if kind == "integers" else None


def _floats(data: bytes) -> np.ndarray[Any, Any]:
    values = _packed_values(data)
    if values is not None and len(values) % 4 == 0:
        return np.frombuffer(values, "<f4").copy()
    return np.array(_CLASS["FloatList"].FromString(data).value, np.float32)


def _integers(data: bytes) -> np.ndarray[Any, Any]:
    values = _packed_values(data) if len(data) >= LONG else None
    return np.array(_CLASS["Int64List"].FromString(data).value, np.int64) if values is None else _varints(values)


def _packed_values(data: bytes) -> memoryview | None:
    """Return a list's packed values; None if they are stored one by one, or in several pieces."""
    length = 0
    for place, octet in enumerate(data[1:6]):
        length |= (octet & 127) << 7 * place
        if octet < 128:
            begin = place + 2
            return memoryview(data)[begin:] if data[0] == 10 and begin + length == len(data) else None
    return None


def _varints(data: memoryview) -> np.ndarray[Any, Any]:
    """Return packed varints as int64: 7 bits in each byte, lowest first, the top bit set in all but the last."""
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
