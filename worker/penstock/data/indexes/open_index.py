"""Opening of a dataset's index. One process of the host computes the columns of a huge one (shard_table.py) and stores
them in a file that all map, in the cache's state folder, or, if read in place, in the user's cache folder. Its name is
the index's digest. A damaged file is made again; a process that cannot write there computes the columns itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from penstock.data.cache.cache_state import STATE
from penstock.data.cache.file_locks import share, take_within
from penstock.data.cache.index_watch import digest_of
from penstock.data.cache.shard_cache import ShardCache
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import PRECEDED_NOTE, file_notes, version_index
from penstock.data.indexes.shard_table import ShardTable
from penstock.proto.errors import DatasetError, ShardUnavailableError
from penstock.runtime.files.inner_paths import parent_of
from penstock.runtime.files.plain_files import is_ours

LARGE_INDEX = 4 << 20
"""Bytes of an index from which its text does not stay in memory: about 10,000 shards."""
HUGE_INDEX = 16 << 20
"""Bytes of an index (40,000 shards) from which columns are stored: to load takes 5 ms, to read half a second."""


@dataclass(frozen=True)
class ColumnsPlace:
    root: Path
    folder: str
    """Path of the folder, relative to `root`."""
    group: int | None
    """Unix group whose members share the folder; None: this user alone."""
    timeout_s: float
    """Seconds to wait while another process makes the file."""

    @staticmethod
    def of(cache: ShardCache) -> ColumnsPlace:
        if not cache.in_place:
            return ColumnsPlace(cache.folder, STATE, cache.group, cache.timeout_s)
        try:
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # a user without a home folder
            home = os.devnull
        return ColumnsPlace(Path(home).absolute(), "penstock/indexes", None, cache.timeout_s)


def open_index(path: Path, index: Descriptor, where: str, place: ColumnsPlace) -> tuple[ShardTable, str]:
    """Return the table of an index, and its digest. A copy of a large table that is pickled to another process opens
    `path` again. `where`: for errors. Raises DatasetError for a file that is no index."""
    size = os.fstat(index.fileno()).st_size
    if size < LARGE_INDEX:
        data = index.read_all()
        return ShardTable.of(data, where), xxhash.xxh3_128_hexdigest(data)
    digest = digest_of(index)

    def made() -> ShardTable:
        data = index.read_all()
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise DatasetError(f"{where} was changed while it was read. Open the dataset again")
        return ShardTable.of(data, where, index)

    columns = _StoredColumns(place, digest)
    table = made() if size < HUGE_INDEX else columns.load(index, where) or columns.make(made, index, where)
    table.reopen = _reopened, (path, where, place, digest)
    return table, digest


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
    """Return the index of version 1, at `path`, if it was made from the index with this digest, as when a writer
    appends to a dataset without versions (dataset_versions.py)."""
    try:
        first = Descriptor(path)
    except FileNotFoundError:
        return None
    return first if file_notes(first).get(PRECEDED_NOTE) == digest else None


class _StoredColumns:
    def __init__(self, place: ColumnsPlace, digest: str) -> None:
        self._place, self._name = place, f"{place.folder}/{digest}.npy"

    def load(self, index: Descriptor, where: str) -> ShardTable | None:
        """Return the table from the file; None if there is no usable one."""
        try:
            with parent_of(self._place.root, self._name) as (folder, name):
                file = Descriptor(name, folder=folder)
            if is_ours(os.fstat(file.fileno()), self._place.group):
                saved = np.load(f"/proc/self/fd/{file.fileno()}", mmap_mode="r", allow_pickle=False)
                return ShardTable.loaded(saved, index, where)
        except (OSError, EOFError, ValueError, TypeError, LookupError):
            pass
        return None

    def make(self, made: Callable[[], ShardTable], index: Descriptor, where: str) -> ShardTable:
        """Return `made()`, and store its columns; or load those that another process has stored meanwhile."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                os.makedirs(self._place.root, exist_ok=True)
                with parent_of(self._place.root, self._name, make=True):
                    pass
                stack.enter_context(self._locked(where))
                if (table := self.load(index, where)) is not None:
                    return table
            table = made()
            with contextlib.suppress(OSError):  # a folder that cannot be written, or a full disk
                self._save(table)
                table = self.load(index, where) or table
        return table

    @contextlib.contextmanager
    def _locked(self, where: str) -> Iterator[None]:
        lock = take_within(str(self._place.root), f"{self._name}.lock", self._place.timeout_s)
        if lock is None:
            raise ShardUnavailableError(
                f"{where}: another process has held {self._place.root}/{self._name}.lock for "
                f"{self._place.timeout_s:g} s. End it, or raise timeout_s"
            )
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.remove()
            lock.release()

    def _save(self, table: ShardTable) -> None:
        with parent_of(self._place.root, self._name) as (folder, name):
            temporary = f"{name}!new"
            columns = Descriptor(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600, folder=folder)
            try:
                share(columns.fileno(), self._place.group, 0o660)
                with open(columns.fileno(), "r+b", closefd=False) as file:
                    np.save(file, table.saved())
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
