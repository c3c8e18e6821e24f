"""Compressed files, by the names that mosaicml-streaming gives to compressions: "zstd", "gz:6", "br" and so on.

Whoever unpacks says how many bytes may come out, for a few packed bytes can claim to be many: nothing here allocates
much more than that. The libraries are imported when they are first needed, as most datasets need one of them or none.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from penstock.proto.errors import DatasetError, ShardCorruptError

__all__ = ["COMPRESSIONS", "FileCompression", "extension_of", "pack", "parse_compression", "unpack"]


class FileCompression(NamedTuple):
    family: str
    """Also the extension of packed files."""
    level: int
    """0 for snappy, which has none."""


class _Family(NamedTuple):
    package: str
    """What to import; "" for what Python brings along."""
    default: int
    levels: range


COMPRESSIONS = {
    "br": _Family("brotli", 11, range(12)),
    "bz2": _Family("", 9, range(1, 10)),
    "gz": _Family("", 9, range(10)),
    "snappy": _Family("snappy", 0, range(0)),
    "zstd": _Family("zstandard", 3, range(1, 23)),
}

FIRST_PIECE, LARGEST_PIECE = 1 << 8, 1 << 24
"""Bytes of a member that are given at a time, twice as many each time. What is left of a piece where the member ends is
copied: 20 bytes are a member, and a file of nothing but such would else take a time that grows with its square."""
_ZEROS = re.compile(rb"\0*")
ZSTD_PIECE = 1 << 10
"""Bytes given at a time to a zstd frame that does not say its length: one of them becomes 32 KiB at the worst."""


def parse_compression(name: str) -> FileCompression:
    """What a name of a compression means. Raises DatasetError if it means nothing."""
    family, colon, level = name.partition(":")
    known = COMPRESSIONS.get(family)
    if known is None:
        raise DatasetError(f"unknown compression {name!r}; there are {', '.join(sorted(COMPRESSIONS))}")
    if not colon:
        return FileCompression(family, known.default)
    if not known.levels:
        raise DatasetError(f"compression {name!r}: {family} has no levels")
    if not (level.isascii() and level.isdigit() and len(level) <= 2 and int(level) in known.levels):
        levels = f"{known.levels[0]} to {known.levels[-1]}"
        raise DatasetError(f"compression {name!r}: the levels of {family} are {levels}")
    return FileCompression(family, int(level))


def extension_of(compression: str) -> str:
    """Of a packed file's name, without the dot."""
    return parse_compression(compression).family


def pack(data: bytes, compression: str) -> bytes:
    """`data`, compressed. The same bytes every time: a gzip header could hold the time, and ours does not."""
    family, level = parse_compression(compression)
    match family:
        case "br":
            packed = _library(family).compress(data, quality=level)
        case "bz2":
            packed = bz2.compress(data, level)
        case "gz":
            packed = gzip.compress(data, level, mtime=0)
        case "snappy":
            packed = _library(family).compress(data)
        case _:
            packed = _library(family).ZstdCompressor(level=level).compress(data)
    return bytes(packed)


def unpack(data: bytes, compression: str, *, limit: int) -> bytes:
    """What was packed, at most `limit` bytes. Raises ShardCorruptError for more, and for broken data."""
    family = parse_compression(compression).family
    return _UNPACKERS[family](data, limit)


def _library(family: str) -> Any:
    package = COMPRESSIONS[family].package
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DatasetError(
            f"shards compressed with {family} need the package {package}: pip install 'penstock[streaming]'"
        ) from error


def _too_long(family: str, limit: int) -> ShardCorruptError:
    return ShardCorruptError(f"its {family} data hold more than {limit} bytes")


def _broken(family: str, why: object) -> ShardCorruptError:
    return ShardCorruptError(f"its {family} data are broken: {why}")


class _Member(Protocol):
    """What zlib and bz2 have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes: ...


def _members(family: str, make: Callable[[], _Member], data: bytes, limit: int) -> bytes:
    """Of gzip and bzip2 files, which may consist of several members, with zeros behind each."""
    parts: list[bytes] = []
    view, room, place = memoryview(data), limit, 0
    while True:
        member, size = make(), FIRST_PIECE
        while not member.eof:
            piece = view[place : place + size]
            if not piece:
                raise _broken(family, f"they end too early, after {len(data)} bytes")
            try:
                # One byte of room too many, so that a member that fills the room can still show its end.
                part = member.decompress(piece, room + 1)
            except (OSError, ValueError, zlib.error) as error:
                raise _broken(family, error) from error
            if len(part) > room:
                raise _too_long(family, limit)
            parts.append(part)
            room -= len(part)
            place += len(piece)
            size = min(2 * size, LARGEST_PIECE)
        after = _ZEROS.match(data, place - len(member.unused_data))
        assert after is not None  # it matches nothing, too
        place = after.end()
        if place == len(data):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _gz(data: bytes, limit: int) -> bytes:
    return _members("gz", lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), data, limit)


def _bz2(data: bytes, limit: int) -> bytes:
    return _members("bz2", bz2.BZ2Decompressor, data, limit)


def _br(data: bytes, limit: int) -> bytes:
    brotli = _library("br")
    stream = brotli.Decompressor()
    try:
        out = bytes(stream.process(data, output_buffer_limit=limit + 1))
        if len(out) > limit:
            raise _too_long("br", limit)
        if not stream.is_finished():
            raise _broken("br", f"they end too early, after {len(data)} bytes")
    except brotli.error as error:
        raise _broken("br", error) from error
    return out


def _snappy(data: bytes, limit: int) -> bytes:
    snappy = _library("snappy")
    # Its first bytes are the length, 7 bits each; the library allocates what they say before it looks further.
    size = shift = 0
    for byte in data[:5]:
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    else:
        raise _broken("snappy", "they have no length")
    if size > limit:
        raise _too_long("snappy", limit)
    try:
        return bytes(snappy.decompress(data))
    except Exception as error:  # the library's own kind is no public name in all versions
        raise _broken("snappy", error) from error


def _zstd(data: bytes, limit: int) -> bytes:
    zstandard = _library("zstd")
    try:
        size = zstandard.frame_content_size(data)
        if size > limit:
            raise _too_long("zstd", limit)
        if size >= 0:
            return bytes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))
        return _zstd_of_unknown_length(zstandard, data, limit)
    except zstandard.ZstdError as error:
        raise _broken("zstd", error) from error


def _zstd_of_unknown_length(zstandard: Any, data: bytes, limit: int) -> bytes:
    stream = zstandard.ZstdDecompressor().decompressobj()
    parts: list[bytes] = []
    room = limit
    for start in range(0, len(data), ZSTD_PIECE):
        if stream.eof:
            raise _broken("zstd", f"{len(data) - start} bytes follow them")
        part = stream.decompress(data[start : start + ZSTD_PIECE])
        room -= len(part)
        if room < 0:
            raise _too_long("zstd", limit)
        parts.append(part)
    if not stream.eof or stream.unused_data:
        why = "bytes follow them" if stream.eof else f"they end too early, after {len(data)} bytes"
        raise _broken("zstd", why)
    return b"".join(parts)


_UNPACKERS: dict[str, Callable[[bytes, int], bytes]] = {
    "br": _br,
    "bz2": _bz2,
    "gz": _gz,
    "snappy": _snappy,
    "zstd": _zstd,
}
