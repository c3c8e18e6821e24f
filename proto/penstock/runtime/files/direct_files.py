"""Writing of files from memory; durable ones without the kernel's page cache (O_DIRECT), where supported."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

CHUNK = 16 << 20
"""Bytes written in one call: few enough for the processor's cache."""


def write_file(
    path: Path, region: memoryview, size: int, *, durable: bool, passing: Callable[[memoryview], None]
) -> None:
    """Write the first `size` bytes of a region, which is padded to whole pages, to a new file. `durable`: bypass the
    page cache, and sync at the end. `passing`: called with each piece; its exception ends the write."""
    handle = _open(path, direct=durable)
    try:
        for start in range(0, size, CHUNK):
            end = min(start + CHUNK, size)
            passing(region[start:end])
            # Write whole pages; the file is truncated to its length below.
            _write_all(handle, region[start : -(-end // mmap.PAGESIZE) * mmap.PAGESIZE], start)
        os.ftruncate(handle, size)
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def _open(path: Path, *, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # no O_DIRECT here; some file systems create the file before they refuse it
    return os.open(path, flags, 0o666)


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            done = os.pwrite(handle, data, offset)
        except OSError as error:
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # the file system's blocks are larger than pages, or a part of a block is left
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        data, offset = data[done:], offset + done
