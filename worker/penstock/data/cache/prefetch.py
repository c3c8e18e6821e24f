"""Prefetch of shards by threads, in the order in which they will be needed.

Each prefetched shard has a *mark* until it is used, a lock of the prefetching process: only a reader that waits for
space may evict it, not another prefetch. A failed prefetch raises no error: the reader fetches the shard again, and
gets it then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass

from penstock.data.cache.cache_state import CacheState
from penstock.data.cache.file_locks import FileLock, take
from penstock.data.formats.shards import Shard
from penstock.proto.errors import PenstockError

EVICTION_PAUSE_S = 0.25
"""Seconds between attempts while the cache is full: other processes do not report when they release a shard."""
MARK_S = 10.0
"""Seconds to wait for the lock of a mark, which another process may hold for a moment to remove its file."""


@dataclass(frozen=True)
class FetchStats:
    """Counts of what one process has fetched of a dataset since it opened the dataset."""

    fetched_shards: int = 0
    """Shards fetched, or found and verified or decompressed. A row group, span or footer fetched alone is one."""
    fetched_bytes: int = 0
    """Bytes that the shards of `fetched_shards` take in the cache's folder."""
    ahead_shards: int = 0
    """Shards that were prefetched and not used yet, also if evicted meanwhile."""
    ahead_bytes: int = 0
    """Bytes of the shards of `ahead_shards`, decompressed."""
    waited_s: float = 0.0
    """Seconds that reads of samples waited for shards, whoever fetched them. If it grows after the first batches,
    prefetch farther ahead, or use a faster remote."""

    def __add__(self, other: FetchStats) -> FetchStats:
        return FetchStats(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


class Prefetcher:
    """Threads of one process that prefetch shards. They start with the first list."""

    def __init__(
        self, state: CacheState, threads: int, fetch: Callable[[Shard, str, Callable[[], None]], bool]
    ) -> None:
        """`fetch(shard, key, decided)` returns False if there is no space. It calls `decided` once it has claimed space
        or must wait for another process; only then does another thread begin, so shards get space in order."""
        self._state = state
        self._threads = threads
        self._fetch_shard = fetch
        self._changed = threading.Condition()
        self._wanted: dict[str, int] = {}
        """Key -> bytes, for the shards of the list that this process has not used yet."""
        self._queue: deque[tuple[str, Shard]] = deque()
        """(key, shard) of each shard of the list that no thread has taken yet."""
        self._moving: set[str] = set()
        self._deciding = ""
        """Key of the shard for which a thread still claims space, and others wait; "" for none."""
        self._marks: dict[str, FileLock] = {}
        """Marks of this process on prefetched shards, by key."""
        self._full_until = 0.0
        """Monotonic time until which the cache is assumed to be full."""
        self._workers: list[threading.Thread] = []

    def want(self, shards: Sequence[tuple[str, Shard]], but: Collection[str]) -> None:
        """Replace the list of (key, shard) to prefetch; leave out the keys in `but`, which are in use."""
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
        """Remove the mark of a shard, because this process uses it now."""
        with self._changed:
            self._wanted.pop(key, None)
            lock = self._marks.pop(key, None)
        if lock:
            _drop(lock)

    def ahead(self) -> tuple[int, int]:
        """Return the number of shards that were prefetched and not used yet, and their bytes."""
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
        """Return the seconds until a thread may take the next shard; None if it must wait for an event."""
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
