"""Safe access to files in folders that other users can write to: only regular files are opened.

A name there may be a link to a file of this user, which opening would truncate; a FIFO, which blocks forever; a device,
which never ends; or a sparse file larger than the memory. So links and files with a second name (a hard link) are not
written, and sizes are limited."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_IRREGULAR = "the path must be a regular file, got a folder, pipe, socket or device"


def open_plain(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, folder: int | None = None) -> int:
    """Open a regular file and return its descriptor. This can be the `opener` of Python's `open`.

    Raises OSError for anything else; for writing also for a link, or a second name, which another user can give a file
    unless fs.protected_hardlinks forbids it. `folder`: descriptor to which `path` is relative."""
    written = bool(flags & (os.O_WRONLY | os.O_RDWR))
    if written:
        flags |= os.O_NOFOLLOW
    try:  # without O_TRUNC: the file is truncated below, after the check of its type
        handle = os.open(path, (flags & ~os.O_TRUNC) | os.O_CLOEXEC | os.O_NONBLOCK, mode, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            why = f"the path must not be a symbolic link ({_target(path, folder)}): remove the link"
            raise OSError(errno.ELOOP, why, str(path)) from None
        if error.errno == errno.ENXIO:  # a FIFO or a socket
            raise OSError(errno.ENXIO, _IRREGULAR, str(path)) from None
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.ENXIO, _IRREGULAR, str(path))
        if written and found.st_nlink > 1:
            raise OSError(errno.EMLINK, "the file must not have a second name (hard link): remove that name", str(path))
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
        os.set_blocking(handle, True)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_plain(path: str | Path, limit: int) -> bytes:
    """Return a file's content. Raises OSError as `open_plain`, and above `limit` bytes, before memory is allocated."""
    with open(path, "rb", buffering=0, opener=open_plain) as file:
        size, pieces, read = os.fstat(file.fileno()).st_size, [], 0
        # Ask for one byte more than the size, because the file may have grown.
        while size <= limit and (piece := file.read(max(size - read, 0) + 1)):
            pieces.append(piece)
            read += len(piece)
            size = max(size, read)
        if size > limit:
            raise OSError(errno.EFBIG, f"the file must have at most {limit} bytes, got {size}", str(path))
        return b"".join(pieces)


def is_ours(found: os.stat_result, group: int | None = None) -> bool:
    """True if only this user or root can have written it, or the user's own group (many systems give each user one), or
    `group`, whose members may also own it."""
    mode, shared = stat.S_IMODE(found.st_mode), found.st_gid == group
    by_group = mode & stat.S_IWGRP and found.st_gid not in (0, os.getgid()) and not shared
    return (shared or found.st_uid in (0, os.getuid())) and not mode & stat.S_IWOTH and not by_group


def _target(path: str | Path, folder: int | None) -> str:
    try:
        return f"to {os.readlink(path, dir_fd=folder)}"
    except OSError:
        return "to nothing"
