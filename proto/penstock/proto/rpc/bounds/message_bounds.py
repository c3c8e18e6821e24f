"""Limit on the number of fields in a message, counted before it is parsed, at all levels that can have repeated fields.

A field of two bytes becomes an object of a hundred or more: 4 MiB of empty reports took 400 MiB and blocked the
coordinator's event loop for nine seconds, in which every lease expired."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from penstock.proto.errors import SAME_RELEASE, InvalidArgumentError, OverloadedError, malformed
from penstock.proto.v1 import coordinator_pb2

REQUEST_FIELDS = 16_384
"""Largest number of fields in a request: 1,024 reports of slots, 256 positions. Up to 10 ms of the event loop."""
LEVELS = 8
"""Levels of nested messages in which fields are counted. Penstock's messages have four."""

SMALL_REQUEST = 64 << 10
"""Bytes up to which a request does not count as large: gRPC itself takes about as much for any request."""
LARGE_REQUESTS = 128 << 20
"""Bytes of all large requests of one token that are being answered at a time."""

M = TypeVar("M", bound=Message)
C = TypeVar("C")
_Table = dict[int, "Descriptor | None"]


class _TooMany(Exception):
    pass


@cache
def _holds_repeated(kind: Descriptor) -> bool:
    return bool(_levels(kind)) or any(field.is_repeated for field in kind.fields)


@cache
def _levels(kind: Descriptor) -> _Table:
    """Field number -> message type, for fields that hold messages with repeated fields, which are counted too."""
    inner = {
        field.number: field.message_type
        for field in kind.fields
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not kind
    }
    counted: _Table = {number: child for number, child in inner.items() if _holds_repeated(child)}
    itself: _Table = {field.number: kind for field in kind.fields if field.message_type is kind}
    return counted | itself


def check_fields(data: bytes, kind: Descriptor, most: int) -> None:
    """Raise InvalidArgumentError if a message has more than `most` fields. Malformed bytes are left to the parser."""
    if len(data) // 2 <= most:
        return
    try:
        _counted(data, 0, len(data), kind, most, LEVELS)
    except IndexError:
        return
    except _TooMany:
        raise InvalidArgumentError(f"a message {kind.name} must have at most {most} fields in all, got more") from None


def _counted(data: bytes, pos: int, end: int, kind: Descriptor, left: int, levels: int) -> int:
    """Count fields. Return how many of `left` remain. Raises _TooMany, and IndexError for malformed bytes."""
    inner = _levels(kind)
    if not levels:
        raise _TooMany
    while pos < end:
        left -= 1
        if left < 0:
            raise _TooMany
        tag, pos = _varint(data, pos)
        match tag & 7:
            case 2:
                length, pos = _varint(data, pos)
                child = inner.get(tag >> 3)
                if child is not None:
                    left = _counted(data, pos, min(end, pos + length), child, left, levels - 1)
                pos += length
            case 0:
                _, pos = _varint(data, pos)
            case 1:
                pos += 8
            case 5:
                pos += 4
            case 3 | 4:
                raise _TooMany  # a group: Penstock's messages have none, and its fields would not be counted
            case _:
                raise IndexError  # an invalid wire type, at which the parser stops too
    return left


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    value = data[pos]
    if value < 128:
        return value, pos + 1
    value &= 127
    for shift in range(7, 70, 7):
        pos += 1
        byte = data[pos]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, pos + 1
    raise IndexError  # more bytes than any number has


_METHODS = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name


def parsed_request(method: str, parse: Callable[[bytes], Any], data: bytes) -> Any:
    """Return a parsed request. Raises InvalidArgumentError for one that no program of Penstock sends. Unknown fields
    are dropped, because no limit counts them, and a stored request would keep them."""
    try:
        if method in _METHODS:
            check_fields(data, _METHODS[method].input_type, REQUEST_FIELDS)
        request = parse(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"a request of {method} cannot be decoded. {SAME_RELEASE}") from error
    request.DiscardUnknownFields()
    return request


async def parsed_parts(
    method: str, parse: Callable[[bytes], Any], parts: AsyncIterator[bytes], first: Callable[[int], None]
) -> AsyncIterator[Any]:
    """Yield the parsed parts of a streamed request. `first`: called with the size of the first part: only this one
    stays in memory, and counts as a large request."""
    begun = False
    async for part in parts:
        if not begun:
            first(len(part))
            begun = True
        yield parsed_request(method, parse, part)


class LargeRequests:
    """Counter of the bytes of large requests, for each token. A long poll keeps its request in memory."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def answering(self, token: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts one request until the block ends. It raises OverloadedError above
        LARGE_REQUESTS."""
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            if size <= SMALL_REQUEST:
                return
            if self._bytes[token] + size > LARGE_REQUESTS:
                raise OverloadedError(f"large requests of one token may have {LARGE_REQUESTS} bytes at a time")
            self._bytes[token] += size
            counted += size

        try:
            yield count
        finally:
            self._bytes[token] -= counted
            if self._bytes[token] <= 0:
                del self._bytes[token]


def owned(message: M) -> M:
    """Copy of a message that is part of another one, whose whole memory the part itself would keep."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def parsed_reply(method: str, data: bytes) -> Any:
    try:
        return GetMessageClass(_METHODS[method].output_type).FromString(data)
    except DecodeError as error:
        raise malformed(f"a reply of {method} cannot be decoded ({error})") from error


class _BytesChannel:
    """Channel for the generated stub that returns replies as bytes. gRPC itself would return None for a reply that
    cannot be parsed."""

    def __init__(self, channel: Any) -> None:
        for kind in ("unary_unary", "unary_stream", "stream_unary"):
            setattr(self, kind, partial(self._call, getattr(channel, kind)))

    @staticmethod
    def _call(make: Any, path: str, *, response_deserializer: Any, **more: Any) -> Any:
        return make(path, response_deserializer=None, **more)


def bytes_channel(channel: C) -> C:
    return cast(C, _BytesChannel(channel))
