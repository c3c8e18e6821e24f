"""A directory for each child's sockets and files of multiprocessing, which is removed with the child.

multiprocessing makes a directory in the system's temporary one and removes it at a normal exit. A child that is killed
has none, so thousands of such directories would stay. A daemon therefore gives each child one that it removes itself;
a daemon that is killed leaves its own, which the next one on this machine finds, by the lock that nobody holds, and
removes. Only multiprocessing's own: where user code keeps its temporary files is its own affair.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

__all__ = ["TempDirs"]

_log = logging.getLogger("penstock.worker")
EMPTY_S = 600.0
"""An empty directory without a lock is given so long to be locked by its maker."""


class TempDirs:
    """The directories of one daemon's children."""

    def __init__(self) -> None:
        self._mine: Path | None = None
        self._lock = -1
        self._count = 0
        # Short names: a socket's path has 107 characters at most.
        common = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
        try:
            self._mine = _made(common)
            self._lock = _locked(self._mine, wait=True)
            for other in common.iterdir():
                if other != self._mine:
                    _remove_if_left(other)
        except OSError as error:
            _log.warning("children have no directory of their own for multiprocessing: %s", error)

    def make(self) -> str:
        """A new one; "" if there can be none, and multiprocessing makes its own."""
        if self._mine is None:
            return ""
        self._count += 1
        path = self._mine / str(self._count)
        try:
            path.mkdir(mode=0o700, parents=True)
        except OSError:
            return ""
        return str(path)

    def remove(self, path: str) -> None:
        """Its child is dead."""
        if path:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """All children are dead."""
        if self._mine is not None:
            shutil.rmtree(self._mine, ignore_errors=True)
            with contextlib.suppress(OSError):  # other daemons have theirs there
                self._mine.parent.rmdir()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _made(common: Path) -> Path:
    """A directory in the common one, which the last daemon to end removes."""
    while True:
        common.mkdir(mode=0o700, exist_ok=True)
        if common.stat().st_uid != os.getuid():
            raise PermissionError(f"{common} belongs to another user")
        with contextlib.suppress(FileNotFoundError):  # removed since
            return Path(tempfile.mkdtemp(prefix="", dir=common))


def _locked(directory: Path, *, wait: bool) -> int:
    """A lock that ends with this process; children do not inherit it. OSError: someone holds it. `wait`: for a daemon
    that is just starting too, and looks."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_if_left(directory: Path) -> None:
    """Remove a daemon's directory if that daemon is dead."""
    with contextlib.suppress(OSError):
        lock = _locked(directory, wait=False)
        try:
            # One that is just being made is not locked yet, and empty.
            if any(directory.iterdir()) or time.time() - directory.stat().st_mtime > EMPTY_S:
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
