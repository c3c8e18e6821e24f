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

__all__ = ["Lock", "take"]

_LONGEST = 1 << 20
"""Bytes of text that are read back."""

_opening = threading.RLock()
"""Held for the moment between opening a file and knowing of it, and over a fork: the child knows all that it has."""
_descriptors: set[int] = set()


def _forget() -> None:
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_forget)


class Lock:
    """A lock that this process holds, until `release` or its end."""

    __slots__ = ("_descriptor", "_pid", "path")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._pid = os.getpid()

    def read(self) -> bytes:
        """The text of the file."""
        return os.pread(self._descriptor, _LONGEST, 0)

    def write(self, text: bytes) -> None:
        """One line, whole or not at all for those who read meanwhile: what is left of a longer one goes afterwards."""
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
        self.touch()

    def touch(self) -> None:
        """Set the file's time to now; the kernel's own idea of now is so coarse that two writes may have one time."""
        now = time.time_ns()
        os.utime(self._descriptor, ns=(now, now))

    def remove(self) -> None:
        """Remove the file; only for an exclusive holder. The lock is held until it is released."""
        os.unlink(self.path)

    def release(self) -> None:
        """Again: nothing. In a forked child: nothing."""
        if self._descriptor < 0 or self._pid != os.getpid():
            return
        descriptor, self._descriptor = self._descriptor, -1
        # Said, not left to the close: a child that is about to close its copy would else hold the lock till then.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        _close(descriptor)


def _close(descriptor: int) -> None:
    with _opening:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def take(path: str, *, shared: bool, create: bool = True) -> Lock | None:
    """The lock at once, or None if somebody holds it. Without `create` a file that is absent is FileNotFoundError."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    while True:
        with _opening:
            descriptor = os.open(path, flags, 0o666)
            _descriptors.add(descriptor)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return Lock(path, descriptor)
        except BlockingIOError:
            _close(descriptor)
            return None
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)
