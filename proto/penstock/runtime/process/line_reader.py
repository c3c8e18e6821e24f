"""Reader of lines that another process writes to a pipe or socket. Every wait has a deadline."""

from __future__ import annotations

import os
import time
from typing import BinaryIO, Self

from penstock.runtime.process.watch import readable

READ_BYTES = 1 << 16


class LineReader:
    """Reader that splits bytes from a descriptor into lines. If it blocks, call `read` only when it is readable."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.rest = b""
        """Bytes received after the last complete line."""
        self.ended = False
        """True once the other process has closed its end."""

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[bytes]:
        """Read once, and return the lines that are complete after that, without their line breaks."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:  # reset because the other side ended
            data = b""
        self.ended = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines

    def line(self, timeout_s: float) -> bytes | None:
        """Wait for the next line; None if the other process has closed its end. Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while not self.ended:
            if not readable(self._fd, until - time.monotonic()):
                raise TimeoutError(f"the other process wrote no line within {timeout_s:g} s: look at its log")
            if lines := self.read():
                self.rest = b"\n".join([*lines[1:], self.rest])
                return lines[0]
        return None


class LinePipe(LineReader):
    """Pipe to which a child process writes. Both ends are closed on exec, and the reading end does not block."""

    def __init__(self) -> None:
        super().__init__(-1)
        self._fd, write = os.pipe2(os.O_CLOEXEC)
        self.theirs: BinaryIO = os.fdopen(write, "wb", 0)
        """Writing end, for the child. `spawn` closes it in this process."""
        os.set_blocking(self._fd, False)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            self.theirs.close()
            os.close(self._fd)
            self._fd = -1
