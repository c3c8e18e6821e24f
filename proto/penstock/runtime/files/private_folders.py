"""Temporary folders that are this user's alone, and go with the process that made them.

The system's temporary folder is shared with strangers, so nothing in it is believed: a folder of ours has a name that
cannot be guessed and mode 0700, and everything below it is reached through its descriptor, never through a link. A
process that is killed leaves its folder behind. The next one that makes a folder removes it, but only what is certain
to be such a folder: this user's, of mode 0700, with our mark in it, and with a lock that no process holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Self

__all__ = ["PrivateFolder"]

MARK = ".penstock-temporary"
LONGEST_BASE = 36
"""Bytes of the folder around ours: a Unix socket's path has 107 at most, and multiprocessing wants 40 below ours."""


class PrivateFolder:
    """A new folder in the temporary one, with mode 0700. Raises OSError where there can be none.

    The temporary folder is TMPDIR's, or /tmp where sockets below that one would have too long a name.

    A child can share it, by its path and its descriptor: the folder is locked until both have closed it, and the
    first to close removes it.
    """

    def __init__(self) -> None:
        base, prefix = _base(), f"penstock-{os.getuid()}-"
        self._pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # First the lock, then the mark: a marked folder without a lock is one whose process is dead.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd))
            _sweep(base, prefix)
        except BaseException:
            self.close()
            raise

    @classmethod
    def shared(cls, fd: int) -> Self:
        """The folder of the parent process, whose descriptor this one was started with."""
        folder = cls.__new__(cls)
        folder._pid, folder._fd = os.getpid(), fd
        folder.path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        os.set_inheritable(fd, False)
        return folder

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Remove it. Idempotent; in a forked child nothing happens."""
        if self._fd < 0 or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            _remove(self.path.parent, self.path.name, self._fd)
        os.close(self._fd)
        self._fd = -1


def _base() -> Path:
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > LONGEST_BASE and os.access("/tmp", os.W_OK | os.X_OK):
        return Path("/tmp")
    return base


def _sweep(base: Path, prefix: str) -> None:
    """Remove what dead processes of this user left."""
    for name in os.listdir(base):
        if name.startswith(prefix):
            with contextlib.suppress(OSError):
                _remove_if_left(base, name)


def _remove_if_left(base: Path, name: str) -> None:
    # O_NOFOLLOW: a link of that name leads to what is not ours to remove.
    fd = os.open(base / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) not in (0o700, 0o711):
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(os.stat(MARK, dir_fd=fd, follow_symlinks=False).st_mode):
            _remove(base, name, fd)
    finally:
        os.close(fd)


def _remove(base: Path, name: str, fd: int) -> None:
    """Remove what is below the descriptor, the mark last, then the folder if the name still leads there."""
    for entry in sorted(os.listdir(fd), key=lambda entry: entry == MARK):
        try:
            os.unlink(entry, dir_fd=fd)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM):
                raise
            shutil.rmtree(entry, dir_fd=fd)
    os.rmdir(base / name)
