"""Worker daemons and embedded daemons, forked from an interpreter that has imported what a fork server imports: their
fork servers are forks of them, so that a start does not cost the two seconds of a processor that torch takes.

All else is as users have it: the hash seed, the environment, the descriptors, the working directory last in the path.
The start that users have is tested where programs of their own embed daemons, and in tests/deploy and tests/worker.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import interpreters as warm

from penstock.runtime.process.spawn import Spawned, by_path
from penstock.runtime.process.titles import title_process
from penstock.worker.processes import interpreters
from penstock.worker.processes.interpreters import StartedForkServer

__all__ = ["install", "start_worker"]

FORK_SERVER = "penstock.worker.runner.fork_server"
IMPORTS = (
    "numpy.random",
    "pydantic_settings",
    "torch",
    "penstock.data",
    "penstock.worker.runner.replayer",
    FORK_SERVER,
)
PYTHON = (sys.executable, "-X", f"room_for_titles={'_' * 200}")


def start_worker(
    arguments: Sequence[str], environment: Mapping[str, str], ready: int, stderr: int | None
) -> warm.Forked:
    """`python -m penstock.worker`, which tells by the descriptor `ready` when it is up."""
    given = ["worker", *arguments]
    return warm.start("warm_daemons", given, environment, imports=IMPORTS, python=PYTHON, ready=ready, stderr=stderr)


def install() -> None:
    """Have appliances that this process embeds start so."""
    embedded: Any = importlib.import_module("penstock.client.embedded")
    spawn, command = embedded.spawn, by_path(embedded.DAEMONS)

    def started(given: list[str], *, stdout: Any, stderr: Any, fds: Sequence[int], env: Mapping[str, str]) -> Spawned:
        if given[:-1] != command:  # a test's own interpreter
            return cast(Spawned, spawn(given, stdout=stdout, stderr=stderr, fds=fds, env=env))
        with stdout:
            out = stdout.fileno()
            process = warm.start(
                *("warm_daemons", ["embedded", str(embedded.DAEMONS), given[-1]], env),
                imports=IMPORTS,
                python=PYTHON,
                ready=fds[0],
                stdout=out,
                stderr=out,
            )
        return Spawned(_Popen(process))  # type: ignore[arg-type]

    embedded.spawn = started


class _Popen:
    """What a Spawned asks of a Popen, in any thread."""

    def __init__(self, process: warm.Forked) -> None:
        self.pid, self._process, self._asked = process.pid, process, threading.Lock()

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        with self._asked:
            return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        with self._asked:
            return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        with self._asked:
            self._process.send_signal(number)


def _fork_server(*, sandboxed: bool = True, user: str = "") -> StartedForkServer:
    """What start_fork_server does, by a fork of this process, which has no threads yet."""
    assert not user
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    given, parent = interpreters.child_environment(), os.getpid()
    pid = os.fork()
    if not pid:
        try:
            os.setpgid(0, 0)
            os.closerange(3, theirs.fileno())
            os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
            os.environ.clear()
            os.environ.update(given)
            sys.argv[:] = ["-c", str(theirs.fileno()), str(parent), *(["sandboxed"] if sandboxed else [])]
            title_process(f"{sys.executable} -P -c {FORK_SERVER}")  # by which tests know it
            sys.modules[FORK_SERVER].main()
        finally:
            os._exit(1)
    theirs.close()
    popen: Any = subprocess.Popen.__new__(subprocess.Popen)
    popen.args, popen.pid, popen.returncode, popen._child_created = sys.argv, pid, None, True
    popen.stdin = popen.stdout = popen.stderr = None
    popen._waitpid_lock = threading.Lock()
    return StartedForkServer(Spawned(popen), ours)


def main() -> Any:
    """The daemon, in the forked process."""
    what, *arguments = sys.argv[1:]
    *arguments, _, descriptor = arguments
    tempfile.tempdir = None  # another one may be in the environment
    del sys.path[0]  # the working directory, of `python -m`
    sys.path[:0] = [
        place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in ("", *sys.path)
    ]
    interpreters.add_working_directory()
    if what == "worker":
        fork_server = _fork_server()
        from penstock.worker import __main__ as program

        sys.argv[1:] = [*arguments, "--ready-fd", descriptor]
        program.serve = partial(program.serve, fork_server=fork_server)  # type: ignore[attr-defined]
        return program.main()
    interpreters.start_fork_server = _fork_server
    path, settings = arguments
    sys.argv[1:] = [json.dumps(json.loads(settings) | {"folder_fd": int(descriptor)})]
    return runpy.run_path(path, run_name="__main__")
