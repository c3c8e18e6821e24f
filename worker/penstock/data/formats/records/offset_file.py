"""File of the offsets of records in another file (the data file), whose format has no index of its own.

    [b"PENSTOCK OFFSET2"] [size of the data file: 8] [fingerprint of the data file: 8]
    [records: 8] [xxh3 of the offsets: 8] [offset: 8] * (records + 1)

The fingerprint (contents.pieces_digest) shows in most cases that the file was replaced by another
one of the same size, which the offsets would cut at wrong places. __penstock__/NAME.penstock-index lies beside the data
file or in the index's folder. The last offset is the end of the last record. All is checked when the file is opened.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import xxhash

from penstock.data.formats.raw_files import read_checked
from penstock.data.formats.shards import StoredFile
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import ShardCorruptError
from penstock.runtime.files.atomic_files import write_whole

ENDING = ".penstock-index"
FOLDER = "__penstock__"
"""Folder of these files. pyarrow leaves out names with `_`, Hugging Face datasets only folders with `__` and hidden
files, which copies by `*` and web servers lose."""
MAGIC = b"PENSTOCK OFFSET2"
HEAD = struct.Struct("<16sQQQQ")
NO_FINGERPRINT = 0
"""In place of the fingerprint for a remote data file, whose bytes were not read."""


def write_offsets(path: Path, size: int, fingerprint: int, offsets: Ints) -> int:
    """Write the file of offsets, whole or not at all, and return its size. `size`, `fingerprint`: of the data file;
    `offsets`: of the records, and the end of the last one. Raises OSError."""
    table = np.ascontiguousarray(offsets, "<i8").tobytes()
    content = HEAD.pack(MAGIC, size, fingerprint, len(offsets) - 1, xxhash.xxh3_64_intdigest(table)) + table
    write_whole(path, content)
    return len(content)


def read_offsets(path: Path, stored: StoredFile, size: int, records: int) -> tuple[memoryview, int]:
    """Return the records' 64-bit offsets, and the fingerprint of their data file. Raises ShardCorruptError if the file
    is damaged, or for a data file of another size."""
    data = read_checked(path, stored)
    remedy = "Write the index again with index_folder"
    if len(data) < HEAD.size or not data.startswith(MAGIC):
        raise ShardCorruptError(f"{stored.name} must begin with {MAGIC.decode()}. {remedy}")
    _, expected_size, expected_fingerprint, count, digest = HEAD.unpack_from(data)
    table = memoryview(data)[HEAD.size :]
    if count != records or len(table) != 8 * (records + 1):
        raise ShardCorruptError(
            f"{stored.name} must have the offsets of {records} records, got {count} in {len(table)} bytes. {remedy}"
        )
    if xxhash.xxh3_64_intdigest(table) != digest:
        raise ShardCorruptError(f"{stored.name}: the offsets are damaged. {remedy}")
    offsets = np.frombuffer(table, "<i8")
    if expected_size != size:
        raise ShardCorruptError(
            f"{stored.name} must belong to a file of {size} bytes, got that of {expected_size} bytes. {remedy}"
        )
    if offsets[-1] > size or offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any():
        raise ShardCorruptError(f"{stored.name}: the offsets must ascend within the file's {size} bytes. {remedy}")
    return table.cast("q"), expected_fingerprint
