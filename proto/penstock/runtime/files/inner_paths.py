"""Access to files below a folder in which other users may create names: it is looked up folder by folder, each held by
a descriptor, so no link can lead outside, also meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_HELD = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def parent_of(root: str | Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder that holds a file below `root`, for `dir_fd`, and the file's name in it. Raises
    OSError, also for a link below `root`. `name`: path without ".."; `make`: create folders, which a group may
    write as the folder above if that gives its group to them."""
    *folders, last = name.split("/")
    held = os.open(root, _HELD)
    try:
        for number, folder in enumerate(folders, 1):
            made = False
            with contextlib.suppress(FileExistsError):
                if make:
                    os.mkdir(folder, dir_fd=held)
                    made = True
            try:
                below = os.open(folder, _HELD | os.O_NOFOLLOW, dir_fd=held)
            except NotADirectoryError:
                where = os.path.join(root, *folders[:number])
                raise OSError(errno.ENOTDIR, "the path must be a folder, got a link or a file", where) from None
            above, held = held, below
            mode = os.fstat(above).st_mode
            os.close(above)
            if made and mode & stat.S_ISGID and mode & stat.S_IWGRP:
                os.chmod(f"/proc/self/fd/{held}", stat.S_IMODE(mode))
        yield held, last
    finally:
        os.close(held)


def unlink_below(root: str | Path, name: str) -> None:
    """Remove a file below a folder. Raises OSError if a folder on the way is a link."""
    with parent_of(root, name) as (folder, last):
        os.unlink(last, dir_fd=folder)


def is_strange_link(path: str | Path) -> bool:
    """True if a path is a link that neither this user nor root has made."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.getuid())


def refuse_strange_links(path: Path) -> None:
    """Raise OSError if a path leads through a stranger's link in a folder such as /tmp (fs.protected_symlinks=1)."""
    path = path.absolute()
    for part in [*reversed(path.parents), path]:
        try:
            above = os.stat(part.parent)
        except OSError:
            return
        shared = above.st_mode & stat.S_ISVTX and above.st_mode & stat.S_IWOTH
        if shared and is_strange_link(part) and os.lstat(part).st_uid != above.st_uid:
            raise OSError(errno.EACCES, "the path must not contain a link of another user", str(part))
