"""Indexes of any size that are made from other indexes: the index of the next version of a dataset that grows, and one
index for datasets in several folders.

Entries are read and written one by one, so only a few numbers for each shard are kept in memory.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.data.cache.index_watch import digest_of
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import InvalidField
from penstock.data.formats.index import (
    INDEX_END,
    entry_text,
    file_notes,
    index_begin,
    invalid_index,
    read_index,
    shard_of,
)
from penstock.data.formats.shards import Shard, StoredFile
from penstock.data.indexes.index_entries import Entry, IndexEntries
from penstock.data.indexes.open_index import LARGE_INDEX
from penstock.data.indexes.shards_on_demand import ShardsOnDemand
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, ShardUnavailableError

__all__ = ["GivenIndex", "JoinedIndex"]

PIECE = 16 << 20
"""Number of bytes that are copied at a time."""


class GivenIndex:
    """Existing index from which a new one is made, in a folder of this machine or at a remote."""

    def __init__(self, remote: RemoteFolder, name: str, scratch: Path, timeout_s: float) -> None:
        """Open the index; download it first if it is at a remote.

        Args:
            remote: folder of the dataset.
            name: path of the index below the remote.
            scratch: folder for a copy of a remote index.
            timeout_s: seconds for the download.

        Raises ShardUnavailableError.
        """
        self.where = remote.url_of(name)
        """Address of the index, for errors."""
        path = remote.local / name if remote.local else scratch / f"given-{name.replace('/', '-')}"
        if not remote.local:
            remote.copy(name, path, deadline_s=timeout_s)
        try:
            self.file = Descriptor(path)
            self._size = path.stat().st_size
            if not remote.local:
                path.unlink()  # the open file stays
        except OSError as error:
            raise ShardUnavailableError(
                f"{self.where} cannot be read: {error.strerror}. Check the path and its permissions"
            ) from error

    @property
    def notes(self) -> dict[str, Any]:
        """Notes of the index: its entries for Penstock alone, see `index_notes`."""
        return file_notes(self.file)

    @property
    def digest(self) -> str:
        """Digest of the content of the index file."""
        return digest_of(self.file)

    def entries(self) -> Iterator[tuple[Entry, Shard]]:
        """Yield each entry of the index, and the Shard that the entry describes. Raises DatasetError for an invalid
        entry."""
        known: dict[str, Mapping[str, Any]] = {}
        files: dict[str, StoredFile] = {}
        try:
            for number, entry in enumerate(IndexEntries(self.file)):
                try:
                    # Two different files of one name are refused here; in a large index its readers look for them.
                    shard = shard_of(entry.value, known, files if self._size < LARGE_INDEX else {})
                except (InvalidField, DatasetError) as error:
                    raise invalid_index(f"{self.where}: shard {number}", error) from None
                yield entry, shard
        except InvalidField as error:
            raise invalid_index(self.where, error) from None


class JoinedIndex:
    """Index that is being made from entries, in the order in which they are added."""

    def __init__(self, scratch: Path) -> None:
        """Begin an index without entries.

        Args:
            scratch: folder for temporary files, which the caller removes when the index is no longer needed.
        """
        self._scratch = scratch
        with self._on_disk():
            self._body = (scratch / "entries").open("wb")
        self._begins, self._lengths = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, text: bytes) -> None:
        """Add the text of a shard's entry."""
        with self._on_disk():
            if self._begins:
                self._body.write(b", ")
            self._begins.append(self._body.tell())
            self._lengths.append(len(text))
            self._body.write(text)

    def add_shard(self, shard: Shard) -> None:
        self.add(entry_text(shard))

    def written(self, name: str, notes: Mapping[str, Any] | None = None) -> Path:
        """Write the index of the entries that were added so far, and return its path. `name`: name of the file, in the
        scratch folder."""
        path = self._scratch / name
        with self._on_disk(), path.open("wb") as file:
            self._body.flush()
            file.write(index_begin(notes))
            body = Descriptor(self._body.name)
            at = 0
            while piece := body.read(PIECE, at):
                file.write(piece)
                at += len(piece)
            file.write(INDEX_END)
        return path

    def shards(self, path: Path, notes: Mapping[str, Any] | None = None) -> Sequence[Shard]:
        """Return the shards of the index that `written` wrote to `path`. For a small index the result is a list. For a
        large one it is a sequence that reads the entry of a shard only when the shard is used.

        notes: the notes that were given to `written`; their length tells where the first entry begins.
        """
        if path.stat().st_size < LARGE_INDEX:
            return read_index(path.read_bytes(), path.name)
        return _IndexedShards(Descriptor(path), len(index_begin(notes)), self._begins, self._lengths)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk
            self._body.close()

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ShardUnavailableError(
                f"the index's temporary file in {self._scratch} cannot be written: {error.strerror}. Set TMPDIR to a "
                "folder with twice as much free space as the index has"
            ) from error


class _IndexedShards(ShardsOnDemand):
    """Shards of a large index, found by the offsets and lengths of their entries in the file."""

    def __init__(self, index: Descriptor, first: int, begins: Sequence[int], lengths: Sequence[int]) -> None:
        self._index, self._first, self._begins, self._lengths = index, first, begins, lengths
        self._known: dict[str, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._begins)

    def _shard(self, number: int) -> Shard:
        text = self._index.read(self._lengths[number], self._first + self._begins[number])
        return shard_of(json.loads(text), self._known, {})
