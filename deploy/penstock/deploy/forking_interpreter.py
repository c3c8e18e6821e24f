"""An interpreter that forks, from both sides.

`penstock doctor` and `penstock replay` run loaders as workers do: in processes forked from a fresh interpreter that has
imported torch and seen no user code, with the run's hash seed. It dies with the command, and its children with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
from typing import Self

from penstock.proto.errors import DeadlineError, LaneLostError, WorkerLostError
from penstock.runtime.process.spawn import spawn
from penstock.runtime.process.watch import Process, die_with_parent, readable
from penstock.worker.processes.child_processes import START_DEADLINE_S, child_environment
from penstock.worker.processes.control_channel import Channel, Message
from penstock.worker.processes.user_path import interpreter

__all__ = ["Interpreter", "begin", "show_stack"]

ABORT_S = 2.0
"""For a child that is told to show its stack and end."""


class Interpreter:
    """Seen from the command, which waits with deadlines. What user code prints goes to standard error.

    `module`: its `main` serves what is said on `channel`, which it gets from `begin`.
    """

    def __init__(self, module: str, seed: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = Channel(ours)
        command = interpreter(module, str(theirs.fileno()), str(os.getpid()))
        self._process = spawn(command, fds=[theirs], stdout=2, env=child_environment(seed))
        try:
            if self.hear(time.monotonic() + START_DEADLINE_S) is None:
                raise DeadlineError("the interpreter that runs the loaders did not start")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill it; its children die with it."""
        self._process.kill()
        self._process.wait()
        self._process.close()
        self.channel.close()

    def hear(self, until: float) -> Message | None:
        """What it says next; None if it has said nothing by this monotonic time. Raises WorkerLostError if it died."""
        try:
            while (message := self.channel.receive(wait=False)) is None:
                if not readable(self.channel.fileno(), until - time.monotonic()):
                    return None
        except LaneLostError as error:
            raise WorkerLostError("the interpreter that runs the loaders died; see above") from error
        return message


def begin() -> Channel:
    """Inside it, before anything else: the way to the command, which hears that it is up."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, which stops us
    faulthandler.enable()
    channel.send("up")
    return channel


def show_stack(pid: int) -> None:
    """Have faulthandler print the stack of every thread of a child, of which it dies."""
    with contextlib.suppress(ProcessLookupError), Process(pid) as child:
        child.send(signal.SIGABRT)
        child.wait(ABORT_S)
