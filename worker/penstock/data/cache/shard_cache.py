"""A folder with a dataset's shards, filled on demand and shared by all processes of the host.

What processes must agree on is a file there and a flock on it (cache_state.py). Readers of a shard share a lock, so it
is not evicted; its fetcher holds a second, exclusive one, so it is not fetched twice. A killed process loses its locks,
which shows the files that it left.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.data.cache.cache_state import LONGEST_PAUSE_S, CacheState
from penstock.data.cache.download import Downloads, give_name
from penstock.data.cache.eviction import Eviction, same_disk
from penstock.data.cache.file_hashes import HASHES
from penstock.data.cache.file_locks import FileLock
from penstock.data.cache.index_watch import check_index, is_index_of
from penstock.data.cache.prefetch import FetchStats, Prefetcher
from penstock.data.cache.shard_versions import ShardVersion, file_stat, key_of
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import INDEX, OWN, SOURCE_NOTE, file_notes, first_notes, remedy_without_index
from penstock.data.formats.shards import Shard
from penstock.data.remote.folders import RemoteFolder
from penstock.data.remote.transfer import is_full, unwritable
from penstock.proto.errors import InvalidArgumentError, PenstockError, ShardUnavailableError

FULL_TRIES = 4
"""Attempts to fetch a shard while the disk is full."""
FULL_WAIT_S = 5.0
"""Seconds that a reader waits for other processes to release a shard when the disk is full."""
DISK = (errno.ENOSPC,)
"""Errors that say that the disk itself is full, and not a quota."""
FREE_MORE = 1 << 16
"""Bytes freed on a full disk beyond those needed: for lock files, and for sizes rounded up to disk blocks."""
YIELD_S = 5.0
"""Seconds that a reader waits for prefetches to end, in any process, before it exceeds the cache's limit."""
LOOK_S = 0.1
"""Seconds that a reader waits if none of the shards in a cache at its limit can be evicted. Then it exceeds the limit,
unless prefetches run (YIELD_S). On a full disk: pause between attempts to evict."""
CONFIRM_S = 10.0
"""Seconds to wait for the remote's answer whether it still has a file, before the cache's copy is evicted."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class HeldShard:
    """Shard that stays in the cache until the first `release`, from any thread. A forked child holds none."""

    __slots__ = ("_cache", "_key", "_pid", "paths")

    def __init__(self, cache: ShardCache, key: str, paths: tuple[Path, ...]) -> None:
        self.paths = paths
        """Raw files, in the shard's order."""
        self._cache: ShardCache | None = cache
        self._key = key
        self._pid = os.getpid()

    def release(self) -> None:
        cache = self._cache
        if cache is not None and self._pid == os.getpid():
            cache._release(self)

    def __enter__(self) -> HeldShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass
class _InUse:
    """Lock and paths of a shard that this process uses, for `count` HeldShards."""

    lock: FileLock
    paths: tuple[Path, ...]
    count: int = 0


class ShardCache:
    """Cache folder of a dataset, for any thread. A forked child starts without shards in use and threads."""

    def __init__(
        self,
        remote: RemoteFolder | None,
        folder: str | os.PathLike[str],
        *,
        limit: int | None = None,
        validate: str | Literal[False] | None = None,
        keep_packed: bool = False,
        timeout_s: float = 600.0,
        threads: int = 4,
        on_pressure: Callable[[], object] | None = None,
        group: int | None = None,
        index: str = INDEX,
    ) -> None:
        """Store the settings, without touching the folder.

        Args:
            remote: None: `folder` is the dataset itself, and nothing in it is ever removed.
            limit: bytes in the folder, for all processes of the host together; None: unlimited.
            validate: None: verify files that no process has verified yet, if the index has hashes of them. A hash
                algorithm that the index must have: verify all files by it, also those used in place. False: verify
                nothing.
            keep_packed: True to keep packed files beside the raw ones, which are then evicted first.
            timeout_s: seconds until a call of `hold`, `index` or `newest_notes` gives up.
            on_pressure: called when a shard would exceed the limit, or the disk is full. It should release shards that
                are not needed now.
            group: Unix group whose members share the folder; None: this user alone.
        """
        if validate and validate not in HASHES:
            raise InvalidArgumentError(f"validate_hash must be one of {', '.join(sorted(HASHES))}, got {validate!r}")
        if threads < 1 or timeout_s <= 0:
            raise InvalidArgumentError(
                f"download_threads must be at least 1 and timeout_s above 0, got {threads} and {timeout_s}"
            )
        self.folder = Path(folder).absolute()
        if remote and remote.local and remote.local.resolve() == self.folder.resolve():
            remote = None
        self.remote = remote
        self.on_pressure = on_pressure
        self.neighbours: Sequence[ShardCache] = ()
        """Caches of the other streams. Those on the same disk evict shards, too, when it is full."""
        self._limit = limit if remote else None
        self._validate = validate
        self._keep_packed = keep_packed
        self.timeout_s = timeout_s
        self._threads = threads
        self.group = group
        self.fetched_index = False
        """True once this cache has fetched the index itself."""
        self._root = str(self.folder)
        self._use_index(index)
        in_place = self.folder if remote is None else remote.local
        self._in_place = str(in_place) if in_place else ""
        """Folder whose files are read where they lie, without a copy in the cache; "" for none."""
        self._reset()
        _caches.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant, as a RemoteFolder's
        self._held: dict[str, _InUse] = {}
        self._state = CacheState(self.folder, self.remote, self.timeout_s, self.group)
        self._prefetcher = Prefetcher(self._state, self._threads, self._prefetch_one)
        self._warned = False
        self._told_full = False
        self._fetched = FetchStats()
        self._eviction = Eviction(self._state, self._limit, self._fetchable) if self.remote else None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "remote": self.remote,
            "folder": self.folder,
            "limit": self._limit,
            "validate": self._validate,
            "keep_packed": self._keep_packed,
            "timeout_s": self.timeout_s,
            "threads": self._threads,
            "group": self.group,
            "index": self._index_name,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        ShardCache.__init__(self, state.pop("remote"), state.pop("folder"), **state)

    # The index

    def _use_index(self, name: str) -> None:
        self._index_name = name
        self._is_indexed_here: bool | None = None
        self._downloads = Downloads(
            self.remote, self.folder, name, validate=self._validate, keep_packed=self._keep_packed
        )

    @property
    def index_path(self) -> Path:
        """Known once `index` was called."""
        return Path(self.folder if self._indexed_here else self._in_place or self.folder, self._index_name)

    @property
    def _indexed_here(self) -> bool:
        """True if files are read in place with an index in the cache's folder, the argument `out` of `index_folder`."""
        if self._is_indexed_here is None:
            self._is_indexed_here = is_index_of(self.folder / self._index_name, self._in_place)
        return self._is_indexed_here

    @property
    def in_place(self) -> bool:
        return bool(self._in_place)

    @property
    def files_folder(self) -> Path | None:
        """Folder whose files are read where they lie; None if they are copied into the cache."""
        return Path(self._in_place) if self._in_place else None

    def fetches_ranges(self, hashed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return, for each shard, whether parts of its file may be fetched alone: not if read in place, or verified by
        a hash of the whole. `hashed`: whether the index has a hash of its raw file. Shapes (shards,)."""
        if self._in_place or self.remote is None or self._validate:
            return np.zeros(len(hashed), bool)
        return np.ones(len(hashed), bool) if self._validate is False else ~hashed

    def index(self) -> Descriptor:
        """Return the open index file, fetched by one process of the host if the folder has none. Its name may begin
        with OWN. Raises ShardUnavailableError, or DatasetError for a file that is no index."""
        name = self._index_name
        if name.startswith(OWN):
            return self._opened_index()
        self._use_index(OWN + name)
        if self.index_path.exists():
            return self._opened_index()
        self._use_index(name)
        try:
            return self._opened_index()
        except ShardUnavailableError as error:
            # a bucket may answer a request for a missing file by "forbidden"
            if self._in_place or not isinstance(error.__cause__, FileNotFoundError | PermissionError):
                raise
            self._use_index(OWN + name)
            try:
                return self._opened_index()
            except ShardUnavailableError:
                self._use_index(name)
                raise error from error.__cause__

    def _opened_index(self) -> Descriptor:
        if self._in_place:
            try:
                return Descriptor(self.index_path)
            except FileNotFoundError as error:
                what = f"{self._in_place} must be a dataset's folder, but has no {self._index_name}"
                what = f"{what}. {remedy_without_index(self._in_place)}"
                raise ShardUnavailableError(what) from error
            except NotADirectoryError as error:
                what = f"{self._in_place} must be a dataset's folder, got a file. Give the folder that has the file"
                raise ShardUnavailableError(what) from error
            except OSError as error:
                raise ShardUnavailableError(
                    f"{self.index_path} cannot be read: {error.strerror}. Check its permissions"
                ) from error
        assert self.remote is not None
        self._state.prepare()
        path = self.index_path
        until = time.monotonic() + self.timeout_s
        while True:
            with contextlib.suppress(FileNotFoundError):
                return Descriptor(path)
            name = self._index_name
            with self._state.fetching(name, until, name) as temporary:
                if file_stat(str(path)) is None:
                    self._downloads.before_index_fetch()
                    self.remote.copy(name, temporary("raw"), deadline_s=until - time.monotonic())
                    check_index(Descriptor(temporary("raw")), self.remote.url_of(name))
                    give_name(temporary("raw"), self.folder, name)
                    self.fetched_index = True

    def newest_notes(self) -> dict[str, Any]:
        """Return the notes of the remote's present index, maybe newer than the copy; those of an index that was written
        here, with the argument `out`, if there is one. Raises ShardUnavailableError."""
        notes = file_notes(self.index())
        if self._in_place or self.remote is None or SOURCE_NOTE in notes:
            return notes
        remote, until = self.remote, time.monotonic() + self.timeout_s
        return first_notes(lambda size: remote.read(self._index_name, deadline_s=until - time.monotonic(), first=size))

    # One shard

    def name_of(self, path: Path, shard: Shard) -> str:
        """Return text for errors with a file's path, and the address that it came from."""
        if self.remote is None or (self.remote.local and path.is_relative_to(self.remote.local)):
            return str(path)
        return f"{self.remote.url_of(shard.name)} ({path}: remove it to have it fetched again)"

    def hold(self, shard: Shard) -> HeldShard:
        """Return the shard with raw, verified files, which stay until its release; wait until they are fetched.

        Raises ShardUnavailableError (timeout, missing, or disk full), ShardCorruptError, or DatasetError: the index
        lacks the hash that `validate` names, the dataset was written again, or the folder may not be used.
        """
        in_place = self._found_in_place(shard)
        if in_place:
            return HeldShard(self, "", in_place)
        key = key_of(shard.name)
        with self._lock:
            in_use = self._held.get(key)
            if in_use:
                in_use.count += 1
                return HeldShard(self, key, in_use.paths)
        until = time.monotonic() + self.timeout_s
        lock, paths = self._with_space(shard, until, lambda: self._taken(shard, key, until), demand=True)
        with self._lock:
            in_use = self._held.setdefault(key, _InUse(lock, paths))
            in_use.count += 1
        if in_use.lock is not lock:  # another thread was faster
            lock.release()
        self._prefetcher.used(key)
        return HeldShard(self, key, in_use.paths)

    def _taken(self, shard: Shard, key: str, until: float) -> tuple[FileLock, tuple[Path, ...]]:
        self._state.prepare()
        lock = self._state.wait(f"{self._state.shards}/{key}", until, shard.name, shared=True)
        try:
            paths = self._ready(shard, lock)
            if paths is None:
                began = time.monotonic()
                paths = self._fill(shard, key, lock, until)
                self._count(FetchStats(waited_s=time.monotonic() - began))
            if paths is None:
                raise ShardUnavailableError(
                    f"{shard.name} was changed in {self.folder} while it was fetched. Let only Penstock write there"
                )
        except BaseException:
            lock.release()
            raise
        return lock, paths

    def _found_in_place(self, shard: Shard) -> tuple[Path, ...] | None:
        """Return a shard's files if they can be read in place, without a lock; None if one is missing, has a wrong size
        or must be verified, or for other caches."""
        if not self._in_place or self._validate:
            return None
        paths = []
        for file in shard.files:
            path = os.path.join(self._in_place, file.raw.name)
            found = file_stat(path)
            if found is None and self._indexed_here:
                path = os.path.join(self._root, file.raw.name)
                found = file_stat(path)
            if found is None or found[0] != file.raw.size:
                return None
            paths.append(Path(path))
        return tuple(paths)

    def _release(self, held: HeldShard) -> None:
        with self._lock:
            if held._cache is None:  # another thread released it just before
                return
            held._cache = None
            in_use = self._held.get(held._key)
            if in_use is None:
                return
            in_use.count -= 1
            if in_use.count:
                return
            del self._held[held._key]
            in_use.lock.touch()
            in_use.lock.release()
        self._prefetcher.check_space()

    def _ready(self, shard: Shard, lock: FileLock) -> tuple[Path, ...] | None:
        version = ShardVersion.decoded(lock.read())
        return version.holds(shard, self._root) if version and self._downloads.accepts(version, shard) else None

    def _fill(
        self, shard: Shard, key: str, lock: FileLock, until: float, decided: Callable[[], None] | None = None
    ) -> tuple[Path, ...] | None:
        """Fetch the shard's files, or wait for their fetcher; return the raw ones. `decided`: as in `Prefetcher`, None
        for a waiting reader. A prefetch without space returns None."""
        with self._state.fetching(key, until, shard.name, decided) as temporary:
            paths = self._ready(shard, lock)
            if paths:
                return paths
            before = ShardVersion.decoded(lock.read())
            from_remote = before is not None and not before.found
            if before and from_remote and before.origin not in ("", self._downloads.origin(shard)):
                self._downloads.forget(before)
            if not self._claim(
                key, lock, self._downloads.need(shard, from_remote=from_remote), until, demand=decided is None
            ):
                return None
            if decided:
                decided()
            try:
                version = self._downloads.fill(shard, temporary, until, from_remote=from_remote)
            except BaseException:
                if not any(file_stat(os.path.join(self._root, file.raw.name)) for file in shard.files):
                    lock.write(b"")  # nothing is on disk, so nothing is claimed
                raise
            lock.write(version.encoded())
            self._count(FetchStats(1, version.size))
            return version.holds(shard, self._root)

    def _count(self, more: FetchStats) -> None:
        with self._lock:
            self._fetched += more

    def stats(self) -> FetchStats:
        """Return what this process has fetched into the cache, and what it has prefetched and not used yet."""
        shards, size = self._prefetcher.ahead()
        return replace(self._fetched, ahead_shards=shards, ahead_bytes=size)

    # Space

    def _with_space(self, shard: Shard, until: float, work: Callable[[], T], *, demand: bool) -> T:
        """Return `work()`, which stores a shard. If the disk is full, evict unused shards and call it again, up to
        FULL_TRIES times in all, because other processes may use the freed space."""
        tries = 1
        while True:
            try:
                return work()
            except (OSError, PenstockError) as error:
                if is_full(error) and tries < FULL_TRIES:
                    free = disk_usage(self._root).free if is_full(error, DISK) else 0  # a quota may not show in it
                    if free >= shard.size + FREE_MORE or self._could_evict(shard.size, until, demand=demand):
                        tries += 1
                        continue
                if isinstance(error, OSError):
                    raise unwritable(error, self._root, shard.size, self._source(shard)) from error
                if tries > 1 and is_full(error):
                    raise ShardUnavailableError(
                        f"{error.message}. {tries} attempts failed, though shards in {self.folder} were evicted before"
                    ) from error.__cause__
                raise

    def _could_evict(self, size: int, until: float, *, demand: bool) -> bool:
        if disk_usage(self._root).total < size:  # eviction does not help
            return False
        yield_until = min(until, time.monotonic() + FULL_WAIT_S)
        while not self._free(size, until, demand=demand):
            if not demand or time.monotonic() >= yield_until:
                return False
            self._state.check_open("")
            self._state.closing.wait(LOOK_S)
        return True

    def _source(self, shard: Shard) -> str:
        return self.remote.url_of(shard.name) if self.remote else str(self.folder / shard.name)

    def _free(self, size: int, until: float, *, demand: bool) -> int:
        """Evict shards of this cache and its neighbours on the same full disk; return the freed bytes."""
        size += FREE_MORE
        freed = 0
        near = [cache for cache in (self, *self.neighbours) if cache is self or same_disk(cache._root, self._root)]
        for pressure in (False, True) if demand else (False,):
            if pressure and self.on_pressure and freed < size:
                self.on_pressure()
            for cache in near:
                freed += cache._evict(size - freed, until, demand=pressure)
        if freed and not self._told_full:
            self._told_full = True
            _log.warning(
                "the disk of the cache %s is full: shards that no process uses are evicted. Give it a cache_limit that "
                "leaves room for other files",
                self.folder,
            )
        return freed

    def _evict(self, size: int, until: float, *, demand: bool) -> int:
        if self._eviction is None or size <= 0:
            return 0
        with contextlib.suppress(OSError, PenstockError):  # on a full disk not even a lock's file may be made
            counting = self._state.wait(self._state.eviction, until, "", shared=False)
            try:
                return self._eviction.free(size, demand=demand)
            finally:
                counting.release()
        return 0

    def _disk_has(self, size: int, until: float, *, demand: bool) -> bool:
        return disk_usage(self._root).free >= size or (
            disk_usage(self._root).total >= size
            and self._free(size, until, demand=demand) > 0
            and disk_usage(self._root).free >= size
        )

    def _claim(self, key: str, lock: FileLock, need: ShardVersion, until: float, *, demand: bool) -> bool:
        missing = need.size - sum(size for _, size in need.found)
        if not self._disk_has(missing, until, demand=demand) and not demand:
            return False  # a reader that waits for the shard tries nevertheless, and gets the error
        if self._limit is None:
            return True
        if self._try_claim(key, lock, need, until, demand=demand):
            return True
        if not demand:
            return False
        if self.on_pressure:
            self.on_pressure()
            if self._try_claim(key, lock, need, until, demand=True):
                return True
        # A shard that is being prefetched or checked cannot be evicted until that ends.
        now = time.monotonic()
        check_until, yield_until = min(until, now + LOOK_S), min(until, now + YIELD_S)
        while now < check_until or (now < yield_until and self._others_fetch_ahead(key)):
            self._state.check_open("")
            self._state.closing.wait(LONGEST_PAUSE_S)
            if self._try_claim(key, lock, need, until, demand=True):
                return True
            now = time.monotonic()
        self._try_claim(key, lock, need, until, demand=True, exceed=True)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the cache {self.folder} exceeds its limit of {self._limit} bytes: {need.size} more are needed, and "
                "its other shards are in use or cannot be fetched again. Give it a higher cache_limit",
                stacklevel=7,
            )
        return True

    def _others_fetch_ahead(self, key: str) -> bool:
        prefetched = set(os.listdir(os.path.join(self._root, self._state.prefetched))) - {key}
        return not prefetched.isdisjoint(os.listdir(os.path.join(self._root, self._state.fetching_folder)))

    def _try_claim(
        self, key: str, lock: FileLock, need: ShardVersion, until: float, *, demand: bool, exceed: bool = False
    ) -> bool:
        assert self._eviction is not None
        counting = self._state.wait(self._state.eviction, until, "", shared=False)
        try:
            return self._eviction.claim(counting, key, lock, need, demand=demand, exceed=exceed)
        finally:
            counting.release()

    def _fetchable(self, name: str, size: int) -> bool:
        if self.remote is None:
            return False
        try:
            return self.remote.has(name, size, deadline_s=CONFIRM_S)
        except PenstockError:
            return False

    # Prefetch

    def fetch_ahead(self, shards: Sequence[Shard]) -> None:
        """Prefetch these shards in this order, in threads, in place of the previous list. Each stays until this process
        has used it, a later list omits it, or a waiting reader needs its space."""
        self._state.check_open("")
        with self._lock:
            held = set(self._held)
        # Files used in place need no state folder, and their folder may belong to another user.
        self._prefetcher.want(
            [(key_of(shard.name), shard) for shard in shards if not self._found_in_place(shard)], held
        )

    def _prefetch_one(self, shard: Shard, key: str, decided: Callable[[], None]) -> bool:
        until = time.monotonic() + self.timeout_s

        def fetched() -> bool:
            lock = self._state.wait(f"{self._state.shards}/{key}", until, shard.name, shared=True)
            try:
                return bool(self._ready(shard, lock) or self._fill(shard, key, lock, until, decided))
            finally:
                lock.release()

        try:
            return self._with_space(shard, until, fetched, demand=False)
        except (OSError, PenstockError) as error:
            if not is_full(error, DISK):
                raise
            return False  # other processes took the space

    # End

    def close(self) -> None:
        """Release all shards, cancel transfers, and end the threads, within about a second."""
        self._state.closing.set()
        if self.remote:
            self.remote.close()
        self._prefetcher.close()
        with self._lock:
            held, self._held = self._held, {}
        for in_use in held.values():
            in_use.lock.release()


_caches: weakref.WeakSet[ShardCache] = weakref.WeakSet()


def _forked() -> None:
    for cache in list(_caches):
        cache._reset()


os.register_at_fork(after_in_child=_forked)
