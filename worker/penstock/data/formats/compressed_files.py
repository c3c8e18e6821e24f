"""Compressed files, by mosaicml-streaming's names of compressions: "zstd", "gz:6", "br" and so on. The caller of
`unpack` passes the largest size of the result, because a few packed bytes can expand to gigabytes; not much more is
allocated. The libraries are imported on demand, because most datasets need at most one."""

from __future__ import annotations

import bz2
import gzip
import importlib
import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

__all__ = ["COMPRESSIONS", "FileCompression", "extension_of", "pack", "parse_compression", "unpack"]


class FileCompression(NamedTuple):
    family: str
    """Also the extension of compressed files' names."""
    level: int
    """0 for snappy, which has no levels."""


class _Family(NamedTuple):
    package: str
    """Python module that compresses; "" if it is in the standard library."""
    default: int
    levels: range


COMPRESSIONS = {
    "br": _Family("brotli", 11, range(12)),
    "bz2": _Family("", 9, range(1, 10)),
    "gz": _Family("", 9, range(10)),
    "snappy": _Family("cramjam", 0, range(0)),
    "zstd": _Family("zstandard", 3, range(1, 23)),
}

FIRST_PIECE, LARGEST_PIECE = 1 << 8, 1 << 24
"""Compressed bytes per call of a decompressor: at first, doubled with each call, at most. The bytes after a member's
end are copied, so with large pieces a file of many 20-byte members would take quadratic time."""
_ZEROS = re.compile(rb"\0*")
ZSTD_PIECE = 1 << 10
"""Compressed bytes per call, for a zstd file of unknown length. One may expand to 32 KiB."""


def parse_compression(name: str) -> FileCompression:
    """Raises InvalidArgumentError for an unknown name."""
    family, colon, level = name.partition(":")
    known = COMPRESSIONS.get(family)
    if known is None:
        raise InvalidArgumentError(
            f"the compression must be one of {', '.join(sorted(COMPRESSIONS))}, got {name!r}. Pass one of these, or "
            "none"
        )
    if not colon:
        return FileCompression(family, known.default)
    if not known.levels:
        raise InvalidArgumentError(f"compression {name!r}: {family} has no levels. Use {family!r}")
    if not (level.isascii() and level.isdigit() and len(level) <= 2 and int(level) in known.levels):
        levels = f"{known.levels[0]} to {known.levels[-1]}"
        raise InvalidArgumentError(
            f"compression {name!r}: the level of {family} must be {levels}, got {level!r}. Pass a level in this range"
        )
    return FileCompression(family, int(level))


def extension_of(compression: str) -> str:
    return parse_compression(compression).family


def pack(data: bytes, compression: str) -> bytes:
    """The same data always give the same bytes: a gzip header contains no time."""
    family, level = parse_compression(compression)
    match family:
        case "br":
            packed = _library(family).compress(data, quality=level)
        case "bz2":
            packed = bz2.compress(data, level)
        case "gz":
            packed = gzip.compress(data, level, mtime=0)
        case "snappy":
            packed = _library(family).snappy.compress_raw(data)
        case _:
            packed = _library(family).ZstdCompressor(level=level).compress(data)
    return bytes(packed)


def unpack(data: bytes, compression: str, *, limit: int) -> bytes:
    """Decompress. Raises ShardCorruptError for more than `limit` bytes, and for damaged data."""
    family = parse_compression(compression).family
    return _UNPACKERS[family](data, limit)


def _library(family: str) -> Any:
    package = COMPRESSIONS[family].package
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DatasetError(
            f"shards compressed with {family} need the package {package}. Run pip install 'penstock[streaming]'"
        ) from error


def _too_long(family: str, limit: int) -> ShardCorruptError:
    return ShardCorruptError(
        f"the {family} data must decompress to at most {limit} bytes, as the dataset's index lists, got more. "
        "Fetch the file again, or index the folder again"
    )


def _broken(family: str, why: object) -> ShardCorruptError:
    return ShardCorruptError(f"the {family} data are damaged: {why}. Fetch the file again")


class _Member(Protocol):
    """Decompressor of zlib or bz2, for one member (stream) of a file."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes: ...


def _members(family: str, make: Callable[[], _Member], data: bytes, limit: int) -> bytes:
    """Decompress a gzip or bzip2 file of one or several members, with zeros after each."""
    parts: list[bytes] = []
    view, left, at = memoryview(data), limit, 0
    while True:
        member, size = make(), FIRST_PIECE
        while not member.eof:
            piece = view[at : at + size]
            if not piece:
                raise _broken(family, f"they end too early, after {len(data)} bytes")
            try:
                # One byte more than the limit leaves, so that a member that fills the limit can still reach its end.
                part = member.decompress(piece, left + 1)
            except (OSError, ValueError, zlib.error) as error:
                raise _broken(family, error) from error
            if len(part) > left:
                raise _too_long(family, limit)
            parts.append(part)
            left -= len(part)
            at += len(piece)
            size = min(2 * size, LARGEST_PIECE)
        after = _ZEROS.match(data, at - len(member.unused_data))
        assert after is not None  # never None: the pattern also matches an empty text
        at = after.end()
        if at == len(data):
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
    cramjam = _library("snappy")
    try:
        # A snappy file begins with its length, for which the library allocates memory before it reads on.
        if cramjam.snappy.decompress_raw_len(data) > limit:
            raise _too_long("snappy", limit)
        return bytes(cramjam.snappy.decompress_raw(data))
    except cramjam.DecompressionError as error:
        raise _broken("snappy", str(error) or "they do not decompress") from error


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
    left = limit
    for start in range(0, len(data), ZSTD_PIECE):
        if stream.eof:
            raise _broken("zstd", f"{len(data) - start} bytes follow their end")
        part = stream.decompress(data[start : start + ZSTD_PIECE])
        left -= len(part)
        if left < 0:
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
