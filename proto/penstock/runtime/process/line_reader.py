"""Reads what a process says to another one in lines, by a pipe or a socket, without ever waiting longer than told."""

from __future__ import annotations

import os
import time
from typing import BinaryIO, Self

from penstock.runtime.process.watch import readable

__all__ = ["LinePipe", "LineReader"]

READ_BYTES = 1 << 16


class LineReader:
    """Cuts what comes by a descriptor into lines. Only to be read when there is something, if the descriptor blocks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.rest = b""
        """What came behind the last whole line."""
        self.ended = False
        """No more will come."""

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[bytes]:
        """Return the lines that have come, as far as one call reads them."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:  # reset by the other side's end
            data = b""
        self.ended = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines

    def line(self, timeout_s: float) -> bytes | None:
        """Wait for the next line and return it; None if the other side ended without one. TimeoutError."""
        until = time.monotonic() + timeout_s
        while not self.ended:
            if not readable(self._fd, until - time.monotonic()):
                raise TimeoutError
            if lines := self.read():
                self.rest = b"\n".join([*lines[1:], self.rest])
                return lines[0]
        return None


class LinePipe(LineReader):
    """A pipe for a child to write to; both ends are closed on exec, the reading one does not block."""

    def __init__(self) -> None:
        super().__init__(-1)
        self._fd, write = os.pipe2(os.O_CLOEXEC)
        self.theirs: BinaryIO = os.fdopen(write, "wb", 0)
        """The end to write to. `spawn` closes it here once the child has it."""
        os.set_blocking(self._fd, False)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close both ends."""
        if self._fd >= 0:
            self.theirs.close()
            os.close(self._fd)
            self._fd = -1
