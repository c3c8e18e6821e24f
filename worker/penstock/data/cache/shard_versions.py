"""What a cache knows of a shard on disk, in a file that is also the lock of its users.

A stamp says that files were complete, and verified by which hash, when they had these sizes and times: whoever finds
them so need not look again. It is written last, and names all that may be evicted.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from penstock.data.formats.shards import Shard

__all__ = ["ShardVersion", "key_of", "origin_of", "seen"]

_LONGEST_NAME = 200
"""Characters of a file's name; filesystems take 255, and temporary files' names are longer."""


def key_of(name: str) -> str:
    """A file name for a shard's name; it holds no "!"."""
    key = quote(name, safe="")
    return key if len(key) <= _LONGEST_NAME else hashlib.sha256(name.encode()).hexdigest()


def seen(path: str) -> tuple[int, int] | None:
    """A file's size and time; None if there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size, found.st_mtime_ns


def origin_of(shard: Shard, place: Path | None) -> str:
    """Of what the place has as this shard: other data have another one, as far as the index, or the time of a file in a
    folder of this machine, tells. A dataset may be written again where an older one was."""
    digest = hashlib.sha256()
    for file in shard.files:
        for stored in (file.raw, file.packed):
            if stored:
                found = seen(str(place / stored.name)) if place else None
                digest.update(f"{stored.name} {stored.size} {sorted(stored.hashes.items())} {found}\n".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class ShardVersion:
    """Of one shard. Paths are relative to the cache's folder, or absolute for files that are used where they lie."""

    raw: tuple[tuple[str, int, int], ...] = ()
    """(path, size, time in ns) of each raw file; empty while it is being fetched."""
    packed: tuple[tuple[str, int], ...] = ()
    """(path, size) of packed files that stay beside them."""
    evictable: tuple[tuple[str, int], ...] = ()
    """(path, size) of raw files that may be evicted."""
    size: int = 0
    """Bytes that it counts against the limit: all that it may have on disk now."""
    hash: str = ""
    """Algorithm by which it was verified; "" if it was not."""
    found: tuple[tuple[str, int], ...] = ()
    """(name, size) of files that were there before us: evicted only if the place has them, too."""
    origin: str = ""
    """Of what it was made, see `origin_of`; empty while it is being fetched."""

    def encoded(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @staticmethod
    def decoded(text: bytes) -> ShardVersion | None:
        """None for what is no stamp, also a half-written one."""
        try:
            values = json.loads(text.partition(b"\n")[0])  # what follows is left of a longer one
            version = ShardVersion(
                raw=tuple((str(path), int(size), int(time)) for path, size, time in values["raw"]),
                packed=tuple((str(path), int(size)) for path, size in values["packed"]),
                evictable=tuple((str(path), int(size)) for path, size in values["evictable"]),
                size=int(values["size"]),
                hash=str(values["hash"]),
                found=tuple((str(name), int(size)) for name, size in values["found"]),
                origin=str(values["origin"]),
            )
        except (ValueError, KeyError, TypeError):
            return None
        # A folder that came from elsewhere may bring stamps along: nothing outside of it is removed for what they say.
        removable = [PurePosixPath(path) for path, _ in (*version.packed, *version.evictable)]
        return None if any(path.is_absolute() or ".." in path.parts for path in removable) else version

    def holds(self, shard: Shard, folder: str) -> tuple[Path, ...] | None:
        """The raw files' paths, if they are as they were."""
        if len(self.raw) != len(shard.files):
            return None
        paths = []
        for (name, size, time), file in zip(self.raw, shard.files, strict=True):
            path = os.path.join(folder, name)
            if size != file.raw.size or seen(path) != (size, time):
                return None
            paths.append(Path(path))
        return tuple(paths)
