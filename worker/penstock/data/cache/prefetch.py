"""Prefetch of shards by threads, in the order in which they will be needed.

A shard that is being prefetched, or was prefetched and not used yet, has a *mark*: a lock that the prefetching process
holds. A marked shard is not evicted to prefetch another one. It may be evicted if a reader waits for space. A failed
prefetch raises no error: the reader that needs the shard fetches it again, and gets the error then.

The boxes (data-parallel ranks) of a host share a budget of bytes evenly, so they must be counted. Each process that
prefetches within such a budget holds the lock of a file whose name begins with the process's box. The boxes in the
names of all locked files are counted. A killed process does not count, because the kernel has released its lock.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass

from penstock.data.cache.cache_state import CacheState
from penstock.data.cache.file_locks import FileLock, take
from penstock.data.formats.shards import Shard
from penstock.proto.errors import PenstockError

__all__ = ["FetchStats", "HostReaders", "Prefetcher", "host_process_id"]

EVICTION_PAUSE_S = 0.25
"""Seconds between two attempts to prefetch when the cache is full. The cache is polled, because other processes do not
report when they release a shard."""
MARK_S = 10.0
"""Seconds to wait for the lock that marks a shard as prefetched, or a process as prefetching. Another process may hold
the lock for a moment, to remove its file."""


@dataclass(frozen=True)
class FetchStats:
    """Counts of what one process has fetched of a dataset since it opened the dataset."""

    fetched_shards: int = 0
    """Number of shards that were fetched, or that were in the folder and had to be verified or decompressed. A row
    group, span or footer that is fetched alone counts as one."""
    fetched_bytes: int = 0
    """Number of bytes that the shards of `fetched_shards` take in the cache's folder."""
    ahead_shards: int = 0
    """Number of shards that were prefetched and not used yet. One that was evicted meanwhile still counts."""
    ahead_bytes: int = 0
    """Number of bytes of the shards of `ahead_shards`, decompressed."""
    waited_s: float = 0.0
    """Seconds that reads of samples waited until a shard was fetched: by the read itself, by a prefetch that had not
    ended, or by another process. If the value grows after the first batches, prefetch farther ahead, or use a faster
    remote."""

    def __add__(self, other: FetchStats) -> FetchStats:
        return FetchStats(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


def host_process_id(process: int | None = None) -> str:
    """Return an identifier of a process that is unique on this host. A process ID alone is not unique if containers
    share a cache: each container counts from 1. `process`: process ID; None: the calling process."""
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{process or os.getpid()}"


class HostReaders:
    """Registration of this process among the processes of the host that prefetch into one cache's folder within a
    budget. Processes that need the same shards are a group, such as the workers of one box (data-parallel rank). Any
    thread may call the methods. A forked child must make an object of its own."""

    _numbers = itertools.count()

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._lock = threading.RLock()  # reentrant: garbage collection of a dataset closes this
        self._own: FileLock | None = None
        """Lock by which other processes see that this process prefetches; None while it does not."""

    def groups(self, group: str) -> int:
        """Register this process as one of the group called `group`. Return the number of groups that have a living
        process. Return 1 if the cache's folder cannot be used; the next fetch raises the error."""
        with self._lock, contextlib.suppress(PenstockError, OSError):
            self._state.prepare()
            if self._own is None or not os.path.basename(self._own.name).startswith(f"{group}."):
                self._leave()
                name = f"{self._state.readers}/{group}.{os.getpid()}.{next(self._numbers)}"
                self._own = self._state.wait(name, time.monotonic() + MARK_S, "", shared=False)
            living = {group}
            for name in os.listdir(os.path.join(self._state.root, self._state.readers)):
                other = name.partition(".")[0]
                if other not in living and self._lives(name):
                    living.add(other)
            return len(living)
        return 1

    def close(self) -> None:
        """Stop counting this process as one that prefetches."""
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            with contextlib.suppress(OSError):  # the folder was removed
                own.remove()
            own.release()

    def _lives(self, name: str) -> bool:
        try:
            left = take(self._state.root, f"{self._state.readers}/{name}", shared=True, create=False)
        except OSError:  # removed just now
            return False
        if left is not None:
            _drop(left)
        return left is None


class Prefetcher:
    """Threads of one process that prefetch shards. The threads start when the first list of shards is given."""

    def __init__(
        self, state: CacheState, threads: int, fetch: Callable[[Shard, str, Callable[[], None]], bool]
    ) -> None:
        """Store the settings, without starting a thread.

        Args:
            state: locks of the cache's folder.
            threads: largest number of threads.
            fetch: `fetch(shard, key, decided)` fetches a shard and returns True, or returns False if the cache has no
                space for it. It calls `decided` as soon as it has claimed space, or if it must wait for another
                process. Only then does another thread begin with the next shard, so shards get space in the list's
                order.
        """
        self._state = state
        self.readers = HostReaders(state)
        self._threads = threads
        self._fetch_shard = fetch
        self._changed = threading.Condition()
        self._wanted: dict[str, int] = {}
        """Key -> size in bytes, for the shards of the current list that this process has not used yet."""
        self._queue: deque[tuple[str, Shard]] = deque()
        """(key, shard) of each shard of the list that no thread has taken yet."""
        self._moving: set[str] = set()
        """Keys of the shards that threads are fetching."""
        self._deciding = ""
        """Key of the shard that a thread took from the list and for which space is neither claimed nor refused yet; ""
        if there is none. No thread takes another shard meanwhile."""
        self._marks: dict[str, FileLock] = {}
        """Marks (locks) of this process on prefetched shards, by key."""
        self._full_until = 0.0
        """Monotonic time until which the cache is assumed to be full."""
        self._workers: list[threading.Thread] = []

    def want(self, shards: Sequence[tuple[str, Shard]], but: Collection[str]) -> None:
        """Replace the list of shards to prefetch, given as (key, shard). `but`: keys of shards that are in use, which
        are left out."""
        with self._changed:
            self._wanted = {key: shard.size for key, shard in shards if key not in but}
            dropped = [self._marks.pop(key) for key in tuple(self._marks) if key not in self._wanted]
            self._queue = deque(shards)
            self._full_until = 0.0
            while len(self._workers) < min(self._threads, len(shards)):
                worker = threading.Thread(target=self._work, name="penstock-shards", daemon=True)
                self._workers.append(worker)
                worker.start()
            self._changed.notify_all()
        for lock in dropped:
            _drop(lock)

    def used(self, key: str) -> None:
        """Remove the mark (a lock) of a prefetched shard, because this process uses the shard now."""
        with self._changed:
            self._wanted.pop(key, None)
            lock = self._marks.pop(key, None)
        if lock:
            _drop(lock)

    def ahead(self) -> tuple[int, int]:
        """Return the number of shards that were prefetched and not used yet, and their size in bytes."""
        with self._changed:
            sizes = [self._wanted.get(key, 0) for key in self._marks]
        return len(sizes), sum(sizes)

    def check_space(self) -> None:
        """Try the next prefetch at once, because a shard was released and can be evicted."""
        with self._changed:
            self._full_until = 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads. The caller sets `CacheState.closing` first, which cancels the transfers in progress."""
        with self._changed:
            there, self._marks = self._marks, {}
            workers, self._workers = self._workers, []
            self._changed.notify_all()
        until = time.monotonic() + 1.0
        for worker in workers:
            if worker is not threading.current_thread():  # garbage collection may close a dataset in one of the threads
                worker.join(max(0.0, until - time.monotonic()))
        for lock in there.values():
            _drop(lock)
        self.readers.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._state.closing.is_set() and (pause := self._pause_s()) != 0:
                    self._changed.wait(pause)
                if self._state.closing.is_set():
                    return
                key, shard = self._queue.popleft()
                if key not in self._wanted or key in self._marks or key in self._moving:
                    continue
                self._moving.add(key)
                self._deciding = key
            fits = True
            with contextlib.suppress(PenstockError, OSError):
                fits = self._fetch(shard, key)
            with self._changed:
                self._moving.discard(key)
                if not fits and key in self._wanted:
                    self._queue.appendleft((key, shard))
                    self._full_until = time.monotonic() + EVICTION_PAUSE_S
            self._decided(key)

    def _pause_s(self) -> float | None:
        """Return the seconds until a thread may take the next shard from the list; None if it must wait for an event
        instead."""
        if not self._queue or self._deciding:
            return None
        return max(0.0, self._full_until - time.monotonic())

    def _decided(self, key: str) -> None:
        with self._changed:
            if self._deciding == key:
                self._deciding = ""
                self._changed.notify_all()

    def _fetch(self, shard: Shard, key: str) -> bool:
        self._state.prepare()
        until = time.monotonic() + MARK_S
        mark = self._state.wait(f"{self._state.prefetched}/{key}", until, shard.name, shared=True)
        kept = False
        try:
            if not self._fetch_shard(shard, key, lambda: self._decided(key)):
                return False
            with self._changed:
                if key in self._wanted and not self._state.closing.is_set():
                    kept = self._marks.setdefault(key, mark) is mark
            return True
        finally:
            if not kept:
                _drop(mark)


def _drop(lock: FileLock) -> None:
    lock.release()
    with contextlib.suppress(OSError):  # the file was removed already, or is no longer a lock
        last = take(lock.root, lock.name, shared=False, create=False)
        if last:
            last.remove()
            last.release()
