"""Opening of a dataset's index, of which each process makes the table (shard_table.py): 10 s for a million shards."""

from __future__ import annotations

from pathlib import Path

import xxhash

from penstock.data.cache.index_watch import digest_of
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import PRECEDED_NOTE, file_notes, version_index
from penstock.data.indexes.shard_table import ShardTable
from penstock.proto.errors import DatasetError, ShardUnavailableError

LARGE_INDEX = 4 << 20
"""Bytes of an index from which its text does not stay in memory: about 10,000 shards."""


def open_index(path: Path, index: Descriptor, where: str) -> tuple[ShardTable, str]:
    """Return the table of an index, and its digest. A copy of a large table that is pickled to another process opens
    `path` again. `where`: for errors. Raises DatasetError for a file that is no index."""
    data = index.read_all()
    digest = xxhash.xxh3_128_hexdigest(data)
    if len(data) < LARGE_INDEX:
        return ShardTable.of(data, where), digest
    table = ShardTable.of(data, where, index)
    table.reopen = _reopened, (path, where, digest)
    return table, digest


def _reopened(path: Path, where: str, digest: str) -> ShardTable:
    try:
        index = Descriptor(path)
        if digest_of(index) == digest:
            return open_index(path, index, where)[0]
        path = path.with_name(version_index(1))
        first = _preceded(path, digest)
    except OSError as error:
        raise ShardUnavailableError(f"{path} cannot be read: {error.strerror}. Open the dataset again") from error
    if first is None:
        raise DatasetError(f"{where} was written again since the dataset was opened. Open the dataset again")
    return open_index(path, first, where)[0]


def _preceded(path: Path, digest: str) -> Descriptor | None:
    """Return the index of version 1, at `path`, if it was made from the index with this digest, as when a writer
    appends to a dataset without versions (dataset_versions.py)."""
    try:
        first = Descriptor(path)
    except FileNotFoundError:
        return None
    return first if file_notes(first).get(PRECEDED_NOTE) == digest else None
