"""Children of the test's process, forked: quick to start, real to kill. What they find wrong comes back as text."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from types import TracebackType

__all__ = ["Child", "join_all"]


class Child:
    """Runs `work`, and ends. As a context it is killed at its end, if it still runs."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._said = os.memfd_create("said")
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                os.write(self._said, traceback.format_exc().encode())
            finally:
                os._exit(code)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._code is None:
            self.kill()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._code = os.waitpid(self.pid, 0)[1]
        os.close(self._said)

    def join(self, timeout_s: float = 60) -> None:
        """Wait for the child's end. Raises AssertionError with its output if it failed or did not end."""
        deadline = time.monotonic() + timeout_s
        while True:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = code
                break
            assert time.monotonic() < deadline, f"child {self.pid} has not ended"
            time.sleep(0.005)
        said = os.pread(self._said, 1 << 16, 0).decode()
        os.close(self._said)
        assert not code, f"child {self.pid} ended with {code}:\n{said}"


def join_all(*works: Callable[[], object]) -> None:
    """All at the same time, until all have ended well. What still runs when one has not is killed."""
    with contextlib.ExitStack() as stack:
        for child in [stack.enter_context(Child(work)) for work in works]:
            child.join()
