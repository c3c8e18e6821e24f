"""Indexes made from others, whose entries are copied as text: a dataset's next version, and several folders as one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import InvalidField
from penstock.data.formats.index import (
    INDEX_END,
    entries_of,
    entry_text,
    index_begin,
    index_notes,
    invalid_index,
    parsed_entry,
    shard_of,
)
from penstock.data.formats.shards import Shard, StoredFile
from penstock.data.indexes.shard_table import ShardTable
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, ShardUnavailableError

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
            try:
                yield bytes(text), shard_of(parsed_entry(text), known, files)
            except (InvalidField, DatasetError) as error:
                raise invalid_index(f"{self._where}: shard {number}", error) from None


class JoinedIndex:
    """Index that is being made from entries, in the order in which they are added."""

    def __init__(self) -> None:
        self._entries: list[bytes] = []

    def add(self, text: bytes) -> None:
        self._entries.append(text)

    def add_shard(self, shard: Shard) -> None:
        self.add(entry_text(shard))

    def written(self, notes: Mapping[str, Any] | None = None) -> bytes:
        return index_begin(notes) + b", ".join(self._entries) + INDEX_END

    def shards(self) -> Sequence[Shard]:
        """Return the shards so far: a list, or for many a sequence that makes each when it is used."""
        table = ShardTable.of(self.written(), "the index")
        return table[:] if len(table) < LISTED else table
