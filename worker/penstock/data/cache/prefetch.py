"""Shards fetched before anybody waits for them, by threads, in the order in which they will be needed.

What was fetched and not used yet is marked by a lock of its own, which keeps those who fetch ahead from driving out
each other's shards; who waits for a shard may drive it out. Errors are left for those who will wait for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from penstock.data.cache.cache_state import CacheState
from penstock.data.cache.file_locks import FileLock, take
from penstock.data.formats.shards import Shard
from penstock.proto.errors import PenstockError

__all__ = ["Prefetcher"]

EVICTION_PAUSE_S = 0.25
"""Between two looks for room: other processes do not say when they release something."""


MARK_S = 10.0
"""For a mark that somebody is just removing."""


class Prefetcher:
    """Of one process. Its threads start with the first list."""

    def __init__(
        self, state: CacheState, threads: int, bring: Callable[[Shard, str, Callable[[], None]], bool]
    ) -> None:
        """`bring(shard, key, decided)` has a shard there, or says that there is no room for it. It calls `decided` once
        it has room, or has to wait for another process: only then is the next one begun, so room goes in order."""
        self._state = state
        self._threads = threads
        self._bring = bring
        self._changed = threading.Condition()
        self._wanted: set[str] = set()
        """The keys that were asked for last, and have not been used since."""
        self._queue: deque[tuple[str, Shard]] = deque()
        """Of these, the ones that no thread has taken yet."""
        self._moving: set[str] = set()
        """The keys that a thread has taken."""
        self._deciding = ""
        """The key that was taken last, while it is not known whether there is room for it."""
        self._there: dict[str, FileLock] = {}
        """Key -> our mark on what was fetched."""
        self._full_until = 0.0
        """monotonic: till then there is no room."""
        self._workers: list[threading.Thread] = []

    def want(self, shards: Sequence[tuple[str, Shard]], but: Collection[str]) -> None:
        """Replace the list; keys in `but` are in use, and not looked at."""
        with self._changed:
            self._wanted = {key for key, _ in shards}.difference(but)
            dropped = [self._there.pop(key) for key in tuple(self._there) if key not in self._wanted]
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
        """Somebody of this process uses it: it needs no mark any more."""
        with self._changed:
            self._wanted.discard(key)
            lock = self._there.pop(key, None)
        if lock:
            _drop(lock)

    def look_for_eviction(self) -> None:
        """There may be some now."""
        with self._changed:
            self._full_until = 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """Threads end, those in a transfer once that is broken off; `books.closing` is set."""
        with self._changed:
            there, self._there = self._there, {}
            workers, self._workers = self._workers, []
            self._changed.notify_all()
        until = time.monotonic() + 1.0
        for worker in workers:
            if worker is not threading.current_thread():  # in which a dataset may be collected
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
                if key not in self._wanted or key in self._there or key in self._moving:
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
        """Until the next shard may be taken; None: until something changes."""
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
        mark = self._state.wait(os.path.join(self._state.ahead, key), until, shard.name, shared=True)
        kept = False
        try:
            if not self._bring(shard, key, lambda: self._decided(key)):
                return False
            with self._changed:
                if key in self._wanted and not self._state.closing.is_set():
                    kept = self._there.setdefault(key, mark) is mark
            return True
        finally:
            if not kept:
                _drop(mark)


def _drop(lock: FileLock) -> None:
    """Give a lock of what was fetched ahead back; its last holder removes the file."""
    path = lock.path
    lock.release()
    with contextlib.suppress(FileNotFoundError):
        last = take(path, shared=False, create=False)
        if last:
            last.remove()
            last.release()
