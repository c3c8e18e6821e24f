"""Compressed files, by mosaicml-streaming's names of compressions: "zstd", "gz:6", "br" and so on. The caller of
`unpack` passes the largest size of the result, because a few packed bytes can expand to gigabytes. The package cramjam
is imported on demand, because most datasets are not compressed."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np

from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError


class FileCompression(NamedTuple):
    family: str
    """Also the extension of compressed files' names."""
    level: int
    """0 for snappy, which has no levels."""


class _Family(NamedTuple):
    module: str
    """Module of cramjam."""
    default: int
    levels: range


COMPRESSIONS = {
    "br": _Family("brotli", 11, range(12)),
    "bz2": _Family("bzip2", 9, range(1, 10)),
    "gz": _Family("gzip", 9, range(10)),
    "snappy": _Family("snappy", 0, range(0)),
    "zstd": _Family("zstd", 3, range(1, 23)),
}


def parse_compression(name: str) -> FileCompression:
    """Raises InvalidArgumentError for an unknown name."""
    family, colon, level = name.partition(":")
    known = COMPRESSIONS.get(family)
    if known is None:
        raise InvalidArgumentError(f"the compression must be one of {', '.join(COMPRESSIONS)} or none, got {name!r}")
    if not colon:
        return FileCompression(family, known.default)
    if not known.levels:
        raise InvalidArgumentError(f"compression {name!r}: {family} has no levels. Use {family!r}")
    if not (level.isascii() and level.isdigit() and len(level) <= 2 and int(level) in known.levels):
        levels = f"{known.levels[0]} to {known.levels[-1]}"
        raise InvalidArgumentError(f"compression {name!r}: the level of {family} must be {levels}, got {level!r}")
    return FileCompression(family, int(level))


def extension_of(compression: str) -> str:
    return parse_compression(compression).family


def pack(data: bytes, compression: str) -> bytes:
    """The same data always give the same bytes: a gzip header contains no time."""
    family, level = parse_compression(compression)
    codec = _codec(family)
    return bytes(codec.compress_raw(data) if family == "snappy" else codec.compress(data, level))


def unpack(data: bytes, compression: str, *, limit: int) -> memoryview:
    """Decompress. Raises ShardCorruptError for more than `limit` bytes, and for damaged data."""
    family = parse_compression(compression).family
    codec = _codec(family)
    decompress_into = codec.decompress_raw_into if family == "snappy" else codec.decompress_into
    try:
        unpacked = np.empty(limit, np.uint8)  # takes memory only for the bytes that are written
        return unpacked.data[: decompress_into(data, unpacked)]
    except (importlib.import_module("cramjam").DecompressionError, MemoryError) as error:
        raise ShardCorruptError(
            f"the {family} data are damaged, or decompress to more than the {limit} bytes that the dataset's index "
            f"lists: {error}. Fetch the file again, or index the folder again"
        ) from error


def _codec(family: str) -> Any:
    try:
        return getattr(importlib.import_module("cramjam"), COMPRESSIONS[family].module)
    except ImportError as error:
        raise DatasetError(
            f"shards compressed with {family} need the package cramjam. Run pip install 'penstock[streaming]'"
        ) from error
