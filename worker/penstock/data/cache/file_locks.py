"""Locks between the processes of a host: flock on small files, which the kernel releases when a process ends.

The holder may write a line into the file; of an exclusive lock, also remove it. Others that wait for the removed file
detect this and open or make it anew. A lock belongs to the open file, which a forked child shares: if the child
unlocked it, the parent would lose its lock. So the child only closes its copies of all lock files at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import weakref

from penstock.data.formats.descriptors import Descriptor
from penstock.runtime.files.inner_paths import parent_of, unlink_below

LONGEST_PAUSE_S = 0.1
LONGEST_TEXT = 1 << 20
"""Most bytes that are read from a lock file."""

_opening = threading.RLock()
"""Held while a file is opened or released, and during a fork, so that a child has a complete list of files to close."""
_opened: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _forget() -> None:
    for descriptor in list(_opened):
        descriptor.close()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_forget)


class FileLock:
    """Lock on a file, which this process holds until it calls `release` or ends."""

    __slots__ = ("_descriptor", "_pid", "name", "path", "root")

    def __init__(self, root: str, name: str, descriptor: Descriptor) -> None:
        self.path = os.path.join(root, name)
        self.root, self.name = root, name
        self._descriptor: Descriptor | None = descriptor
        self._pid = os.getpid()

    def read(self) -> bytes:
        return self._held().read(LONGEST_TEXT, 0)

    def write(self, text: bytes, time_ns: int | None = None) -> None:
        """Replace the text by one line. A reader finds the old text or the whole line, maybe with old text after it.
        `time_ns`: as in `touch`."""
        descriptor = self._held()
        os.pwrite(descriptor.fileno(), text, 0)
        os.ftruncate(descriptor.fileno(), len(text))
        self.touch(time_ns)

    def touch(self, time_ns: int | None = None) -> None:
        """Set the modification time; None: now. The kernel's own file times are coarse: two writes may get the same."""
        now = time.time_ns() if time_ns is None else time_ns
        number = self._held().fileno()
        if number >= 0:  # garbage collection of the lock's owner may have closed the file before
            try:
                os.utime(number, ns=(now, now))
            except PermissionError:  # another member's file, which only gets the kernel's time
                os.utime(number)

    def share(self, group: int | None) -> None:
        share(self._held().fileno(), group, 0o664)

    def remove(self) -> None:
        """Remove the file, but keep the lock until `release`. Only the holder of an exclusive lock may call this."""
        unlink_below(self.root, self.name)

    def release(self) -> None:
        """Release the lock, from any thread. Do nothing if it is released already, or in a forked child."""
        if self._pid != os.getpid():
            return
        with _opening:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None and descriptor.fileno() >= 0:  # as in `touch`
                # Unlock explicitly: closing alone would leave the lock with a forked child that has not closed its copy
                # yet.
                fcntl.flock(descriptor.fileno(), fcntl.LOCK_UN)

    def _held(self) -> Descriptor:
        assert self._descriptor is not None, f"{self.path} was released"
        return self._descriptor


def share(descriptor: int, group: int | None, mode: int) -> None:
    """Let a Unix group, if any, use a file or folder, unless it belongs to another user."""
    if group is not None:
        with contextlib.suppress(PermissionError):  # it belongs to another member of the group
            os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, mode)


def take(root: str, name: str, *, shared: bool, create: bool = True) -> FileLock | None:
    """Try once to acquire the lock of the file `name` below `root`, whose path may have no links. Return None if
    another FileLock, of any process, excludes it. `create` False: a missing file raises FileNotFoundError."""
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    while True:
        with parent_of(root, name) as (folder, last), _opening:
            descriptor = Descriptor(last, flags, folder=folder)
            _opened.add(descriptor)
        try:
            fcntl.flock(descriptor.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if os.fstat(descriptor.fileno()).st_nlink:
            return FileLock(root, name, descriptor)


def take_within(root: str, name: str, timeout_s: float) -> FileLock | None:
    """Acquire the lock as `take` does, alone. Return None if another has held it for `timeout_s` seconds."""
    until, pause = time.monotonic() + timeout_s, 0.001
    while (lock := take(root, name, shared=False)) is None and time.monotonic() < until:
        time.sleep(pause)
        pause = min(LONGEST_PAUSE_S, 2 * pause)
    return lock
