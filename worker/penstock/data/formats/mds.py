"""Samples of an MDS shard.

    [samples: 4] [offset: 4] * (samples + 1) [settings as JSON] [sample] * samples
    sample = [size: 4] for each column without a fixed size, then the values, column by column

The settings in the shard repeat the index's description, and are not read. The code runs for each sample, so all that
can be (offsets, decoders, positions) is computed when the shard is opened.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.data.formats.encodings import as_bytes, check_encoding, encoding_of
from penstock.data.formats.fields import InvalidField, column_encodings
from penstock.data.formats.raw_files import SampleFile
from penstock.data.formats.shards import DEFAULT_OPTIONS, ReadOptions, Shard
from penstock.proto.errors import DatasetError, InvalidArgumentError

MAX_SIZE = (1 << 32) - 1
"""Largest size of a value in bytes: its length is stored in 32 bits."""

Decode = Callable[[bytes, int, int], Any]


def columns_of(shard: Shard, options: ReadOptions = DEFAULT_OPTIONS) -> list[tuple[str, Decode, int]]:
    """Return (name, decoder, fixed size in bytes or 0) for each column, in stored order. Raises DatasetError for
    pickles unless the options allow them or keep them as bytes."""
    settings = shard.settings
    columns = []
    as_stored = options.encoded or options.images == "file"  # the pickle's bytes are returned and not loaded
    triples = zip(settings["column_names"], settings["column_encodings"], settings["column_sizes"], strict=True)
    for name, encoding, size in triples:
        try:
            known = encoding_of(encoding, allow_unsafe_types=options.allow_unsafe_types or as_stored)
        except DatasetError as error:
            raise DatasetError(f"{shard.name}: column {name!r}: {error.message}") from error
        decode = {"array": known.decode_array, "file": known.decode_file}.get(options.images)
        columns.append((name, as_bytes if options.encoded else decode or known.decode, size or 0))
    return columns


def check_mds(settings: dict[str, Any]) -> None:
    columns = column_encodings(settings)
    for name, encoding in columns.items():
        try:
            check_encoding(encoding)
        except InvalidArgumentError as error:
            raise InvalidField("column_encodings", f"is invalid for column {name!r}: {error.message}") from None
    sizes = settings.get("column_sizes")
    if not isinstance(sizes, list) or len(sizes) != len(columns):
        raise InvalidField(
            "column_sizes", f"must be a list of {len(columns)} sizes, one for each column, got {sizes!r:.100}"
        )
    for name, size in zip(columns, sizes, strict=True):
        if size is not None and (type(size) is not int or not 0 <= size <= MAX_SIZE):
            raise InvalidField("column_sizes", f"must be a number of bytes or null for column {name!r}, got {size!r}")


class MDSReader(SampleFile):
    def __init__(self, shard: Shard, path: Path, options: ReadOptions = DEFAULT_OPTIONS) -> None:
        columns = columns_of(shard, options)
        super().__init__(path, shard.files[0].raw)
        size = 4 + 4 * (shard.samples + 1)
        self._set_offsets(self._bytes(0, min(size, self._size)), shard.samples, size)
        self._columns = [(name, decode, size, not size) for name, decode, size in columns]
        varying = sum(1 for _, _, size in columns if not size)
        self._head = struct.Struct(f"={varying}I")
        self._least = self._head.size + sum(size for _, _, size in columns)

    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        column = ""
        at = self._head.size
        try:
            sizes = self._head.unpack_from(record)
            if self._least + sum(sizes) != len(record):
                raise ValueError(
                    f"the sample must have {self._least + sum(sizes)} bytes, as its sizes say, got {len(record)}"
                )
            values = {}
            following = iter(sizes)
            for column, decode, size, varies in self._columns:
                end = at + (next(following) if varies else size)
                values[column] = decode(record, at, end)
                at = end
            return values
        except (DatasetError, MemoryError):  # DatasetError: a package for this type is missing
            raise
        except Exception as error:
            self._undecodable(index, error, column)
