"""tf.train.Example, decoded by protobuf without TensorFlow.

    Example {features = 1}    Features {repeated entries = 1}    Entry {key = 1, value = 2}
    Feature {one of: bytes = 1, floats = 2, integers = 3}        List {repeated value = 1}

TensorFlow declares the entries as a map; a list of the same bytes keeps their order. A list of floats stays
bytes: numpy reads a long one in a twentieth of protobuf's time. A feature's type depends only on its stored kind: a
list of bytes, an array of float32 or of int64, also for one value or none.
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

_ONE, _MANY = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.LABEL_REPEATED
_BYTES, _TEXT = FieldDescriptorProto.TYPE_BYTES, FieldDescriptorProto.TYPE_STRING
_MESSAGES: dict[str, list[tuple[str, Any, Any]]] = {
    "BytesList": [("value", _MANY, _BYTES)],
    "FloatList": [("value", _MANY, FieldDescriptorProto.TYPE_FLOAT)],
    "Int64List": [("value", _MANY, FieldDescriptorProto.TYPE_INT64)],
    "Feature": [("bytes", _ONE, "BytesList"), ("floats", _ONE, _BYTES), ("integers", _ONE, "Int64List")],
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
    return np.array(feature.integers.value, np.int64) if kind == "integers" else None


def _floats(data: bytes) -> np.ndarray[Any, Any]:
    values = _packed_values(data)
    if values is not None and len(values) % 4 == 0:
        return np.frombuffer(values, "<f4").copy()
    return np.array(_CLASS["FloatList"].FromString(data).value, np.float32)


def _packed_values(data: bytes) -> memoryview | None:
    """Return a list's packed values; None if they are stored one by one, or in several pieces."""
    length = 0
    for place, octet in enumerate(data[1:6]):
        length |= (octet & 127) << 7 * place
        if octet < 128:
            begin = place + 2
            return memoryview(data)[begin:] if data[0] == 10 and begin + length == len(data) else None
    return None
