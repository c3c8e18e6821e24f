"""Download of one shard's files into the cache's folder. A file's *raw* form is the one that is read; its *packed* form
is the compressed file, if there is one.

A file gets its final name only when it is complete, verified and synced to the disk; a damaged one is removed, or the
next run would read it. Only the holder of the shard's fetch lock (cache_state.py) runs this code.
data/remote/folders.py repeats transfers that fail.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from penstock.data.cache.cache_state import STATE
from penstock.data.cache.file_hashes import digest_of, fastest_of
from penstock.data.cache.index_watch import RemoteIndex
from penstock.data.cache.shard_versions import ShardVersion, file_stat, origin_of
from penstock.data.formats.compressed_files import unpack
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.remote.file_versions import is_unchanged
from penstock.data.remote.folders import RemoteFolder
from penstock.data.remote.transfer import unwritable
from penstock.proto.errors import DatasetError, ShardCorruptError, ShardUnavailableError
from penstock.runtime.files.inner_paths import is_strange_link, parent_of, unlink_below
from penstock.runtime.files.plain_files import open_plain, read_plain

ATTEMPTS = 2
"""Downloads of a file that arrives damaged each time, before an error is raised."""


def put(data: memoryview, temporary: Path, folder: Path, name: str, source: str) -> None:
    """Write `data` to a file below `folder` completely or not at all. `source`: for errors."""
    try:
        with open(temporary, "wb", buffering=0, opener=open_plain) as file:
            left = data
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError as error:
                raise unwritable(error, str(temporary), len(data), source) from error
        give_name(temporary, folder, name)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def give_name(temporary: Path, folder: Path, name: str) -> None:
    """Rename a temporary file without following links of other users. Its bytes are synced first, so that a power loss
    cannot leave the name without the bytes."""
    descriptor = open_plain(temporary, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    with parent_of(folder, name, make=True) as (parent, last):
        os.replace(temporary, last, dst_dir_fd=parent)


def _numbered(temporary: Callable[[str], Path], number: int, kind: str) -> Path:
    return temporary(f"{number}{kind}")


class Downloads:
    """Downloads of a dataset's shards into one cache folder."""

    def __init__(
        self,
        remote: RemoteFolder | None,
        folder: Path,
        index: str,
        *,
        validate: str | Literal[False] | None,
        keep_packed: bool,
    ) -> None:
        """`remote` None: `folder` is the dataset itself. `validate`, `keep_packed`: as in ShardCache."""
        self._remote = remote
        self._folder = folder
        self._validate = validate
        self._keep_packed = keep_packed
        self._index = RemoteIndex(remote, folder, f"{STATE}/{index}") if remote and not remote.local else None

    def before_index_fetch(self) -> None:
        """Record which version of its index the remote has (ETag or time), before the index is fetched."""
        if self._index is not None:
            self._index.record_version()

    def origin(self, shard: Shard) -> str:
        return origin_of(shard, self._remote.local if self._remote else None)

    def accepts(self, version: ShardVersion, shard: Shard) -> bool:
        """Return True if `version` describes the files that the index lists now, verified as `validate` asks for."""
        if version.origin != self.origin(shard):
            return False
        return version.hash == self._validate if self._validate else bool(version.hash) or not self._verified_by(shard)

    def _verified_by(self, shard: Shard) -> str:
        stored = (shard.files[0].raw, shard.files[0].packed)
        return next((name for each in stored if each and (name := self._algorithm(each))), "")

    def _algorithm(self, stored: StoredFile) -> str:
        if self._validate is None:
            return fastest_of(stored.hashes)
        return self._validate or ""

    def forget(self, version: ShardVersion) -> None:
        """Remove the fetched files of an outdated record: the remote has other data under these names now."""
        if self._remote is not None:
            for name, _ in version.removable:
                self._unlink(name)

    def need(self, shard: Shard, *, from_remote: bool) -> ShardVersion:
        """Return the record that claims space for a shard (eviction.py): its `size` is the most that the shard may take
        on disk. `from_remote`: the cache fetched the files that are there already, and not the user."""
        return ShardVersion(
            evictable=tuple((file.raw.name, file.raw.size) for file in shard.files),
            packed=tuple((file.packed.name, file.packed.size) for file in shard.files if file.packed),
            size=sum(self._need(file) for file in shard.files),
            found=tuple(
                (stored.name, stored.size)
                for file in shard.files
                for stored in (file.raw, file.packed)
                if stored and not from_remote and self._exists(self._own(stored), stored)
            ),
        )

    def _need(self, file: ShardFile) -> int:
        if self._remote is None or self._exists(self._in_place(file.raw), file.raw):
            return 0
        if file.packed is None or self._exists(self._in_place(file.packed), file.packed):
            return file.raw.size
        if self._exists(self._own(file.raw), file.raw) and not self._keep_packed:
            return file.raw.size
        return file.raw.size + file.packed.size

    def fill(self, shard: Shard, temporary: Callable[[str], Path], until: float, *, from_remote: bool) -> ShardVersion:
        """Verify the shard's files that are there, get those that are missing or damaged, and return the record of all.
        `until`: monotonic; `temporary`: path of a temporary file by "packed" or "raw"; `from_remote`: as in `need`."""
        made_of = self.origin(shard)
        raw: list[tuple[str, int, int]] = []
        evictable: list[tuple[str, int]] = []
        packed: list[tuple[str, int]] = []
        found: list[tuple[str, int]] = []
        for number, file in enumerate(shard.files):
            path, was_there = self._raw(shard, file, partial(_numbered, temporary, number), until)
            size_and_time = file_stat(str(path))
            if size_and_time is None:
                raise ShardUnavailableError(f"{path} was removed while it was fetched or verified")
            in_place = path != self._own(file.raw)
            raw.append((str(path) if in_place else file.raw.name, *size_and_time))
            if in_place or self._remote is None:
                continue
            evictable.append((file.raw.name, file.raw.size))
            if was_there and not from_remote:
                source = file.packed or file.raw
                found.append((source.name, source.size))
            if file.packed and self._exists(self._own(file.packed), file.packed):
                packed.append((file.packed.name, file.packed.size))
        size, verified_by = sum(size for _, size in evictable + packed), self._verified_by(shard)
        return ShardVersion(tuple(raw), tuple(evictable), size, verified_by, tuple(found), made_of, tuple(packed))

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            unlink_below(self._folder, name)

    def _own(self, stored: StoredFile) -> Path:
        return self._folder / stored.name

    def _drop_strange_links(self, file: ShardFile) -> None:
        """Remove links that another user put in place of a shard's file. One may lead to a private file of this user,
        which would be decompressed into the folder, where others can read it."""
        for stored in (file.raw, file.packed):
            if stored and self._remote is not None and is_strange_link(self._own(stored)):
                self._unlink(stored.name)

    def _in_place(self, stored: StoredFile) -> Path | None:
        return self._remote.local / stored.name if self._remote and self._remote.local else None

    def _exists(self, path: Path | None, stored: StoredFile) -> bool:
        found = file_stat(str(path)) if path else None
        return found is not None and found[0] == stored.size

    def _raw(self, shard: Shard, file: ShardFile, temporary: Callable[[str], Path], until: float) -> tuple[Path, bool]:
        """Fetch, verify and decompress a file as needed. Return its raw path, and True if it was there in any form."""
        self._drop_strange_links(file)
        for path in (self._in_place(file.raw), self._own(file.raw)):
            if path and self._usable(path, file.raw):
                return path, True
        own = self._own(file.raw)
        if file.packed is None:
            self._fetch(file.raw, temporary("raw"), until)
            return own, False
        for path in (self._in_place(file.packed), self._own(file.packed)):
            if path and self._exists(path, file.packed):
                try:
                    self._inflate(shard, file, path, temporary("raw"))
                except ShardCorruptError:
                    if self._is_only_copy(path, file.packed):
                        raise
                    self._unlink(file.packed.name)
                    continue
                if not self._keep_packed and not self._is_only_copy(path, file.packed):
                    self._unlink(file.packed.name)
                return own, path == self._own(file.packed)
        self._fetch_packed(shard, file, temporary, until)
        return own, False

    def _usable(self, path: Path, stored: StoredFile) -> bool:
        """Return True for a file of right size and hash. Remove a damaged one, or raise ShardCorruptError if it is the
        only copy."""
        found = file_stat(str(path))
        if found is None:
            return False
        try:
            if found[0] != stored.size:
                raise ShardCorruptError(
                    f"{path} must have {stored.size} bytes, as the dataset's index lists, got {found[0]}. Copy it again"
                )
            self._verify(path, stored, str(path))
        except ShardCorruptError:
            if self._is_only_copy(path, stored):
                raise
            self._unlink(stored.name)
            return False
        return True

    def _is_only_copy(self, path: Path, stored: StoredFile) -> bool:
        """Return True for a file never to remove: in a remote on this machine, or in a folder without a remote."""
        return self._remote is None or path == self._in_place(stored)

    def _verify(self, source: Path | bytes | memoryview, stored: StoredFile, name: str) -> None:
        algorithm = self._algorithm(stored)
        if not algorithm:
            return
        expected = stored.hashes.get(algorithm)
        if expected is None:
            known = ", ".join(sorted(stored.hashes)) or "none"
            raise DatasetError(
                f"{name}: validate_hash={algorithm!r} needs this hash of each file in the dataset's index, got {known}"
            )
        digest = digest_of(source, algorithm)
        if digest != expected.lower():
            raise ShardCorruptError(
                f"{name} is damaged: its {algorithm} hash must be {expected}, got {digest}. Upload the file again; "
                "if the dataset was written again since its index was fetched, use another cache folder"
            )

    def _fetch(self, stored: StoredFile, temporary: Path, until: float) -> None:
        def name_it(source: str) -> None:
            self._verify(temporary, stored, f"{source} ({self._own(stored)})")
            give_name(temporary, self._folder, stored.name)

        self._download(stored, temporary, until, name_it)

    def _fetch_packed(self, shard: Shard, file: ShardFile, temporary: Callable[[str], Path], until: float) -> None:
        assert file.packed is not None
        packed, got = file.packed, temporary("packed")

        def inflate(source: str) -> None:
            self._inflate(shard, file, got, temporary("raw"))
            if self._keep_packed:
                give_name(got, self._folder, packed.name)
            else:
                got.unlink()

        self._download(packed, got, until, inflate)

    def _download(self, stored: StoredFile, temporary: Path, until: float, use: Callable[[str], None]) -> None:
        """Download a file, then call `use` (with the address, for errors), which verifies and renames or decompresses
        it. If it is damaged, download it again, up to ATTEMPTS times in all."""
        if self._remote is None:
            raise ShardUnavailableError(f"{self._own(stored)} is missing, and there is no remote to fetch it from")
        source = self._remote.url_of(stored.source or stored.name)
        for last in range(1 - ATTEMPTS, 1):
            try:
                left = max(0.0, until - time.monotonic())
                if stored.source:
                    self._remote.download_range(
                        stored.source, temporary, begin=stored.begin, size=stored.size, deadline_s=left
                    )
                else:
                    self._remote.download(stored.name, temporary, expected_size=stored.size, deadline_s=left)
                unverified = self._index is not None and self._validate is None and not stored.hashes
                if self._index is not None and unverified and not is_unchanged(self._remote, stored, left):
                    self._index.check()
                use(source)
                return
            except ShardCorruptError as error:
                if not last:
                    if source in str(error):
                        raise
                    raise ShardCorruptError(f"{source}: {error}") from error
            except OSError as error:
                raise unwritable(error, str(self._folder), stored.size, source) from error

    def _inflate(self, shard: Shard, file: ShardFile, path: Path, temporary: Path) -> None:
        """Decompress a file into the cache's folder. Verify its packed and its raw bytes."""
        assert file.packed is not None
        data = read_plain(path, file.packed.size)
        source = (
            str(path) if self._remote is None else f"{self._remote.url_of(file.packed.name)} ({self._own(file.raw)})"
        )
        self._verify(data, file.packed, source)
        try:
            raw = unpack(data, shard.compression, limit=file.raw.size)
        except ShardCorruptError as error:
            raise ShardCorruptError(f"{source}: {error}") from error
        if len(raw) != file.raw.size:
            raise ShardCorruptError(
                f"{source} must decompress to {file.raw.size} bytes, as the index lists, got {len(raw)}"
            )
        self._verify(raw, file.raw, f"{source} inflated")
        put(raw, temporary, self._folder, file.raw.name, source)
