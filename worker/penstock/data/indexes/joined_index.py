"""Indexes made from others, whose entries are copied as text: a dataset's next version, and several folders as one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import (
    INDEX_END,
    entries_of,
    index_begin,
    index_notes,
    read_entry,
)
from penstock.data.formats.shards import Shard, StoredFile
from penstock.data.indexes.shard_table import ShardTable
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import ShardUnavailableError

LISTED = 10_000
"""Number of shards from which they are not kept as objects."""


class GivenIndex:
    def __init__(self, remote: RemoteFolder, name: str, timeout_s: float) -> None:
        """Read the index `name` in a remote folder. Raises ShardUnavailableError."""
        self._where = remote.url_of(name)
        try:
            with tempfile.TemporaryDirectory(prefix="penstock-index-") as scratch:
                path = remote.local / name if remote.local else Path(scratch, "index")
                if not remote.local:
                    remote.copy(name, path, deadline_s=timeout_s)
                self.data = Descriptor(path).read_all()
        except OSError as error:
            raise ShardUnavailableError(
                f"{self._where} cannot be read: {error.strerror}. Check the path and its permissions"
            ) from error

    @property
    def notes(self) -> dict[str, Any]:
        return index_notes(self.data)

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.data)

    def entries(self) -> Iterator[tuple[bytes, Shard]]:
        """Yield the text of each entry, and its shard. Raises DatasetError for an invalid entry."""
        known: dict[str, Mapping[str, Any]] = {}
        files: dict[str, StoredFile] = {}
        for number, text in enumerate(entries_of(self.data, self._where)):
            yield bytes(text), read_entry(text, f"{self._where}: shard {number}", known, files)


def joined_index(entries: Sequence[bytes], notes: Mapping[str, Any] | None = None) -> bytes:
    return index_begin(notes) + b", ".join(entries) + INDEX_END


def shards_in(entries: Sequence[bytes]) -> Sequence[Shard]:
    """Return the shards of entries: a list, or for many a sequence that makes each when it is used."""
    table = ShardTable.of(joined_index(entries), "the index")
    return table[:] if len(table) < LISTED else table
