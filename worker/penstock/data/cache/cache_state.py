"""The books of a cache's folder, as one process keeps them: their locks, and what dead processes left.

    FOLDER/.penstock/place              where the folder's files come from
    FOLDER/.penstock/index.json         how old the place's index was when it was fetched
    FOLDER/.penstock/room               lock: who counts bytes and evicts
    FOLDER/.penstock/shards/KEY         lock, shared by who uses the shard; its text is a Stamp, its time the last use
    FOLDER/.penstock/ahead/KEY          lock, shared by who fetched the shard ahead and has not used it yet
    FOLDER/.penstock/fetching/KEY       lock of the one who fetches it; beside it its temporary files, KEY!...

Locks of files cannot be waited for with a deadline: they are tried again and again, at most 20 ms apart.
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
"""Their folder, below the cache's."""

LONGEST_PAUSE_S = 0.02
"""Between two tries at a lock."""


class CacheState:
    """Of one folder, for one process."""

    def __init__(self, folder: Path, place: RemoteFolder | None, timeout_s: float, group: int | None = None) -> None:
        """`group`: whose members share the folder; None: it is this user's."""
        self.root = str(folder)
        self._group = group
        self._place = place
        self._timeout_s = timeout_s
        state = folder / STATE
        self._origin = str(state / "place")
        self.eviction = str(state / "room")
        self.shards = str(state / "shards")
        self.ahead = str(state / "ahead")
        self.fetching_folder = str(state / "fetching")
        self.closing = threading.Event()
        """Set: all waits end with an error."""
        self._prepared = False

    def prepare(self) -> None:
        """The books, and what dead processes left there."""
        if self._prepared:
            return
        try:
            self._make_folders()
            self._check_place()
            for state in (self.fetching_folder, self.ahead):
                self._sweep(state)
        except OSError as error:
            raise ShardUnavailableError(
                f"the cache {self.root} cannot be written: {error.strerror}; give a local folder that can be"
            ) from error
        self._prepared = True

    def _make_folders(self) -> None:
        """Raises DatasetError where they are others', who could put links, and stamps of their own, into them."""
        with contextlib.suppress(FileExistsError):
            os.makedirs(self.root)
            self._share(self.root)
        # Others may write to the folder itself: in a pod anybody may, and there is nobody else.
        found = os.stat(self.root)
        if found.st_uid not in (0, os.getuid()) and found.st_gid != self._group:
            raise self._foreign(self.root, found)
        for state in (os.path.dirname(self.shards), self.shards, self.ahead, self.fetching_folder):
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
            os.chmod(state, 0o755)  # made under a careless umask; or a file system that keeps no modes

    def _share(self, path: str) -> None:
        """With the group, if there is one; what is made in a folder is the group's too."""
        if self._group is None:
            return
        with contextlib.suppress(PermissionError):  # another member's
            os.chown(path, -1, self._group)
            os.chmod(path, 0o2775 if os.path.isdir(path) else 0o664)

    def _foreign(self, path: str, found: os.stat_result) -> DatasetError:
        what = f"of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}: others can write to it"
        if stat.S_ISLNK(found.st_mode):
            what = f"a link to {os.readlink(path)}"
        return DatasetError(
            f"the cache {self.root} is not used: {path} is {what}; give a folder of your own, or cache_group=... for "
            "one that a group shares"
        )

    def _check_place(self) -> None:
        """Two datasets' shards have the same names, and often the same sizes."""
        if self._place is None:
            return
        origin = self._place.identity.encode()
        lock = self.wait(self._origin, time.monotonic() + self._timeout_s, "", shared=False)
        try:
            before = lock.read().rstrip(b"\n")
            if not before:
                lock.write(origin + b"\n")
            elif before != origin:
                raise DatasetError(
                    f"the cache {self.root} holds the dataset of {before.decode(errors='replace')}, not that of"
                    f" {self._place.identity}; give another folder, or remove this one"
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
        """Alone among all processes; gives the paths of temporary files, which are gone afterwards. `busy` is called if
        somebody else is at it."""
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
            with contextlib.suppress(FileNotFoundError):  # somebody has removed the folder
                for path in glob.glob(glob.escape(lock.path) + "!*"):
                    os.unlink(path)
                lock.remove()
        finally:
            lock.release()

    def wait(
        self, path: str, until: float, name: str, *, shared: bool, busy: Callable[[], object] | None = None
    ) -> FileLock:
        """A lock, for the file of that name ("": for the cache as a whole). Raises ShardUnavailableError."""
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
                    f"{self._address(name)} could not be had within {self._timeout_s:g} s: another process has the lock"
                    f" {path} ({_holder(path)})"
                )
            self.closing.wait(pause)
            pause = min(LONGEST_PAUSE_S, pause * 2)

    def check_open(self, name: str) -> None:
        if self.closing.is_set():
            raise ShardUnavailableError(f"{self._address(name)} is not fetched any more: its cache was closed")

    def _address(self, name: str) -> str:
        if not name:
            return f"the cache {self.root}"
        return self._place.url_of(name) if self._place else os.path.join(self.root, name)


def _holder(path: str) -> str:
    """What the holder of a lock says of itself."""
    try:
        text = read_plain(path)
    except OSError:
        return "it has just gone"
    return f"process {text.decode().strip()}" if text.strip().isdigit() else "shared by its users"
