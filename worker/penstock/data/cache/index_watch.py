"""Checks that a dataset's index has not changed since the dataset was opened, on disk or at the remote.

If a dataset is overwritten while a job reads it, the job gets old rows first and new rows later. For files that are
verified, the hashes in the index detect this. In three other cases the index itself is watched, because writing a
dataset removes or replaces its index: files are read in place, files have no hashes, or another job fills the cache's
folder again.

A fetched file without a hash is taken to belong to the cached index as long as the version (ETag or time) of the
remote's index stays the same. Comparing the contents of the indexes is not enough: without hashes, two datasets of
equal sizes have equal indexes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import xxhash

from penstock.data.cache.file_locks import LONGEST_TEXT
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import PRECEDED_NOTE, SOURCE_NOTE, file_notes, first_notes, version_index
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, PenstockError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.inner_paths import parent_of
from penstock.runtime.files.plain_files import read_plain

__all__ = ["IndexWatch", "RemoteIndex", "check_index", "digest_of", "is_index_of"]

VERSION_TIMEOUT_S = 10.0
"""Seconds to wait for the remote's answer about its index's version."""
LARGEST_PAGE = 4 << 20
"""Largest size, in bytes, of a fetched index that is parsed completely to see that it is not a login page."""


@dataclass
class IndexWatch:
    """Watch over the index file of an open dataset, to see whether it has changed since the dataset was opened."""

    path: Path
    digest: str
    """Digest of the index's content when the dataset was opened."""
    hashed: bool
    """True if the index has a hash of each file, so that equal indexes mean equal data."""
    in_place: bool
    """True if the shards are read in place. The removal of the index is then an error. False if the index is a copy in
    a cache, which may be removed at any time."""
    seen: tuple[int, int, int] | None
    """Size, modification time in ns and inode of the index file when its content was last found unchanged; None if the
    file was missing."""
    older_ns: int | None = None
    """Modification time in ns that the index had before it was rewritten with equal content; None if it was not
    rewritten, or if it has hashes. A shard file that is newer than this time counts as rewritten, too."""

    @staticmethod
    def of(path: Path, index: Descriptor, digest: str, *, hashed: bool, in_place: bool) -> IndexWatch:
        return IndexWatch(path, digest, hashed, in_place, _version_of(os.fstat(index.fileno())))

    def check(self, shard: Sequence[Path]) -> None:
        """Raise DatasetError if the dataset was written again since it was opened, or if the index of files that are
        read in place was removed. The content of the index is read only if the file's size, time or inode has changed.
        `shard`: paths of the shard files that were just opened."""
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
            if digest_of(Descriptor(self.path)) == self.digest:
                return True
            path = self.path.with_name(version_index(1))
            first = Descriptor(path)
            if file_notes(first).get(PRECEDED_NOTE) != self.digest:
                return False
            digest = digest_of(first)
        except OSError:
            return False
        # A writer appended to the dataset: this one is version 1 now.
        self.path, self.digest = path, digest
        return True


@dataclass(frozen=True)
class RemoteIndex:
    """Index file of a dataset at a remote, of which a cache has a copy."""

    remote: RemoteFolder
    folder: Path
    """Folder of the cache that has a copy of the index."""
    record: str
    """Path, relative to `folder`, of the file that records for all processes of the host which version of the index was
    fetched (ETag or time). The file is named like the index."""

    @property
    def name(self) -> str:
        """Name of the index file at the remote."""
        return self.record.rpartition("/")[2]

    def record_version(self) -> None:
        """Record the version (ETag or time) of the index that the remote has now. This is called before the index is
        fetched, so that `check` detects if the index is replaced during the fetch."""
        version = (self._version() or "").encode()
        with parent_of(self.folder, self.record) as (folder, name):
            write_whole(Path(f"/proc/self/fd/{folder}", name), version)

    def check(self) -> None:
        """Raise DatasetError if the remote's index was replaced or removed since it was fetched. Do nothing if the
        remote reports no versions, or does not answer: `check` is called again after the next download."""
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
        """Return True if the remote's index has changed only because a writer appended shards to a dataset that had no
        versions before. The cached copy is then still valid, as the index of version 1 (dataset_versions.py)."""
        try:
            cached = digest_of(Descriptor(self.folder / self.name))
            notes = first_notes(
                lambda size: self.remote.read(version_index(1), deadline_s=VERSION_TIMEOUT_S, first=size)
            )
        except (OSError, DatasetError):
            return False
        return notes.get(PRECEDED_NOTE) == cached

    def _version(self) -> str | None:
        """Return the version (ETag or time) of the remote's index; "" if there is no index, None if the remote does not
        say."""
        try:
            return self.remote.version(self.name, deadline_s=VERSION_TIMEOUT_S)
        except FileNotFoundError:
            return ""
        except PenstockError:
            raise
        except Exception:
            return None


def check_index(file: Descriptor, source: str) -> None:
    """Raise DatasetError if a fetched file is not an index but, for example, the page of a login or proxy. Such a page
    must not be cached. Of a file larger than any page, only the first and last bytes are checked. `source`: address of
    the file, for errors."""
    size = os.fstat(file.fileno()).st_size
    if size > LARGEST_PAGE:
        is_index = file.read(256, 0).lstrip()[:1] == b"{" and file.read(256, size - 256).rstrip()[-1:] == b"}"
        data = b"" if is_index else file.read(40, 0)
    else:
        data = file.read(size, 0)
        try:
            is_index = isinstance(json.loads(data), dict)
        except ValueError:
            is_index = False
    if not is_index:
        raise DatasetError(
            f"{source} must be the index of a dataset, got a file that begins with {data[:40]!r}. Check the address, "
            "and whether a proxy or a login page answers for it"
        )


def is_index_of(path: Path, folder: str) -> bool:
    """Return True if the file at `path` is an index that was written for the files in another folder, `folder`, because
    `path` is in the folder that was the argument `out` of `index_folder`. Return False if `folder` is ""."""
    with contextlib.suppress(OSError):
        return bool(folder) and file_notes(Descriptor(path)).get(SOURCE_NOTE) == folder
    return False


def digest_of(file: Descriptor) -> str:
    """Return the digest of a file's content. The file may be larger than the memory."""
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
