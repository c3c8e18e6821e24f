"""Version of a shard on disk: a record of its complete files in a cache, so that a process that finds them unchanged
does not verify them again. While the shard is fetched, a version without files claims the space. Its file,
.penstock/shards/KEY, is also the lock that the shard's readers share (cache_state.py)."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import msgspec

from penstock.data.formats.shards import Shard

_LONGEST_NAME = 200
"""Longest key in characters. Filesystems allow 255; temporary files append to the key."""


def key_of(name: str) -> str:
    """Return a shard's key, a file name without "!": train%2Fa.mds for train/a.mds, a hash for a long name."""
    key = quote(name, safe="")
    return key if len(key) <= _LONGEST_NAME else hashlib.sha256(name.encode()).hexdigest()


def file_stat(path: str) -> tuple[int, int] | None:
    """Return a file's size in bytes and its modification time in ns; None if it does not exist."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size, found.st_mtime_ns


def origin_of(shard: Shard, remote: Path | None) -> str:
    """Return a digest of a shard's files as the index lists them, and for a remote on this machine of their sizes and
    times. A changed digest shows that other data were written to the same address."""
    digest = hashlib.sha256()
    for file in shard.files:
        for stored in (file.raw, file.packed):
            if stored:
                found = file_stat(str(remote / stored.name)) if remote else None
                digest.update(f"{stored.name} {stored.size} {sorted(stored.hashes.items())} {found}\n".encode())
                digest.update(f"{stored.version}{shard.content}".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class ShardVersion:
    """Record of one shard's complete files. Paths are relative to the cache's folder, or absolute if read in place."""

    raw: tuple[tuple[str, int, int], ...] = ()
    """(path, bytes, modification time in ns) of each raw file; empty while being fetched, or once evicted."""
    evictable: tuple[tuple[str, int], ...] = ()
    """(path, bytes) of each raw file that may be evicted."""
    size: int = 0
    """Bytes that count against the cache's limit: the most that the shard may take on disk now."""
    hash: str = ""
    """Algorithm that verified the files; "" for none."""
    found: tuple[tuple[str, int], ...] = ()
    """(name, bytes) of each file that was there before the cache fetched anything, packed if it has such a form. The
    shard is evicted only if the remote has these files, too."""
    origin: str = ""
    """See `origin_of`; empty while the shard is being fetched."""
    packed: tuple[tuple[str, int], ...] = ()
    """(path, bytes) of each packed file that the cache keeps."""

    @property
    def removable(self) -> tuple[tuple[str, int], ...]:
        return (*self.evictable, *self.packed)

    def encoded(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @staticmethod
    def decoded(text: bytes) -> ShardVersion | None:
        """Return the record in a text; None for other text, a half-written record, and paths out of the folder."""
        try:
            # further lines are the rest of an older, longer text
            version = msgspec.json.decode(text.partition(b"\n")[0], type=ShardVersion)
        except (ValueError, RecursionError):
            return None
        # A copied folder may contain version files of another folder, which must not cause files outside of this folder
        # to be removed.
        removable = [PurePosixPath(path) for path, _ in version.removable]
        return None if any(path.is_absolute() or ".." in path.parts for path in removable) else version

    def holds(self, shard: Shard, folder: str) -> tuple[Path, ...] | None:
        """Return the shard's raw files; None if one is missing, or its size or time differs from this record."""
        if len(self.raw) != len(shard.files):
            return None
        paths = []
        for (name, size, time), file in zip(self.raw, shard.files, strict=True):
            path = os.path.join(folder, name)
            if size != file.raw.size or file_stat(path) != (size, time):
                return None
            paths.append(Path(path))
        return tuple(paths)
