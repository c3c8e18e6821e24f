"""Start of child processes: fresh interpreters, and forks of this process.

Interpreters have only the named descriptors, and -P, so that a user's file in the working directory does not replace a
module. Every child leads a process group, so Ctrl-C reaches only the user's command, which then ends its children. How
children live and end with this process is in lifetime.py."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import penstock.proto
from penstock.runtime.process.lifetime import die_with_parent, keeping_handlers, signals_blocked
from penstock.runtime.process.watch import Process

NULL = subprocess.DEVNULL
TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_*"),
)
"""Environment variables of torchrun that a training process must not pass on to its child processes."""
_REAP_S = 1.0
"""Longest time in seconds to wait for another thread that is just reaping an ended child."""

# Code that runs a program like -m, but without importing its package: see `by_path`.
_RUN = (
    "import os, runpy, sys; program, places = sys.argv[1:3]; sys.path += places.split(os.pathsep); "
    "sys.argv[:3] = [program]; runpy.run_path(program, run_name='__main__')"
)


class _End(Protocol):
    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Spawned(Process):
    """`link`: socket whose other end is the child's standard input, by which it is asked to end."""

    def __init__(self, popen: subprocess.Popen[bytes], link: socket.socket | None = None) -> None:
        self._link = link
        try:
            super().__init__(popen.pid)
        except OSError:
            super().__init__(popen.pid, -1)
        self._popen = popen

    def __del__(self) -> None:
        super().__del__()
        if self._link is not None:
            self._link.close()

    @property
    def status(self) -> int | None:
        """Exit status, or minus the number of the signal that killed the child; None while it runs."""
        return self._popen.poll()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the child has ended, and reap it. Return False if it still runs after `timeout_s` seconds."""
        if self._popen.returncode is None and self.fileno() >= 0:
            if not super().wait(timeout_s):
                return False
            timeout_s = _REAP_S  # a signal handler may have interrupted another wait
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        return self._popen.returncode is not None

    def result(self) -> int:
        while not self.wait():
            pass
        return self._popen.returncode

    def send(self, number: int) -> bool:
        if self.fileno() >= 0:
            return super().send(number)
        self._popen.send_signal(number)
        return self._popen.returncode is None

    def ask_to_end(self) -> None:
        if self._link is None:
            super().ask_to_end()
            return
        with contextlib.suppress(OSError):  # it has ended, or was asked before
            self._link.shutdown(socket.SHUT_RDWR)  # a close alone is not seen while a forked child holds the socket

    def close(self) -> None:
        super().close()
        if self._link is not None:
            self._link.close()

    def let_go(self) -> None:
        """Stop watching the child, so that it may outlive this process."""
        self._popen.returncode = 0
        self.close()


def spawn(
    command: Sequence[str],
    *,
    stdout: int | _End | None = None,
    stderr: int | _End | None = None,
    fds: Sequence[int | _End] = (),
    env: Mapping[str, str] | None = None,
    session: bool = True,
    outlives: bool = False,
    linked: bool = False,
) -> Spawned:
    """Start a child process. Raises OSError if it cannot be started.

    `stdout`, `stderr`: a descriptor, NULL, an end of a pipe, or this process's; `fds`: descriptors that the child has
    under the same numbers; `session` False: a process group in this session; `outlives`: the child is a
    program that calls `outlive_signals`; `linked`: the same, and it ends when its `Parent` asks it by standard input.
    Sockets and ends of pipes are closed in this process, also after an error; descriptors given as numbers stay
    open."""
    passed = [fd if isinstance(fd, int) else fd.fileno() for fd in fds]
    link = theirs = None
    with contextlib.ExitStack() as closing:
        for given in (stdout, stderr, *fds):
            if given is not None and not isinstance(given, int):
                closing.callback(given.close)
        if linked:
            link, theirs = socket.socketpair()
            closing.enter_context(theirs)
        if linked or outlives:
            closing.enter_context(signals_blocked())
        try:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if theirs is None else theirs.fileno(),
                stdout=stdout,  # type: ignore[arg-type]  # Popen asks for no more than fileno()
                stderr=stderr,  # type: ignore[arg-type]
                pass_fds=passed,
                env=env,
                start_new_session=session,
                process_group=None if session else 0,
            )
        except BaseException:
            if link is not None:
                link.close()
            raise
    return Spawned(popen, link)


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", name, *arguments]


def by_path(program: Path, *needed: ModuleType) -> list[str]:
    """Return the command that runs a program of Penstock by its file: `python -m` would import penstock.client and
    torch. The folders of Penstock and `needed` come last on the path, so that they hide no modules of Python."""
    places = [Path(path).parent for path in penstock.__path__]
    places += [Path(str(package.__file__)).parents[1] for package in needed]
    return [sys.executable, "-P", "-c", _RUN, str(program), os.pathsep.join(map(str, places))]


def environment(*without: str) -> dict[str, str]:
    """Return this process's environment without some variables. A name that ends in * stands for a beginning."""
    prefixes = tuple(name[:-1] for name in without if name.endswith("*"))
    return {name: value for name, value in os.environ.items() if name not in without and not name.startswith(prefixes)}


def fork(run: Callable[[], int | None]) -> int:
    """Fork a child that calls `run` and ends with its result (None is 0), or 1 for an error, whose traceback it prints.
    Return its id, to reap it (end.py).

    It leads a process group and dies with this process, which must have no threads. Exit handlers do not run in it."""
    parent = os.getpid()
    with keeping_handlers():
        pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # in parent and child: the group may be killed before the child runs
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        status = run() or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
