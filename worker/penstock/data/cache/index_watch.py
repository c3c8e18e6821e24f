"""Checks that a dataset's index has not changed since the dataset was opened: a job would get old rows first and new
ones later.

Hashes in the index detect this for files that are verified. The index itself, which writing a dataset removes or
replaces, is watched if files are read in place, have no hashes, or another job fills the cache's folder again.

A fetched file without a hash is taken to belong to the cached index while the ETag or time of the remote's index stays
the same. To compare indexes is not enough: without hashes, two datasets of equal sizes have equal ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import xxhash

from penstock.data.cache.file_locks import LONGEST_TEXT
from penstock.data.formats.compressed_files import compression_of
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import PRECEDED_NOTE, SOURCE_NOTE, file_notes, first_notes, version_index
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, PenstockError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.inner_paths import parent_of
from penstock.runtime.files.plain_files import read_plain

VERSION_TIMEOUT_S = 10.0
"""Seconds to wait for the remote's answer about its index's version."""


@dataclass
class IndexWatch:
    """Watch over the index file of an open dataset."""

    path: Path
    digest: str
    """Digest of the index when the dataset was opened."""
    hashed: bool
    """The index has a hash of each file, so equal indexes mean equal data."""
    in_place: bool
    """Shards are read in place, so the index must stay; a copy in a cache may be removed at any time."""
    seen: tuple[int, int, int] | None
    """Size, modification time in ns and inode of the index when last found unchanged; None if it was missing."""
    older_ns: int | None = None
    """Modification time in ns before the index was rewritten with equal content and without hashes; None otherwise.
    Shard files that are newer count as rewritten, too."""

    @staticmethod
    def of(path: Path, index: Descriptor, digest: str, *, hashed: bool, in_place: bool) -> IndexWatch:
        return IndexWatch(path, digest, hashed, in_place, _version_of(os.fstat(index.fileno())))

    def check(self, shard: Sequence[Path]) -> None:
        """Raise DatasetError if the dataset was written again, or the index of files read in place removed. The index
        is read only if its size, time or inode has changed. `shard`: files that were just opened."""
        seen = _file_version(self.path)
        if seen is None and not (self.in_place and self._is_first_version()):
            if self.in_place:
                self._refuse(self.path, "removed")
            return
        if seen is None:
            seen = self.seen = _file_version(self.path)
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
            f"{path} was {what} since the dataset was opened. Write new data to a new folder, or open it again"
        )

    def _is_same(self) -> bool:
        try:
            return digest_of(Descriptor(self.path)) == self.digest or self._is_first_version()
        except OSError:
            return False

    def _is_first_version(self) -> bool:
        """Return True if a writer appended to the dataset, which is version 1 now; watch the index of this version."""
        try:
            path = self.path.with_name(version_index(1))
            first = Descriptor(path)
            if file_notes(first).get(PRECEDED_NOTE) != self.digest:
                return False
            digest = digest_of(first)
        except OSError:
            return False
        self.path, self.digest = path, digest
        return True


@dataclass(frozen=True)
class RemoteIndex:
    """Index file of a dataset at a remote, of which a cache has a copy."""

    remote: RemoteFolder
    folder: Path
    record: str
    """Path below `folder` of the host's record which version (ETag or time) of the index was fetched."""

    @property
    def name(self) -> str:
        return self.record.rpartition("/")[2]

    def record_version(self) -> None:
        """Record the index's version. Called before the fetch, so that `check` detects a replacement during it."""
        version = (self._version() or "").encode()
        with parent_of(self.folder, self.record) as (folder, name):
            write_whole(Path(f"/proc/self/fd/{folder}", name), version)

    def check(self) -> None:
        """Raise DatasetError if the index was replaced or removed since it was fetched. Without an answer do nothing:
        `check` is called again after the next download."""
        try:
            before = read_plain(self.folder / self.record, LONGEST_TEXT).decode(errors="replace")
        except FileNotFoundError:
            return
        now = self._version() if before else ""
        if now is not None and now != before and not self._became_first_version():
            raise DatasetError(
                f"{self.remote.url_of(self.name)} was {'written again' if now else 'removed'} since it was fetched "
                f"into {self.folder}, and without hashes in the index old and new shards cannot be told apart. "
                "Write new data to a new address, with hashes; or use another cache folder to read the new data"
            )

    def _became_first_version(self) -> bool:
        """Return True if a writer only appended to a dataset without versions: the copy is then that of version 1."""
        try:
            cached = digest_of(Descriptor(self.folder / self.name))
            notes = first_notes(
                lambda size: self.remote.read(version_index(1), deadline_s=VERSION_TIMEOUT_S, first=size)
            )
        except (OSError, DatasetError):
            return False
        return notes.get(PRECEDED_NOTE) == cached

    def _version(self) -> str | None:
        """Return the index's ETag or time; "" without an index, None if the remote does not say."""
        try:
            return self.remote.version(self.name, deadline_s=VERSION_TIMEOUT_S)
        except FileNotFoundError:
            return ""
        except PenstockError:
            raise
        except Exception:
            return None


def check_index(file: Descriptor, source: str) -> None:
    """Raise DatasetError for a fetched file whose ends are not an index's, such as a login's page, which must not be
    cached. `source`: for errors."""
    size, data = os.fstat(file.fileno()).st_size, file.read(256, 0)
    is_index = data.lstrip()[:1] == b"{" and file.read(256, max(0, size - 256)).rstrip()[-1:] == b"}"
    if found := compression_of(data):
        raise DatasetError(
            f"{source} must arrive as it is stored, got it compressed by {found}. Let the server send the dataset's "
            "files without Content-Encoding"
        )
    if not is_index:
        raise DatasetError(
            f"{source} must be the index of a dataset, got a file that begins with {data[:40]!r}. Check the address"
        )


def is_index_of(path: Path, folder: str) -> bool:
    """Return True if the index at `path` was written for files in `folder`, by the argument `out` of `index_folder`."""
    with contextlib.suppress(OSError):
        return bool(folder) and file_notes(Descriptor(path)).get(SOURCE_NOTE) == folder
    return False


def digest_of(file: Descriptor) -> str:
    """Return the digest of a file, which may be larger than the memory."""
    digest, at = xxhash.xxh3_128(), 0
    while piece := file.read(1 << 20, at):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest()


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        return _version_of(os.stat(path))
    except OSError:
        return None


def _version_of(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ino
