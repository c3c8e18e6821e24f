"""Open files that belong to an object, and are closed with its last reference. No code keeps the bare number of an open
file: once one thread closes it, the kernel gives the number to the next file, which another thread would then read
without any error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.runtime.files.plain_files import open_plain


class Descriptor:
    """Open file. Any number of threads and forked children may read it, because each read names the byte where it
    begins. Call `close` only if nothing else uses the object."""

    __slots__ = ("__weakref__", "_number")

    def __init__(
        self, path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, folder: int | None = None
    ) -> None:
        """`folder`: a descriptor of the folder that `path` is relative to. Raises OSError."""
        self._number = -1
        self._number = open_plain(path, flags, mode, folder=folder)

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed, for calls that end before the reference to this object is dropped."""
        return self._number

    def read(self, size: int, begin: int) -> bytes:
        """Return `size` bytes from byte `begin`, or fewer at the file's end. Raises OSError."""
        data = os.pread(self._number, size, begin)
        while len(data) < size:  # the kernel may return fewer bytes, and returns at most 2 GiB
            more = os.pread(self._number, size - len(data), begin + len(data))
            if not more:
                break
            data += more
        return data

    def read_all(self) -> bytes:
        return self.read(os.fstat(self._number).st_size, 0)

    def read_into(self, array: np.ndarray[Any, Any], begin: int) -> int:
        """Fill a contiguous array from byte `begin`. Return the bytes read, fewer at the file's end. Raises OSError."""
        done = os.preadv(self._number, [array.data], begin)
        if done < array.nbytes:  # the kernel may read fewer bytes
            rest = array.reshape(-1).view(np.uint8).data
            while done < array.nbytes and (more := os.preadv(self._number, [rest[done:]], begin + done)):
                done += more
        return done

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # The default argument keeps the function available while the interpreter exits. The number is reset first: a
        # child that another thread forks now must not close it a second time.
        number, self._number = self._number, -1
        if number >= 0:
            close(number)
