"""Private temporary folders of this user, removed when the process that made them ends.

Other users can write to the system's folder, so a private one has a name that cannot be guessed and mode 0700, and is
reached through its descriptor. A killed process leaves it behind; the next that makes one removes it: only folders of
this user with mode 0700 (0711 for other users' code) and Penstock's mark, whose lock no process holds."""

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

MARK = ".penstock-temporary"
LONGEST_BASE = 36
"""Longest parent folder's path in bytes. A Unix socket's is 107, of which multiprocessing needs 40."""


class PrivateFolder:
    """New folder with mode 0700 in TMPDIR, or in /tmp if paths of sockets there would be too long, or are not UTF-8,
    which gRPC requires. A child process that gets
    path and descriptor can share it; it stays locked until both have closed it, and the first removes it."""

    def __init__(self) -> None:
        base, prefix = _base(), f"penstock-{os.getuid()}-"
        self._pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # First the lock, then the mark: a marked folder without a lock belongs to a dead process.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd))
            _sweep(base, prefix)
        except BaseException:
            self.close()
            raise

    @classmethod
    def shared(cls, fd: int) -> Self:
        """Return the private folder of the parent process, whose descriptor `fd` this process has inherited."""
        folder = cls.__new__(cls)
        folder._pid, folder._fd = os.getpid(), fd
        folder.path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        os.set_inheritable(fd, False)
        return folder

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Remove the folder and its content. Do nothing in a forked child."""
        if self._fd < 0 or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            _remove(self.path.parent, self.path.name, self._fd)
        os.close(self._fd)
        self._fd = -1


def _base() -> Path:
    base = Path(tempfile.gettempdir())
    try:
        is_fit = len(str(base).encode()) <= LONGEST_BASE
    except UnicodeEncodeError:
        is_fit = False
    return base if is_fit or not os.access("/tmp", os.W_OK | os.X_OK) else Path("/tmp")


def _sweep(base: Path, prefix: str) -> None:
    """Remove private folders that processes of this user have left behind: those that are not locked."""
    for name in os.listdir(base):
        if name.startswith(prefix):
            with contextlib.suppress(OSError):
                _remove_if_left(base, name)


def _remove_if_left(base: Path, name: str) -> None:
    # O_NOFOLLOW, because a link with that name may lead to a folder that must not be removed.
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
    """Remove the folder with descriptor `fd`, its mark last, if its name still leads to it."""
    for entry in sorted(os.listdir(fd), key=lambda entry: entry == MARK):
        try:
            os.unlink(entry, dir_fd=fd)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM):
                raise
            shutil.rmtree(entry, dir_fd=fd)
    os.rmdir(base / name)
