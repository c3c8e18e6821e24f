"""The state folder of a cache, as one process uses it: its locks, and the cleanup after dead processes.

    FOLDER/.penstock/remote             address that the folder's files come from
    FOLDER/.penstock/index.json         version of the remote's index when it was fetched
    FOLDER/.penstock/eviction           lock of the process that counts bytes and evicts
    FOLDER/.penstock/shards/KEY         lock shared by the shard's users; its text is a ShardVersion, its time the last
    use FOLDER/.penstock/prefetched/KEY     lock shared by processes that prefetched the shard and have not used it yet
    FOLDER/.penstock/fetching/KEY       lock of the process that fetches it; beside it its temporary files, KEY!...

A file lock cannot be waited for with a deadline: it is tried repeatedly, at most 20 ms apart.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.data.cache.file_locks import FileLock, take
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, ShardUnavailableError
from penstock.runtime.files.plain_files import is_ours, read_plain

__all__ = ["LONGEST_PAUSE_S", "STATE", "CacheState"]

STATE = ".penstock"
"""State folder, below the cache's."""

LONGEST_PAUSE_S = 0.02
"""Longest pause between two tries at a lock, in seconds."""


class CacheState:
    """State of one cache folder, for one process."""

    def __init__(self, folder: Path, remote: RemoteFolder | None, timeout_s: float, group: int | None = None) -> None:
        """`group`: group whose members share the folder; None: the folder is this user's alone."""
        self.root = str(folder)
        self._group = group
        self._remote = remote
        self._timeout_s = timeout_s
        state = folder / STATE
        self._remote_path = str(state / "remote")
        self.eviction = str(state / "eviction")
        self.shards = str(state / "shards")
        self.prefetched = str(state / "prefetched")
        self.fetching_folder = str(state / "fetching")
        self.closing = threading.Event()
        """Event that ends all waits with an error."""
        self._prepared = False

    def prepare(self) -> None:
        """Make the state folder, and remove what dead processes left in it."""
        if self._prepared:
            return
        try:
            self._make_folders()
            self._check_remote()
            for state in (self.fetching_folder, self.prefetched):
                self._sweep(state)
        except OSError as error:
            raise ShardUnavailableError(
                f"the cache {self.root} cannot be written: {error.strerror}; give a writable local folder"
            ) from error
        self._prepared = True

    def _make_folders(self) -> None:
        """Make the folders. Raises DatasetError for those of other users, who could put links or forged versions into
        them."""
        with contextlib.suppress(FileExistsError):
            os.makedirs(self.root)
            self._share(self.root)
        # The folder itself may be writable by others: in a pod everybody may write, and there is only one user.
        found = os.stat(self.root)
        if found.st_uid not in (0, os.getuid()) and found.st_gid != self._group:
            raise self._foreign(self.root, found)
        for state in (os.path.dirname(self.shards), self.shards, self.prefetched, self.fetching_folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(state, 0o755)
                self._share(state)
            found = os.lstat(state)
            if not stat.S_ISDIR(found.st_mode):
                raise self._foreign(state, found)
            if is_ours(found, self._group):
                continue
            if found.st_uid != os.getuid():
                raise self._foreign(state, found)
            os.chmod(state, 0o755)  # made under a permissive umask, or on a filesystem without modes

    def _share(self, path: str) -> None:
        """Share a path with the group, if there is one; files made in a shared folder inherit the group."""
        if self._group is None:
            return
        with contextlib.suppress(PermissionError):  # another member's
            os.chown(path, -1, self._group)
            os.chmod(path, 0o2775 if os.path.isdir(path) else 0o664)

    def _foreign(self, path: str, found: os.stat_result) -> DatasetError:
        what = f"owned by user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, so that others can write to it"
        if stat.S_ISLNK(found.st_mode):
            what = f"a link to {os.readlink(path)}"
        return DatasetError(
            f"the cache folder {self.root} is not safe to use: {path} is {what}. Give a folder of your own, or "
            "cache_group=... for one that a group shares"
        )

    def _check_remote(self) -> None:
        """Record the remote, or compare it: shards of two datasets have the same names, and often the same sizes."""
        if self._remote is None:
            return
        identity = self._remote.identity.encode()
        lock = self.wait(self._remote_path, time.monotonic() + self._timeout_s, "", shared=False)
        try:
            before = lock.read().rstrip(b"\n")
            if not before:
                lock.write(identity + b"\n")
            elif before != identity:
                raise DatasetError(
                    f"the cache folder {self.root} has the dataset of {before.decode(errors='replace')}, not that of "
                    f"{self._remote.identity}: give another cache folder, or remove this one"
                )
        finally:
            lock.release()

    def _sweep(self, state: str) -> None:
        for name in os.listdir(state):
            if "!" not in name:
                with contextlib.suppress(FileNotFoundError):
                    lock = take(os.path.join(state, name), shared=False, create=False)
                    if lock:
                        self._clear(lock)

    @contextlib.contextmanager
    def fetching(
        self, key: str, until: float, name: str, busy: Callable[[], object] | None = None
    ) -> Iterator[Callable[[str], Path]]:
        """Hold the fetch lock of a key; yield a function that names temporary files, which are removed afterwards.
        `busy` is called if another process holds the lock."""
        base = os.path.join(self.fetching_folder, key)
        lock = self.wait(base, until, name, shared=False, busy=busy)
        try:
            lock.write(b"%d\n" % os.getpid())
            yield lambda kind: Path(f"{base}!{kind}")
        finally:
            self._clear(lock)

    def _clear(self, lock: FileLock) -> None:
        """Remove a fetcher's temporary files, then its lock's."""
        try:
            with contextlib.suppress(FileNotFoundError):  # the folder was removed
                for path in glob.glob(glob.escape(lock.path) + "!*"):
                    os.unlink(path)
                lock.remove()
        finally:
            lock.release()

    def wait(
        self, path: str, until: float, name: str, *, shared: bool, busy: Callable[[], object] | None = None
    ) -> FileLock:
        """Wait for a lock, of the file of that name ("": of the cache as a whole). Raises ShardUnavailableError."""
        pause = 0.0005
        while True:
            self.check_open(name)
            try:
                lock = take(path, shared=shared)
            except OSError as error:
                raise ShardUnavailableError(
                    f"the cache {self.root} cannot be used: {path}: {error.strerror}"
                ) from error
            if lock:
                self._share(path)
                return lock
            if busy:
                busy()
            if time.monotonic() >= until:
                raise ShardUnavailableError(
                    f"{self._address(name)} was not available within {self._timeout_s:g} s: another process has the "
                    f"lock {path} ({_holder(path)})"
                )
            self.closing.wait(pause)
            pause = min(LONGEST_PAUSE_S, pause * 2)

    def check_open(self, name: str) -> None:
        """Raise ShardUnavailableError if the cache is closing."""
        if self.closing.is_set():
            raise ShardUnavailableError(
                f"{self._address(name)} was not fetched, because the dataset was closed meanwhile"
            )

    def _address(self, name: str) -> str:
        if not name:
            return f"the cache {self.root}"
        return self._remote.url_of(name) if self._remote else os.path.join(self.root, name)


def _holder(path: str) -> str:
    """Return the holder of a lock, from the lock's text."""
    try:
        text = read_plain(path)
    except OSError:
        return "released just now"
    return f"process {text.decode().strip()}" if text.strip().isdigit() else "shared by several readers"
