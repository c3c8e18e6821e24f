"""Atomic writes: if the process (or, when synced, the machine) stops, the file has its whole new or old content."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal


def write_whole(
    path: Path,
    data: bytes | memoryview | Iterator[bytes],
    *,
    mode: int | None = None,
    sync: bool | Literal["content"] = True,
) -> None:
    """Write a file under a temporary name that cannot be guessed, so that no other user can put a link there, sync it
    and rename it; also sync the folder. `data`: content, or an iterator over pieces; `mode`: permissions; `sync` False:
    may be lost in a power failure; "content": only its name may, until the caller syncs the folder, once for all."""
    temporary = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    try:
        with temporary.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            for piece in (data,) if isinstance(data, bytes | bytearray | memoryview) else data:
                file.write(piece)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync is True:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync folders
            raise
    finally:
        os.close(handle)
