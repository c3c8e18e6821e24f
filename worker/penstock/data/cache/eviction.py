"""Eviction from a cache's folder, by one process at a time, under a lock. To *count* is to read the version files
(shard_versions.py) of all shards; to *claim* bytes is to write them into the shard's version file before they are
fetched.

A count of 10,000 shards takes 50 ms. So the lock's file keeps an upper bound of the bytes in use, and a claim counts
only if the bound leaves too little space:

- A claim raises the bound before it is written, and only a count lowers it: a killed process may leave it too high.
- Each process counts at its first claim, because the bound may be out of date after a power failure.
- In a large cache an eviction frees more than is needed, so that the next claims need no count.

The least recently used shard goes first, and raw files whose packed form is in the cache before files that would have
to be fetched. A shard is kept while a process holds its lock, or if the user put files of it there that the remote
lacks; a prefetch also spares shards that were prefetched and not used yet. With or without a limit, shards are evicted
when the disk or the user's quota is full.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.data.cache.cache_state import CacheState
from penstock.data.cache.file_locks import LONGEST_TEXT, FileLock, take
from penstock.data.cache.shard_versions import ShardVersion
from penstock.runtime.files.inner_paths import unlink_below
from penstock.runtime.files.plain_files import read_plain

LARGE_CACHE = 1000
"""Number of shards from which a cache counts as large: to read their version files takes longer than 5 ms."""
SURPLUS = 0.01
"""Fraction of a large cache's limit that an eviction frees beyond what is needed."""
_BOUND_TEXT = re.compile(rb"at most (\d{1,20}) bytes\n")


class _Entry(NamedTuple):
    time_ns: int
    version: ShardVersion


class Eviction:
    """Eviction from one folder, by one process. Version files stay in memory, and are read again if they changed."""

    def __init__(self, state: CacheState, limit: int | None, fetchable: Callable[[str, int], bool]) -> None:
        """`limit` None: `claim` is never called. `fetchable(name, size)`: whether the remote has that file."""
        self._state = state
        self._limit = limit
        self._fetchable = fetchable
        self._entries: dict[str, _Entry] = {}
        self._has_counted = False
        self._unevictable: set[str] = set()
        """Keys of shards that the remote lacks (so as not to ask again), or whose files cannot be removed."""

    def claim(
        self, counting: FileLock, key: str, lock: FileLock, version: ShardVersion, *, demand: bool, exceed: bool = False
    ) -> bool:
        """Evict what is in the way of a shard, then write its record. Return False if there is not enough space, unless
        `exceed`. The caller holds `counting` (the eviction lock) and `lock`. `demand`: a reader waits, so prefetched
        shards may be evicted."""
        assert self._limit is not None
        bound = _decoded_bound(counting.read()) if self._has_counted else None
        if bound is None or bound + version.size > self._limit:
            if self._excess_after_eviction(key, version.size, demand=demand) > 0 and not exceed:
                return False
            bound = sum(entry.version.size for entry in self._entries.values())
            self._has_counted = True
        counting.write(b"at most %d bytes\n" % (bound + version.size))
        lock.write(version.encoded())
        return True

    def free(self, size: int, *, demand: bool) -> int:
        """Evict shards from a full disk until `size` bytes are freed or none is left; return the freed bytes. The
        caller holds the eviction lock. `demand`: as in `claim`."""
        self._read()
        missing = self._shrink(size, sparing=True)
        return size - (self._shrink(missing, sparing=False) if demand else missing)

    def _excess_after_eviction(self, key: str, size: int, *, demand: bool) -> int:
        """Evict shards but `key` until `size` more bytes fit. Return the bytes that exceed the limit, or <= 0."""
        assert self._limit is not None
        self._read()
        self._entries.pop(key, None)
        excess = sum(entry.version.size for entry in self._entries.values()) + size - self._limit
        if excess > 0 and len(self._entries) >= LARGE_CACHE:
            surplus = int(self._limit * SURPLUS)
            excess = self._shrink(excess + surplus, sparing=True) - surplus
        excess = self._shrink(excess, sparing=True)
        return self._shrink(excess, sparing=False) if demand else excess

    def _read(self) -> None:
        known, self._entries = self._entries, {}
        with os.scandir(os.path.join(self._state.root, self._state.shards)) as found:
            for file in found:
                with contextlib.suppress(OSError):  # evicted just now, or not a version file
                    time_ns = file.stat().st_mtime_ns
                    entry = known.get(file.name)
                    if entry is None or entry.time_ns != time_ns:
                        version = ShardVersion.decoded(read_plain(file.path, LONGEST_TEXT))
                        if version is None:
                            continue
                        entry = _Entry(time_ns, version)
                    self._entries[file.name] = entry

    def _shrink(self, excess: int, *, sparing: bool) -> int:
        """Evict shards until `excess` bytes are freed or none is left; return what remains of `excess`. `sparing`: keep
        shards that any process prefetched and has not used."""
        if excess <= 0:
            return excess
        turns = [
            (whole, entry.time_ns, key)
            for key, entry in self._entries.items()
            for whole in (False, True)
            if entry.version.size and (whole or (entry.version.packed and entry.version.raw))
        ]
        for whole, _, key in sorted(turns):
            if key in self._unevictable:
                continue
            excess -= self._evict(key, whole=whole, sparing=sparing)
            if excess <= 0:
                break
        return excess

    def _evict(self, key: str, *, whole: bool, sparing: bool) -> int:
        """Evict a shard, or without `whole` its raw files, whose packed form stays. Return the freed bytes."""
        if sparing:
            try:
                mark = take(self._state.root, f"{self._state.prefetched}/{key}", shared=False, create=False)
            except OSError:
                pass
            else:
                if mark is None:
                    return 0
                mark.remove()  # left by a process that died
                mark.release()
        try:
            lock = take(self._state.root, f"{self._state.shards}/{key}", shared=False, create=False)
        except OSError:  # evicted just now, or not a lock
            return 0
        if lock is None:
            return 0
        try:
            version = ShardVersion.decoded(lock.read())
            if version is None:
                return 0
            if not all(self._fetchable(name, size) for name, size in version.found):
                self._unevictable.add(key)
                return 0
            # Files are removed before the version: if a process is killed in between, the version does not match and is
            # ignored.
            for path, _ in version.removable if whole else version.evictable:
                self._remove(path)
            if not whole:
                before = self._entries[key]
                kept = replace(version, raw=(), evictable=(), size=sum(size for _, size in version.packed))
                # The age stays, but the time must differ, because other processes have read the version of the old one.
                self._entries[key] = _Entry(before.time_ns + 1, kept)
                lock.write(kept.encoded(), before.time_ns + 1)
                return before.version.size - kept.size
            self._state.remove_temporary(f"{self._state.fetching_folder}/{key}")
            lock.remove()
            return self._entries.pop(key).version.size
        except OSError:  # a link in the path, or another user's file: the shard stays
            self._unevictable.add(key)
            return 0
        finally:
            lock.release()

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            unlink_below(self._state.root, path)


def _decoded_bound(text: bytes) -> int | None:
    found = _BOUND_TEXT.fullmatch(text)
    return int(found[1]) if found else None


def same_disk(one: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(one).st_dev == os.stat(other).st_dev
    return False
