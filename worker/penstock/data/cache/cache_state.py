"""State folder of a cache, as one process uses it: locks, and the cleanup after dead processes.

    FOLDER/.penstock/remote             address that the folder's files come from
    FOLDER/.penstock/index.json         ETag or time that the remote's index had when it was fetched
    FOLDER/.penstock/eviction           lock of the process that counts bytes and evicts
    FOLDER/.penstock/shards/KEY         lock shared by readers of the shard; text: ShardVersion; mtime: last use
    FOLDER/.penstock/prefetched/KEY     lock shared by the processes that prefetch the shard, until they read it
    FOLDER/.penstock/fetching/KEY       lock of the process that fetches the shard
    FOLDER/.penstock/fetching/KEY!...   temporary files of that process

KEY stands for one shard, see `key_of`. flock has no timeout, so a process polls a lock.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.data.cache.file_locks import LONGEST_TEXT, FileLock, share, take
from penstock.data.remote.folders import RemoteFolder
from penstock.data.remote.transfer import CLOSED
from penstock.proto.errors import DatasetError, ShardUnavailableError
from penstock.runtime.files.inner_paths import parent_of, refuse_strange_links
from penstock.runtime.files.plain_files import is_ours, read_plain

STATE = ".penstock"

LONGEST_PAUSE_S = 0.02
"""Longest pause between two attempts to acquire a lock."""
SHARE_TRIES = 50
"""Attempts, in about a second, to open a lock file that another member of the group may be about to share."""


class CacheState:
    """Locks and records of one cache, as one process uses them, by the keys of shards (`key_of`)."""

    def __init__(self, folder: Path, remote: RemoteFolder | None, timeout_s: float, group: int | None = None) -> None:
        """Do not touch the folder. `remote` None: it is the dataset itself; `timeout_s`: named in errors; `group`: Unix
        group whose members share it, None: this user alone."""
        self.root = str(folder)
        self._group = group
        self._remote = remote
        self._timeout_s = timeout_s
        self._remote_path = f"{STATE}/remote"
        self.eviction = f"{STATE}/eviction"
        self.shards = f"{STATE}/shards"
        self.prefetched = f"{STATE}/prefetched"
        self.fetching_folder = f"{STATE}/fetching"
        self.closing = threading.Event()
        """Set when the cache closes. Every wait for a lock then raises ShardUnavailableError."""
        self._prepared = False

    def prepare(self) -> None:
        """Make the state folder, record the remote, and remove what dead processes left; only the first call does.
        Raises DatasetError for another remote or user (`_make_folders`), ShardUnavailableError if it cannot write."""
        if self._prepared:
            return
        try:
            self._make_folders()
            self._check_remote()
            for state in (self.fetching_folder, self.prefetched):
                self._sweep(state)
        except OSError as error:
            raise ShardUnavailableError(
                f"the cache folder {self.root} cannot be written: {error.strerror}. Make space, or give another folder"
            ) from error
        self._prepared = True

    def _make_folders(self) -> None:
        """Make the folders. Refuse (DatasetError) links, files, and folders of other users, except root and the cache's
        group: they could put links or false records there, and this process would read wrong files."""
        refuse_strange_links(Path(self.root))
        made = False
        with contextlib.suppress(FileExistsError):
            os.makedirs(self.root)
            made = True
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if made:
                share(root, self._group, 0o2775)
            found = os.fstat(root)
        finally:
            os.close(root)
        # The cache's folder itself may be writable by others, as folders often are in a pod, which has only one user.
        if found.st_uid not in (0, os.getuid()) and found.st_gid != self._group:
            raise self._foreign(self.root, found)
        for state in (STATE, self.shards, self.prefetched, self.fetching_folder):
            self._make_folder(state)

    def _make_folder(self, state: str) -> None:
        path, made = os.path.join(self.root, state), False
        with parent_of(self.root, state) as (above, name):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=above)
                made = True
            found = os.stat(name, dir_fd=above, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                raise self._foreign(path, found)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            if made:
                share(folder, self._group, 0o2775)
            found = os.fstat(folder)
            if is_ours(found, self._group):
                return
            if found.st_uid != os.getuid():
                raise self._foreign(path, found)
            os.fchmod(folder, 0o755)  # the folder was made under a permissive umask, or on a filesystem without modes
        finally:
            os.close(folder)

    def _foreign(self, path: str, found: os.stat_result) -> DatasetError:
        what = f"owned by user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, so that others can write to it"
        if stat.S_ISLNK(found.st_mode):
            what = f"a link to {os.readlink(path)}"
        elif not stat.S_ISDIR(found.st_mode):
            return DatasetError(f"{path} must be a folder, got a file. Remove it, or give another cache folder")
        return DatasetError(
            f"the cache folder {self.root} must be safe from other users, but {path} is {what}. Give a folder of your "
            "own, or cache_group=... for one that a group shares"
        )

    def _check_remote(self) -> None:
        """Record the remote. Refuse another one: files of two datasets may have the same names and sizes."""
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
                    f"the cache folder {self.root} must hold files of {self._remote.identity}, got files of "
                    f"{before[:500].decode(errors='replace')}. Give another cache folder, or remove this one"
                )
        finally:
            lock.release()

    def _sweep(self, state: str) -> None:
        for name in os.listdir(os.path.join(self.root, state)):
            if "!" not in name:
                # the file was removed meanwhile, or is not a lock; a later use of the name raises the error
                with contextlib.suppress(OSError):
                    lock = take(self.root, f"{state}/{name}", shared=False, create=False)
                    if lock:
                        self._clear(f"{state}/{name}", lock)

    @contextlib.contextmanager
    def fetching(
        self, key: str, until: float, name: str, busy: Callable[[], object] | None = None
    ) -> Iterator[Callable[[str], Path]]:
        """Hold the lock that allows this process alone to fetch the shard, until `until` (monotonic) at the latest.
        Yield a function from a kind, such as "raw", to the path of a temporary file, removed at the end."""
        base = f"{self.fetching_folder}/{key}"
        lock = self.wait(base, until, name, shared=False, busy=busy)
        try:
            lock.write(b"%d\n" % os.getpid())
            # the descriptor keeps the folder, even if its name leads elsewhere later
            with parent_of(self.root, base) as (folder, last):
                yield lambda kind: Path(f"/proc/self/fd/{folder}", f"{last}!{kind}")
        finally:
            self._clear(base, lock)

    def _clear(self, base: str, lock: FileLock) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):  # the folder was removed
                self.remove_temporary(base)
                lock.remove()
        finally:
            lock.release()

    def remove_temporary(self, base: str) -> None:
        """Remove the temporary files of the process that fetches a shard. `base`: its lock file."""
        with parent_of(self.root, base) as (folder, name):
            listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
            try:
                for found in os.listdir(listed):
                    if found.startswith(f"{name}!"):
                        # the file was removed already, or is a folder, which the cache never makes here
                        with contextlib.suppress(OSError):
                            os.unlink(found, dir_fd=listed)
            finally:
                os.close(listed)

    def wait(
        self, path: str, until: float, name: str, *, shared: bool, busy: Callable[[], object] | None = None
    ) -> FileLock:
        """Acquire the lock at `path`, relative to the folder; `shared`: several processes can hold it. Call `busy`
        after each failed attempt. Raise ShardUnavailableError at `until` (monotonic), when the cache closes, or if the
        file cannot be opened. `name`: for errors; "" for the whole cache."""
        pause, tries = 0.0005, 1 if self._group is None else SHARE_TRIES
        while True:
            self.check_open(name)
            try:
                lock = take(self.root, path, shared=shared)
            except OSError as error:
                lock, tries, where = None, tries - 1, os.path.join(self.root, path)
                if not tries or not isinstance(error, PermissionError):
                    raise ShardUnavailableError(
                        f"the cache folder {self.root} cannot be used: {where}: {error.strerror}. "
                        "Make space, or give a local folder that you can write to"
                    ) from error
            if lock:
                lock.share(self._group)
                return lock
            if busy:
                busy()
            if time.monotonic() >= until:
                lock_path = os.path.join(self.root, path)
                raise ShardUnavailableError(
                    f"{self._address(name)} was not available within {self._timeout_s:g} s, because its lock "
                    f"{lock_path} was held by {_holder(lock_path)}. Wait until it is released, or raise timeout_s"
                )
            self.closing.wait(pause)
            pause = min(LONGEST_PAUSE_S, pause * 2)

    def check_open(self, name: str) -> None:
        """Raise ShardUnavailableError if the cache is closing. `name`: for the error; "" for the whole cache."""
        if self.closing.is_set():
            raise ShardUnavailableError(
                f"{self._address(name)} could not be fetched, because {CLOSED}. Open the dataset again"
            )

    def _address(self, name: str) -> str:
        if not name:
            return f"the cache {self.root}"
        return self._remote.url_of(name) if self._remote else os.path.join(self.root, name)


def _holder(path: str) -> str:
    """Return who holds a lock, for errors. Only the process that fetches a shard writes its ID into the lock file."""
    try:
        text = read_plain(path, LONGEST_TEXT)
    except OSError:
        return "a process that has just released it"
    return f"process {text.decode().strip()}" if text.strip().isdigit() else "another process"
