"""An interpreter that forks, from both sides.

`penstock doctor` and `penstock replay` run loaders as workers do: in processes forked from a fresh interpreter that has
imported torch and seen no user code, with the run's hash seed. It dies with the command, and its children with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from penstock.proto.errors import DeadlineError, LaneLostError, WorkerLostError
from penstock.runtime.process import forks
from penstock.worker.processes.child_processes import START_DEADLINE_S, child_environment
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage
from penstock.worker.processes.user_path import interpreter
from penstock.worker.runner.fork_server import die_with_parent

__all__ = ["ForkingInterpreter", "begin", "fork", "kill_group", "show_stack"]

ABORT_S = 2.0
"""For a child that is told to show its stack and end."""


class ForkingInterpreter:
    """Seen from the command, which waits with deadlines. What user code prints goes to standard error.

    `module`: its `main` serves what is said on `channel`, which it gets from `begin`.
    """

    def __init__(self, module: str, seed: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = ControlChannel(ours)
        with theirs:
            self._process = subprocess.Popen(
                interpreter(module, str(theirs.fileno()), str(os.getpid())),
                pass_fds=[theirs.fileno()],
                env=child_environment(seed),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,  # Ctrl-C is ours alone
            )
        try:
            if self.hear(time.monotonic() + START_DEADLINE_S) is None:
                raise DeadlineError("the interpreter that runs the loaders did not start")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill it; its children die with it."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def hear(self, until: float) -> ControlMessage | None:
        """What it says next; None if it has said nothing by this monotonic time. Raises WorkerLostError if it died."""
        try:
            while (message := self.channel.receive(wait=False)) is None:
                if not select.select([self.channel.fileno()], [], [], max(0.0, until - time.monotonic()))[0]:
                    return None
        except LaneLostError as error:
            raise WorkerLostError("the interpreter that runs the loaders died; see above") from error
        return message


def begin() -> ControlChannel:
    """Inside it, before anything else: the way to the command, which hears that it is up."""
    channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, which stops us
    faulthandler.enable()
    channel.send("up")
    return channel


def fork(run: Callable[[], None]) -> int:
    """Inside it: a child that does this, in a process group of its own, and ends with status 0, or 1 for an error. Its
    process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        forks.host_user_code()
        run()
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def show_stack(pid: int) -> None:
    """faulthandler prints the stack of every thread of a child before it dies."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGABRT)
            select.select([fd], [], [], ABORT_S)
        finally:
            os.close(fd)


def kill_group(pid: int) -> None:
    """A child, and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
