"""Atomic writes: a file exists whole or not at all, whenever the machine stops."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["sync_folder", "write_whole"]


def write_whole(path: Path, data: bytes | memoryview, *, mode: int | None = None) -> None:
    """Write a file under another name in the same folder, sync it to disk, and rename it.

    `mode`: its permissions, if not the default of new files. The folder is synced too, and so everything written into
    it before.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with temporary.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk: files that were made, renamed or deleted there."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync folders
            raise
    finally:
        os.close(handle)
