"""Room in a cache's folder: how many bytes it holds, and which shards go when there must be fewer.

Counted and evicted by one process at a time, under a lock. All is read from the stamps each time (a look at the times
of all, and a read of those that changed), so there is no count that a killed process could leave wrong. Bytes are
claimed before they are fetched, in the shard's stamp.

The least recently used goes first. Raw files whose packed form stays go before anything that must be fetched again.
Never what somebody has locked, and never what the place no longer has. For who fetches ahead, never what another has
fetched ahead and not used yet.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.data.cache.cache_state import CacheState
from penstock.data.cache.file_locks import FileLock, take
from penstock.data.cache.shard_versions import ShardVersion
from penstock.runtime.files.plain_files import read_plain

__all__ = ["Eviction"]


class _Entry(NamedTuple):
    time_ns: int
    version: ShardVersion


class Eviction:
    """For one process; what it has read is kept to be read again only if it changed."""

    def __init__(self, state: CacheState, limit: int, fetchable: Callable[[str, int], bool]) -> None:
        """`fetchable(name, size)`: whether the place has that file."""
        self._state = state
        self._limit = limit
        self._fetchable = fetchable
        self._entries: dict[str, _Entry] = {}
        self._only_copies: set[str] = set()
        """Keys of shards that the place did not have when it was asked; it is not asked again for each claim."""

    def claim(self, key: str, lock: FileLock, version: ShardVersion, *, demand: bool, exceed: bool = False) -> bool:
        """Write `version`, whose bytes count from now on, once there is room for them. `lock`: ours on the shard.

        The caller holds the lock of the room. False if there is no room; `exceed`: then it is written all the same.
        `demand`: somebody waits for the shard, so what was fetched ahead may go.
        """
        self._read()
        self._entries.pop(key, None)
        excess = sum(entry.version.size for entry in self._entries.values()) + version.size - self._limit
        for whole in (False, True):
            excess = self._shrink(excess, whole=whole, sparing=True)
        if demand:
            excess = self._shrink(excess, whole=True, sparing=False)
        if excess > 0 and not exceed:
            return False
        lock.write(version.encoded())
        return True

    def _read(self) -> None:
        known, self._entries = self._entries, {}
        with os.scandir(self._state.shards) as found:
            for file in found:
                with contextlib.suppress(FileNotFoundError):  # its evictor has just removed it
                    time_ns = file.stat().st_mtime_ns
                    entry = known.get(file.name)
                    if entry is None or entry.time_ns != time_ns:
                        version = ShardVersion.decoded(read_plain(file.path))
                        if version is None:
                            continue
                        entry = _Entry(time_ns, version)
                    self._entries[file.name] = entry

    def _shrink(self, excess: int, *, whole: bool, sparing: bool) -> int:
        """Evict until nothing is in excess, or nothing is left to evict; what then is in excess still."""
        if excess <= 0:
            return excess
        for key, entry in sorted(self._entries.items(), key=lambda item: item[1].time_ns):
            version = entry.version
            if key in self._only_copies or not version.size or (not whole and not (version.packed and version.raw)):
                continue
            freed = self._evict(key, whole=whole, sparing=sparing)
            excess -= freed
            if excess <= 0:
                break
        return excess

    def _evict(self, key: str, *, whole: bool, sparing: bool) -> int:
        """Bytes that it counts less now; 0 if it may not go."""
        if sparing:
            try:
                ahead = take(os.path.join(self._state.ahead, key), shared=False, create=False)
            except FileNotFoundError:
                pass
            else:
                if ahead is None:
                    return 0
                ahead.remove()  # of one who died
                ahead.release()
        try:
            lock = take(os.path.join(self._state.shards, key), shared=False, create=False)
        except FileNotFoundError:
            return 0
        if lock is None:
            return 0
        try:
            version = ShardVersion.decoded(lock.read())
            if version is None:
                return 0
            if not all(self._fetchable(name, size) for name, size in version.found):
                self._only_copies.add(key)
                return 0
            entry = self._entries.pop(key)
            # The files first: whoever is killed on the way leaves a stamp that does not fit, and is read as none.
            for path, _ in version.evictable:
                self._remove(path)
            if not whole:
                kept = replace(version, raw=(), evictable=(), size=sum(size for _, size in version.packed))
                lock.write(kept.encoded())
                # As old as it was, and yet another time than others have read it at.
                time_ns = entry.time_ns + 1
                os.utime(lock.path, ns=(time_ns, time_ns))
                self._entries[key] = _Entry(time_ns, kept)
                return entry.version.size - kept.size
            for path, _ in version.packed:
                self._remove(path)
            for path in glob.glob(os.path.join(glob.escape(self._state.fetching_folder), glob.escape(key) + "!*")):
                self._remove(path)
            lock.remove()
            return entry.version.size
        finally:
            lock.release()

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._state.root, path))
