"""Checks that a dataset's index is still the one with which the dataset was opened, on disk or at the remote.

A dataset that is overwritten while it is read yields old rows first and new rows later. The hashes in the index detect
this for shards that are verified. The checks in this module detect it for shards that are read in place, and for a
cache's folder that another job fills again: writing a dataset removes or replaces its index.

A file without a hash is taken to belong to the cached index as long as the version (ETag or time) of the remote's index
stays the same. Comparing the indexes' contents is not enough: without hashes, two datasets of equal sizes have equal
indexes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.data.cache.file_locks import LONGEST_TEXT
from penstock.data.formats.index import PRECEDED_NOTE, index_notes, version_index
from penstock.data.remote.folders import LARGEST_READ, RemoteFolder
from penstock.proto.errors import DatasetError, PenstockError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.inner_paths import parent_of
from penstock.runtime.files.plain_files import read_plain

__all__ = ["IndexWatch", "RemoteIndex", "index_digest"]

VERSION_TIMEOUT_S = 10.0
"""Seconds to wait for the remote's answer about its index's version."""


@dataclass
class IndexWatch:
    """Index file of an open dataset, and what it was when the dataset was opened."""

    path: Path
    digest: bytes
    """Digest of the index's content when the dataset was opened."""
    hashed: bool
    """True if the index has a hash of each shard: an equal index then means equal data."""
    in_place: bool
    """True if the shards lie beside the index. False for a copy in a cache, which may be removed."""
    seen: tuple[int, int, int] | None
    """Size, modification time in ns and inode of the index file when its content was last found to be the same; None if
    it was missing."""
    older_ns: int | None = None
    """Modification time in ns that an index without hashes had before it was rewritten with equal content; None if it
    was not rewritten. Shards newer than this time count as rewritten too."""

    @staticmethod
    def of(path: Path, content: bytes, *, hashed: bool, in_place: bool) -> IndexWatch:
        return IndexWatch(path, _digest(content), hashed, in_place, _file_version(path))

    def check(self, shard: Sequence[Path]) -> None:
        """Raise DatasetError if the dataset was written again since it was opened. `shard`: paths of the shard files
        that were just opened. The index's content is read only if its time has changed."""
        seen = _file_version(self.path)
        if seen is None:
            if self.in_place:
                self._refuse(self.path, "removed")
            return
        if seen != self.seen:
            if self.seen is None or not self._is_same():
                self._refuse(self.path, "written again")
            if not self.hashed and self.older_ns is None:
                self.older_ns = self.seen[1]
            self.seen = _file_version(self.path)
        if self.older_ns is not None:
            for path in shard:
                found = _file_version(path)
                if found is None or found[1] > self.older_ns:
                    self._refuse(path, "written again")

    def _refuse(self, path: Path, what: str) -> NoReturn:
        raise DatasetError(
            f"{path} was {what} since the dataset was opened, so old and new samples would be mixed. Write new data to "
            "a new folder, or open the dataset again"
        )

    def _is_same(self) -> bool:
        try:
            if _digest(read_plain(self.path, LARGEST_READ)) == self.digest:
                return True
            first = self.path.with_name(version_index(1))
            if not _preceded(read_plain(first, LARGEST_READ), self.digest):
                return False
        except OSError:
            return False
        # A writer appended to the dataset: this one is version 1 now.
        self.path, self.digest = first, _digest(read_plain(first, LARGEST_READ))
        return True


@dataclass(frozen=True)
class RemoteIndex:
    """Index file of a dataset at a remote; a cache has a copy of it."""

    remote: RemoteFolder
    folder: Path
    """Folder of the cache."""
    record: str
    """Path, relative to `folder`, of the file that records the fetched index's version for all processes of the
    host. It is named like the index."""

    @property
    def name(self) -> str:
        """Name of the index file at the remote."""
        return self.record.rpartition("/")[2]

    def record_version(self) -> None:
        """Record the current version of the remote's index. Called before the index is fetched, so that a replacement
        during the fetch is detected."""
        version = (self._version() or "").encode()
        with parent_of(self.folder, self.record) as (folder, name):
            write_whole(Path(f"/proc/self/fd/{folder}", name), version)

    def check(self) -> None:
        """Raise DatasetError if the remote's index was replaced or removed since it was fetched. Does nothing if the
        remote reports no versions or does not answer; the check after the next download will find out."""
        try:
            before = read_plain(self.folder / self.record, LONGEST_TEXT).decode(errors="replace")
        except FileNotFoundError:
            return
        now = self._version() if before else ""
        if now is not None and now != before and not self._became_first_version():
            raise DatasetError(
                f"{self.remote.url_of(self.name)} was {'written again' if now else 'removed'} since it was fetched "
                f"into {self.folder}, and without hashes old and new shards cannot be told apart. "
                "Write new data to a new address, with hashes; or use another cache folder to read the new data"
            )

    def _became_first_version(self) -> bool:
        """Return True if the index was replaced because a writer appended to the dataset."""
        try:
            cached = read_plain(self.folder / self.name, LARGEST_READ)
            first = self.remote.read(version_index(1), deadline_s=VERSION_TIMEOUT_S)
        except (OSError, DatasetError):
            return False
        return _preceded(first, _digest(cached))

    def _version(self) -> str | None:
        """Return the version of the remote's index; "" if there is no index, None if the version is unknown."""
        try:
            return self.remote.version(self.name, deadline_s=VERSION_TIMEOUT_S)
        except FileNotFoundError:
            return ""
        except PenstockError:
            raise
        except Exception:
            return None


def index_digest(content: bytes) -> str:
    """Return the digest of an index's content, in hexadecimal."""
    return _digest(content).hex()


def _preceded(first_version: bytes, digest: bytes) -> bool:
    """Return True if the index of version 1 says that the index with this digest was the dataset's before."""
    return index_notes(first_version).get(PRECEDED_NOTE) == digest.hex()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
