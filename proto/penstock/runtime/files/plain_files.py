"""Files in folders that others can write to: opened as files and nothing else.

A name there may belong to another user and lead anywhere: a link to a file of ours, which opening for a lock would
truncate; a FIFO, which blocks for ever; a device, which never ends. Files are therefore never written through a link,
and anything but a file is refused before a byte is read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["is_ours", "open_plain", "read_plain"]


def open_plain(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, folder: int | None = None) -> int:
    """Open a file and return its descriptor; usable as `opener` of `open`.

    Raises OSError if the name is a folder, a FIFO, a socket or a device; or a link, and the file is written.

    folder: a descriptor of the folder that `path` is relative to.
    """
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:
        handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            why = f"it is a symbolic link ({_target(path, folder)}), which is not followed: remove it"
            raise OSError(errno.ELOOP, why, str(path)) from None
        if error.errno == errno.ENXIO:  # a FIFO or a socket
            raise OSError(errno.ENXIO, "it is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ENXIO, "it is not a regular file", str(path))
    os.set_blocking(handle, True)
    return handle


def read_plain(path: str | Path) -> bytes:
    """Return the whole content of a file. Raises OSError as `open_plain`."""
    with open(path, "rb", buffering=0, opener=open_plain) as file:
        return file.readall()


def is_ours(found: os.stat_result, group: int | None = None) -> bool:
    """Return whether only this user can have written the file or folder with this status.

    Root counts as the user. A group may write if it is the user's own, as is usual where each user has one, or if it is
    `group`, whose members may also own the file.
    """
    mode, shared = stat.S_IMODE(found.st_mode), found.st_gid == group
    by_group = mode & stat.S_IWGRP and found.st_gid not in (0, os.getgid()) and not shared
    return (shared or found.st_uid in (0, os.getuid())) and not mode & stat.S_IWOTH and not by_group


def _target(path: str | Path, folder: int | None) -> str:
    try:
        return f"to {os.readlink(path, dir_fd=folder)}"
    except OSError:
        return "to nothing"
