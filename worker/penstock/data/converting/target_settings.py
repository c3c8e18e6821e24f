"""Settings of the files of a conversion's result, checked before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from penstock.data.arguments import byte_count, one_of
from penstock.data.cache.file_hashes import digest_of
from penstock.data.converting.argument_names import ArgumentNames
from penstock.data.formats.compressed_files import parse_compression
from penstock.data.formats.format_table import MAX_BYTES
from penstock.data.formats.parquet.parquet_shards import pyarrow_parquet
from penstock.proto.errors import InvalidArgumentError

__all__ = ["target_settings"]

PARQUET_GROUP = 16 << 20
"""Default size of the values in a row group of Parquet, in bytes."""
PARQUET_COMPRESSIONS = ("brotli", "gzip", "lz4", "none", "snappy", "zstd")
"""Compressions of Parquet's pages, by pyarrow's names."""
SIZE_LIMIT = 64 << 20
"""Default of the largest size of an MDS shard before compression, in bytes."""


def target_settings(
    to: str, compression: str | None, hashes: Collection[str] | None, limit: int | str | None, names: ArgumentNames
) -> dict[str, Any]:
    """Return the settings of the result's files, as keyword arguments of their writer. The arguments are those of
    `convert_dataset`. Raise InvalidArgumentError for settings that the writer would refuse."""
    one_of(names.of("to"), to, ("mds", "parquet"))
    size = byte_count(names.of("size_limit"), limit)
    if to == "parquet":
        return _parquet_settings("zstd" if compression == "default" else compression or "none", hashes, size, names)
    if size is not None and size > MAX_BYTES:
        raise InvalidArgumentError(f"{names.of('size_limit')} must be at most {MAX_BYTES} bytes, got {limit!r}")
    packed = None if compression == "default" else compression or None
    if packed:
        _check(names.of("compression"), packed, parse_compression)
    chosen = sorted(set(("xxh64",) if hashes is None else hashes))
    for algorithm in chosen:
        _check(names.of("hashes"), algorithm, lambda name: digest_of(b"", name))
    return {"compression": packed, "hashes": chosen, "size_limit": size or SIZE_LIMIT}


def _parquet_settings(
    compression: str, hashes: Collection[str] | None, size: int | None, names: ArgumentNames
) -> dict[str, Any]:
    pyarrow_parquet()  # fail early if the package is missing
    one_of(names.of("compression"), compression, PARQUET_COMPRESSIONS)
    if hashes is not None:
        raise InvalidArgumentError(
            f"{names.of('hashes')} must be left out for Parquet, whose pages have checksums, got {', '.join(hashes)}"
        )
    return {"compression": compression, "group_bytes": size or PARQUET_GROUP}


def _check(argument: str, value: str, check: Callable[[str], object]) -> None:
    """Call `check` with the value of an argument. Add the argument's name to an error that it raises."""
    try:
        check(value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{argument}: {error.message}") from None
