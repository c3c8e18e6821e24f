"""Locks between the processes of a host: flock on small files.

A lock dies with its holder, so a process that is killed hinders nobody, and nothing has a name outside the folder. The
file may carry a line of text of its holder's. An exclusive holder may remove the file: whoever opened it before then
finds that it has no name any more, and opens it anew.

flock belongs to what was opened, which a forked child shares with its parent: the child closes its copies at once and
unlocks none, for that would unlock the parent's.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref

from penstock.data.formats.descriptors import Descriptor

__all__ = ["FileLock", "take"]

_LONGEST = 1 << 20
"""Bytes of text that are read back."""

_opening = threading.RLock()
"""Held for the moment between opening a file and knowing of it, while one is given back, and over a fork: the child
knows all that it has."""
_opened: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _forget() -> None:
    for descriptor in list(_opened):
        descriptor.close()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_forget)


class FileLock:
    """A lock that this process holds, until `release` or its end."""

    __slots__ = ("_descriptor", "_pid", "path")

    def __init__(self, path: str, descriptor: Descriptor) -> None:
        self.path = path
        self._descriptor: Descriptor | None = descriptor
        self._pid = os.getpid()

    def read(self) -> bytes:
        """The text of the file."""
        return self._held().read(_LONGEST, 0)

    def write(self, text: bytes) -> None:
        """One line, whole or not at all for those who read meanwhile: what is left of a longer one goes afterwards."""
        descriptor = self._held()
        os.pwrite(descriptor.fileno(), text, 0)
        os.ftruncate(descriptor.fileno(), len(text))
        self.touch()

    def touch(self) -> None:
        """Set the file's time to now; the kernel's own idea of now is so coarse that two writes may have one time."""
        now = time.time_ns()
        os.utime(self._held().fileno(), ns=(now, now))

    def remove(self) -> None:
        """Remove the file; only for an exclusive holder. The lock is held until it is released."""
        os.unlink(self.path)

    def release(self) -> None:
        """Again: nothing, also from another thread. In a forked child: nothing."""
        if self._pid != os.getpid():
            return
        with _opening:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                # Said, not left to the close: a child that is about to close its copy would else hold the lock till
                # then.
                fcntl.flock(descriptor.fileno(), fcntl.LOCK_UN)

    def _held(self) -> Descriptor:
        if self._descriptor is None:
            raise ValueError(f"the lock {self.path} was released")
        return self._descriptor


def take(path: str, *, shared: bool, create: bool = True) -> FileLock | None:
    """The lock at once, or None if somebody holds it. Without `create` a file that is absent is FileNotFoundError."""
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    while True:
        with _opening:
            descriptor = Descriptor(path, flags)
            _opened.add(descriptor)
        try:
            fcntl.flock(descriptor.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if os.fstat(descriptor.fileno()).st_nlink:
            return FileLock(path, descriptor)
