"""Open files that are owned by an object, and closed with it.

A descriptor is a small number, which the kernel gives to the next file as soon as it is closed. Code that keeps the
bare number reads another file then, without any error: one thread closes a shard while another one is about to read it,
and a third opens a file in between. So the number is never kept. Who reads holds the object, and the file is closed
when the last reference to it goes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock.runtime.files.plain_files import open_plain

__all__ = ["Descriptor"]


class Descriptor:
    """An open file. Any number of threads may read it at a time, and forked children too: nothing here has a position.

    It is closed when the last reference to it goes. `close` is only for who knows that nobody else uses it.
    """

    __slots__ = ("__weakref__", "_number")

    def __init__(self, path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> None:
        """Raises OSError."""
        self._number = -1
        self._number = open_plain(path, flags, mode)

    def fileno(self) -> int:
        """The number, for a call that ends before the reference to this object does; -1 once it is closed."""
        return self._number

    def read(self, size: int, begin: int) -> bytes:
        """`size` bytes from position `begin`; fewer only where the file ends. Raises OSError."""
        data = os.pread(self._number, size, begin)
        while len(data) < size:  # the kernel may give less at a time, and gives 2 GiB at most
            more = os.pread(self._number, size - len(data), begin + len(data))
            if not more:
                break
            data += more
        return data

    def close(self) -> None:
        """Again: nothing."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # The default keeps the function while the interpreter ends. First the number goes: a child that another thread
        # forks now must not close it a second time.
        number, self._number = self._number, -1
        if number >= 0:
            close(number)
