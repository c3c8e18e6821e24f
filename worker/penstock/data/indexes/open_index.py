"""Opening of a dataset's index. From a large index one process of the host makes columns (arrays with a number for each
shard), in a file that all processes map into memory.

The file of columns is in the cache's state folder. For a dataset that is read in place, it is in the user's cache
folder, such as ~/.cache. Its name is the digest of the index, so it belongs to that index alone. A damaged or outdated
file is made again. A process that cannot write to the folder makes columns for itself, in a temporary file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.data.cache.cache_state import STATE
from penstock.data.cache.file_locks import FileLock, take
from penstock.data.cache.index_watch import digest_of
from penstock.data.cache.shard_cache import ShardCache
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import PRECEDED_NOTE, file_notes, read_index, version_index
from penstock.data.indexes.shard_table import ListedShards, ShardTable, StoredShards, write_columns
from penstock.proto.errors import DatasetError, ShardUnavailableError
from penstock.runtime.files.inner_paths import parent_of
from penstock.runtime.files.plain_files import is_ours

__all__ = ["LARGE_INDEX", "ColumnsPlace", "open_index"]

LARGE_INDEX = 4 << 20
"""Size of an index, in bytes, from which it gets a file of columns: about 10,000 shards, which take 0.4 s to parse."""
LONGEST_PAUSE_S = 0.1
"""Longest pause between two attempts to acquire a lock, in seconds."""


@dataclass(frozen=True)
class ColumnsPlace:
    """Folder in which the file of an index's columns (shard_table.py) is kept."""

    root: Path
    folder: str
    """Path of the folder, relative to `root`."""
    group: int | None
    """ID of the Unix group whose members share the folder; None: this user alone."""
    timeout_s: float
    """Seconds to wait while another process makes the file."""

    @staticmethod
    def of(cache: ShardCache) -> ColumnsPlace:
        """Return the folder for the columns of a dataset's index, given the dataset's cache."""
        if not cache.in_place:
            return ColumnsPlace(cache.folder, STATE, cache.group, cache.timeout_s)
        try:
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # a user without a home folder: each process makes columns of its own
            home = os.devnull
        return ColumnsPlace(Path(home).absolute(), "penstock/indexes", None, cache.timeout_s)


def open_index(path: Path, index: Descriptor, where: str, place: ColumnsPlace) -> tuple[ShardTable, str]:
    """Return the table of an index's shards, and the index's digest.

    Args:
        path: path of the index. A copy of the table that is pickled to another process opens this path again.
        index: the open index.
        where: address of the index, for errors.
        place: folder for the file of columns, which a large index gets.

    Raises DatasetError if the file is not an index, ShardUnavailableError if no file of columns can be made.
    """
    size = os.fstat(index.fileno()).st_size
    if size < LARGE_INDEX:
        data = index.read_all()
        return ListedShards(read_index(data, where)), xxhash.xxh3_128_hexdigest(data)
    digest = digest_of(index)
    return _OpenIndex(path, index, where, place, digest).table(), digest


class _CopiedShards(StoredShards):
    """Table of a large index's shards that can be pickled: the copy opens the index file again."""

    reopen: tuple[Callable[..., ShardTable], tuple[object, ...]]

    def __reduce__(self) -> tuple[Callable[..., ShardTable], tuple[object, ...]]:
        return self.reopen


def _reopened(path: Path, where: str, place: ColumnsPlace, digest: str) -> ShardTable:
    try:
        index = Descriptor(path)
        if digest_of(index) == digest:
            return open_index(path, index, where, place)[0]
        path = path.with_name(version_index(1))
        first = _preceded(path, digest)
    except OSError as error:
        raise ShardUnavailableError(f"{path} cannot be read: {error.strerror}. Open the dataset again") from error
    if first is None:
        raise DatasetError(f"{where} was written again since the dataset was opened. Open the dataset again")
    return open_index(path, first, where, place)[0]


def _preceded(path: Path, digest: str) -> Descriptor | None:
    """Return the index of version 1, at `path`, if it was made from the index with this digest; None otherwise. When a
    writer appends to a dataset without versions, the old index becomes that of version 1 (dataset_versions.py)."""
    try:
        first = Descriptor(path)
    except FileNotFoundError:
        return None
    return first if file_notes(first).get(PRECEDED_NOTE) == digest else None


class _OpenIndex:
    def __init__(self, path: Path, index: Descriptor, where: str, place: ColumnsPlace, digest: str) -> None:
        self._path, self._index, self._where, self._place, self._digest = path, index, where, place, digest
        self._name = f"{place.folder}/{digest}.columns"

    def table(self) -> ShardTable:
        try:
            return self._shared()
        except OSError:  # a folder that cannot be written, or a full disk
            pass
        try:
            with tempfile.TemporaryFile() as file:
                self._write(file)
                return self._opened(Descriptor(f"/proc/self/fd/{file.fileno()}"))
        except OSError as error:
            raise ShardUnavailableError(
                f"{self._where}: the temporary file of the index's columns cannot be written: {error.strerror}. Give a "
                "cache folder or TMPDIR with as much free space as the index has"
            ) from error

    def _shared(self) -> ShardTable:
        found = self._existing()
        if found is not None:
            return found
        os.makedirs(self._place.root, exist_ok=True)
        with parent_of(self._place.root, self._name, make=True):
            pass
        lock = self._lock()
        try:
            found = self._existing()
            return self._made() if found is None else found
        finally:
            with contextlib.suppress(OSError):
                lock.remove()
            lock.release()

    def _lock(self) -> FileLock:
        until, pause = time.monotonic() + self._place.timeout_s, 0.001
        while True:
            lock = take(str(self._place.root), f"{self._name}.lock", shared=False)
            if lock is not None:
                return lock
            if time.monotonic() >= until:
                raise ShardUnavailableError(
                    f"{self._where}: another process has not finished reading the index within "
                    f"{self._place.timeout_s:g} s, and still holds the lock "
                    f"{self._place.root}/{self._name}.lock. Set timeout_s higher, or end that process"
                )
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_S, 2 * pause)

    def _existing(self) -> ShardTable | None:
        """Return the table from an existing file of columns; None if no usable file exists."""
        try:
            with parent_of(self._place.root, self._name) as (folder, name):
                columns = Descriptor(name, folder=folder)
            if not is_ours(os.fstat(columns.fileno()), self._place.group):
                return None
            return self._opened(columns)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _made(self) -> ShardTable:
        with parent_of(self._place.root, self._name) as (folder, name):
            temporary = f"{name}!new"
            columns = Descriptor(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600, folder=folder)
            try:
                if self._place.group is not None:
                    with contextlib.suppress(PermissionError):  # another member's file
                        os.fchown(columns.fileno(), -1, self._place.group)
                        os.fchmod(columns.fileno(), 0o660)
                with open(columns.fileno(), "r+b", closefd=False) as file:
                    self._write(file)
                table = self._opened(columns)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
        return table

    def _write(self, file: object) -> None:
        if write_columns(self._index, file, self._where) != self._digest:  # type: ignore[arg-type]
            raise DatasetError(f"{self._where} was changed while it was read. Open the dataset again")

    def _opened(self, columns: Descriptor) -> ShardTable:
        table = _CopiedShards(self._index, columns, self._digest, self._where)
        table.reopen = _reopened, (self._path, self._where, self._place, self._digest)
        return table
