"""Processes that run one program of this package and share the numbered *jobs* of a task, such as parts of a
conversion.

    python -m PROGRAM PLAN JOBS OUTPUT PARENT

File descriptors: PLAN has the task; JOBS has the numbers of the jobs, and because all processes share the position in
it, each number is read by one; OUTPUT is a pipe for reports, one JSON object per line. PARENT: ID of the process with
which these end.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from penstock.proto import errors
from penstock.proto.errors import DatasetError, PenstockError
from penstock.runtime.process.lifetime import wait_for_parent_end
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import Spawned, module, spawn
from penstock.runtime.process.watch import wait_for_any

JOB = struct.Struct("<Q")
"""Layout of a job's number in the file JOBS."""
END_S = 60.0
"""Seconds that a process may take to end after SIGTERM, before it is killed."""

Work = Callable[[int], dict[str, Any]]
"""Function that does the job with a given number and returns its report. It raises PenstockError if the job fails."""
Begun = Callable[[bytes], AbstractContextManager[Work]]


def in_processes(program: str, plan: bytes, jobs: Sequence[int], count: int) -> Iterator[dict[str, Any]]:
    """Let `count` processes of the module `program`, which calls `serve_jobs`, do jobs; yield each job's report. If one
    fails, let the others finish the jobs that they have begun, then raise the error of the first that failed."""
    with contextlib.ExitStack() as stack:
        texts = plan, b"".join(map(JOB.pack, jobs))
        plan_file, jobs_file = (stack.enter_context(shared_file(text)) for text in texts)
        children: dict[LinePipe, Spawned] = {}
        for _ in range(count):
            pipe = LinePipe()
            command = module(program, *map(str, (plan_file, jobs_file, pipe.theirs.fileno(), os.getpid())))
            children[pipe] = child = spawn(command, fds=(plan_file, jobs_file, pipe.theirs), session=False)
            stack.callback(child.close)
            stack.callback(child.end, END_S)
            stack.callback(pipe.close)
        failed: Exception | None = None
        while children:
            for fd in wait_for_any([pipe.fileno() for pipe in children]):
                pipe = next(each for each in children if each.fileno() == fd)
                for line in pipe.read():
                    said = json.loads(line)
                    if "error" in said:
                        failed = failed or _error_of(said)
                        os.lseek(jobs_file, 0, os.SEEK_END)  # no process begins another job
                    else:
                        yield said
                if pipe.ended:
                    status = children.pop(pipe).result()
                    if status and failed is None:
                        failed = DatasetError(
                            f"a process of {program} ended with exit status {status} before its work was done. Try "
                            "again, with fewer processes if memory was short; what is finished is kept"
                        )
                        os.lseek(jobs_file, 0, os.SEEK_END)
        if failed is not None:
            raise failed


def serve_jobs(begun: Begun) -> int:
    """Do jobs in this process until none is left. Return the exit status: 1 if a job has failed, else 0. `begun`: gets
    the plan, returns a context manager of the function that does one job."""
    *descriptors, parent = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return do_jobs(begun, *descriptors)


def do_jobs(begun: Begun, plan: int, jobs: int, output: int) -> int:
    """Do jobs as `serve_jobs` does, with the file descriptors of its command line."""

    def say(report: dict[str, Any]) -> None:
        left = json.dumps(report).encode() + b"\n"
        while left:
            left = left[os.write(output, left) :]

    try:
        with begun(os.pread(plan, os.fstat(plan).st_size, 0)) as work:
            while job := os.read(jobs, JOB.size):
                (number,) = JOB.unpack(job)
                say(work(number))
    except PenstockError as error:
        say({"error": type(error).__name__, "message": error.message})
        return 1
    return 0


def _end_with(parent: int) -> None:
    wait_for_parent_end(parent)
    os._exit(1)


@contextlib.contextmanager
def shared_file(content: bytes) -> Iterator[int]:
    """Yield the descriptor of a file. Processes that inherit it share its position, so each record is read by one of
    them: the kernel locks the position during a read, for a file on a disk."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


def _error_of(said: Mapping[str, Any]) -> PenstockError:
    kind = getattr(errors, str(said["error"]), DatasetError)
    return kind(said["message"])
