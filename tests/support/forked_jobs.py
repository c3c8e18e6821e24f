"""Processes for jobs that are forked here instead of started: importing torch takes seconds."""

from __future__ import annotations

import os
from typing import Any

from forked import Child

from penstock.data.job_processes import Begun, do_jobs

__all__ = ["forked_jobs"]


def forked_jobs(begun: Begun) -> type[Child]:
    """Return what takes the place of `spawn` for a program whose work this is."""

    class Forked(Child):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(lambda: os._exit(do_jobs(begun, *map(int, command[-4:-1]))))
            for fd in options["fds"]:
                if not isinstance(fd, int):
                    fd.close()

        def result(self) -> int:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

        def end(self, grace_s: float) -> None:
            """Return True once the process has ended."""

        def close(self) -> None:
            os.close(self._said)

    return Forked
