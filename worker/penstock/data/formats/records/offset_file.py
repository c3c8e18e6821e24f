"""File of the offsets of records in another file (the data file), whose format has no index of its own.

    [b"PENSTOCK OFFSETS"] [size of the data file: 8] [records: 8] [xxh3 of the offsets: 8] [offset: 8] * (records + 1)

The file is named like the data file, with ENDING, and lies beside it or in the index's own folder. Record i begins at
offset i; the last offset is the end of the last record. The file is read whole and checked when it is opened.
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

__all__ = ["ENDING", "read_offsets", "write_offsets"]

ENDING = ".penstock-index"
MAGIC = b"PENSTOCK OFFSETS"
HEAD = struct.Struct("<16sQQQ")


def write_offsets(path: Path, size: int, offsets: Ints) -> int:
    """Write the file of the offsets of a data file's records, whole or not at all, and return its size in bytes.
    `size`: size of the data file in bytes. Raises OSError."""
    table = np.ascontiguousarray(offsets, "<i8").tobytes()
    content = HEAD.pack(MAGIC, size, len(offsets) - 1, xxhash.xxh3_64_intdigest(table)) + table
    write_whole(path, content)
    return len(content)


def read_offsets(path: Path, stored: StoredFile, size: int, records: int) -> memoryview:
    """Return the offsets of a data file's records, as 64-bit integers. `size`: size of the data file in bytes;
    `records`: expected number of records. Raises ShardCorruptError if the file of offsets is damaged, or belongs to
    another data file."""
    data = read_checked(path, stored)
    remedy = "Write the index again with index_folder"
    if len(data) < HEAD.size or not data.startswith(MAGIC):
        raise ShardCorruptError(f"{stored.name} must begin with {MAGIC.decode()}. {remedy}")
    _, expected_size, count, digest = HEAD.unpack_from(data)
    table = memoryview(data)[HEAD.size :]
    if count != records or len(table) != 8 * (records + 1):
        raise ShardCorruptError(f"{stored.name} must have {records} records, got {count}. {remedy}")
    if xxhash.xxh3_64_intdigest(table) != digest:
        raise ShardCorruptError(f"{stored.name}: the offsets are damaged. {remedy}")
    offsets = np.frombuffer(table, "<i8")
    if expected_size != size or offsets[-1] > size or offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any():
        raise ShardCorruptError(
            f"{stored.name} must belong to a file of {size} bytes, got the offsets of a file of {expected_size} bytes. "
            f"{remedy}"
        )
    return table.cast("q")
