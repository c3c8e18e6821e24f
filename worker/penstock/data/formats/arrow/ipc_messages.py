"""Messages of an Arrow IPC file, found without reading the data in them.

    stream: message * n [end]                    file: b"ARROW1\\0\\0" stream [footer] [size of the footer: 4] b"ARROW1"
    message: [0xFFFFFFFF: 4] [size of the metadata: 4] [metadata] [body]    (before Arrow 0.15 without 0xFFFFFFFF)

With the offsets of record batches, which pyarrow does not expose, parts of a file can be fetched alone. Metadata are a
flatbuffer: tables with numbered fields (Arrow's format/Message.fbs and File.fbs), each found by an offset, which is
checked, because the bytes may be damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Read = Callable[[int, int], bytes]
"""(begin, size) -> so many bytes of the file from there, or fewer at its end."""

MAGIC = b"ARROW1"
MAGIC_BYTES = 8
"""Bytes before the first message in Arrow's file format: MAGIC and two zeros."""
SCHEMA, DICTIONARY, BATCH = 1, 2, 3
"""Numbers by which Arrow marks the kind of a message."""
FIRST_READ = 4096
"""Bytes read at a message's beginning: enough for the metadata of most."""
MAX_METADATA = 256 << 20

_U16, _U32, _I32, _I64 = (struct.Struct(f"<{code}") for code in "HIiq")
_BLOCK = struct.Struct("<qi4xq")


@dataclass(frozen=True, slots=True)
class Message:
    """Kind, metadata and position of a message; offsets in bytes from the file's first."""

    kind: int
    begin: int
    metadata: bytes
    body: int
    """Offset of the first byte of the message's body."""
    body_size: int

    @property
    def end(self) -> int:
        return self.body + self.body_size


class _Table:
    """Table of a flatbuffer. Methods raise ValueError or struct.error for offsets outside of the metadata."""

    __slots__ = ("_data", "_fields", "_fields_size", "_position")

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position = data, position
        self._fields = position - _I32.unpack_from(data, position)[0]
        if not 0 <= self._fields <= len(data) - 4:
            raise ValueError("the metadata are damaged: a table lies outside of the metadata")
        self._fields_size: int = _U16.unpack_from(data, self._fields)[0]

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, _U32.unpack_from(data, 0)[0])

    def at(self, number: int) -> int:
        """Return the position of a field; 0 if it is absent and so has its default value."""
        place = 4 + 2 * number
        if place + 2 > self._fields_size:
            return 0
        offset: int = _U16.unpack_from(self._data, self._fields + place)[0]
        return self._position + offset if offset else 0

    def byte(self, number: int) -> int:
        at = self.at(number)
        return self._data[at] if 0 < at < len(self._data) else 0

    def number(self, number: int) -> int:
        at = self.at(number)
        return int(_I64.unpack_from(self._data, at)[0]) if at else 0

    def table(self, number: int) -> _Table:
        at = self.at(number)
        if not at:
            raise ValueError(f"the metadata are damaged: field {number} is missing")
        return _Table(self._data, at + _U32.unpack_from(self._data, at)[0])

    def vector(self, number: int, size: int) -> memoryview:
        """`size`: number of bytes of each element."""
        at = self.at(number)
        if not at:
            return memoryview(b"")
        at += _U32.unpack_from(self._data, at)[0]
        end = at + 4 + size * _U32.unpack_from(self._data, at)[0]
        if end > len(self._data):
            raise ValueError(f"the metadata are damaged: field {number} is longer than the metadata")
        return memoryview(self._data)[at + 4 : end]


def messages(read: Read, size: int) -> Iterator[Message]:
    """Yield a file's messages: those of a stream in order; of the file format the schema, then all dictionaries, then
    all record batches. Raises ValueError or struct.error for a damaged file."""
    if read(0, len(MAGIC)) == MAGIC:
        yield from _file_messages(read, size)
        return
    found = messages_between(read, 0, size)
    first = next(found, None)
    if first is None:
        raise ValueError("the file must have messages, but is empty")
    yield first
    yield from found


def messages_between(read: Read, begin: int, end: int) -> Iterator[Message]:
    """Raises ValueError or struct.error for a damaged file."""
    at = begin + (MAGIC_BYTES if begin == 0 and read(0, len(MAGIC)) == MAGIC else 0)
    while (message := _message(read, at, end)) is not None:
        yield message
        at = message.end


def rows_of_batch(metadata: bytes) -> tuple[int, bool]:
    """Return a record batch's rows, and True if it is compressed. Raises ValueError or struct.error."""
    batch = _Table.root(metadata).table(2)
    rows = batch.number(0)
    if rows < 0:
        raise ValueError(f"the metadata of a record batch are damaged: its number of rows is {rows}")
    return rows, bool(batch.at(3))


def _file_messages(read: Read, size: int) -> Iterator[Message]:
    tail = read(size - 10, 10) if size >= 18 else b""
    if tail[4:] != MAGIC:
        raise ValueError("the file must end with ARROW1, but it is truncated, or its writer was not closed")
    length = _I32.unpack_from(tail)[0]
    if not 0 < length <= size - 18:
        raise ValueError(f"the footer must have 1 to {size - 18} bytes, got {length}")
    footer = _Table.root(read(size - 10 - length, length))
    schema = _message(read, MAGIC_BYTES, size)
    if schema is None:
        raise ValueError("the file must begin with a schema, but has none")
    yield schema
    for kind, number in ((DICTIONARY, 2), (BATCH, 3)):
        for begin, _, _ in _BLOCK.iter_unpack(footer.vector(number, _BLOCK.size)):
            message = _message(read, begin, size) if begin > 0 else None
            if message is None or message.kind != kind:
                raise ValueError(f"the footer lists a message at byte {begin}, but none begins there")
            yield message


def _message(read: Read, begin: int, size: int) -> Message | None:
    if begin == size:
        return None  # writers may leave out the end marker
    head = read(begin, FIRST_READ)
    mark = 4 if head[:4] == b"\xff\xff\xff\xff" else 0
    length = _I32.unpack_from(head, mark)[0]
    if not length:
        return None
    at = begin + mark + 4
    if not 0 < length <= min(size - at, MAX_METADATA):
        raise ValueError(f"the message at byte {begin} is truncated or damaged: it has {length} bytes of metadata")
    metadata = head[mark + 4 : mark + 4 + length]
    if len(metadata) < length:
        metadata = read(at, length)
    message = _Table.root(metadata)
    body = message.number(3)
    if not 0 <= body <= size - at - length:
        raise ValueError(f"the message at byte {begin} is truncated or damaged: it has a body of {body} bytes")
    return Message(message.byte(1), begin, metadata, at + length, body)
