"""Interpreter that forks child processes for a command, and the two sides of its use: the command's and the child's.

`penstock doctor` and `penstock replay` run loaders in the same way as workers: in processes forked from a fresh
interpreter that has imported torch, has seen no user code, and has the hash seed of runners. Each child has a socket of
its own to the command, for tasks and answers. The interpreter ends when the command ends, and its children with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

from penstock.proto.errors import DeadlineError, LaneLostError, WorkerLostError
from penstock.runtime.process import forks
from penstock.runtime.process.end import describe_exit, kill_group, reap
from penstock.runtime.process.spawn import fork, spawn
from penstock.runtime.process.watch import Process, die_with_parent, readable, wait_for_any
from penstock.worker.tools.loader_children import (
    START_DEADLINE_S,
    ControlChannel,
    ControlMessage,
    child_environment,
    interpreter,
)

__all__ = ["ForkedChild", "ForkingInterpreter", "Task", "serve", "take_task", "wait_for_messages"]

ABORT_S = 2.0
"""Longest time in seconds that a child may take to print its stack and end."""
EXIT_S = 2.0
"""Longest time in seconds that a child may take to end after its socket was closed."""


@dataclass(frozen=True)
class Task:
    """Task that a command sends to a child process."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes = b""
    parts: Sequence[bytes] = ()


class ForkingInterpreter:
    """Handle by which a command controls the forking interpreter. All calls that wait for an answer have deadlines.
    What user code prints goes to standard error.

    `module`: name of the module that the interpreter runs. The module's `main` must call `serve`.
    """

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = ControlChannel(ours)
        command = interpreter(module, str(theirs.fileno()), str(os.getpid()))
        self._process = spawn(command, fds=[theirs], stdout=2, env=child_environment())
        try:
            self._receive_reply()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the interpreter; its children die with it."""
        self._process.kill()
        self._process.wait()
        self._process.close()
        self._channel.close()

    def fork(self) -> ForkedChild:
        """Return a new child process, which has seen no user code."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        channel = ControlChannel(here)
        try:
            with there:
                self._channel.send("fork", fds=[there.fileno()])
                return ForkedChild(self, channel, int(self._receive_reply().fields["pid"]))
        except BaseException:
            channel.close()
            raise

    def reap(self, pid: int) -> int:
        """Return the exit status of a child that has ended, negative if a signal ended it (as Popen.returncode). The
        child's descendants are killed."""
        self._channel.send("reap", pid=pid)
        return int(self._receive_reply().fields["status"])

    def _receive_reply(self) -> ControlMessage:
        """Return the next message of the interpreter. Raises WorkerLostError if the interpreter has died, DeadlineError
        if it sends none for START_DEADLINE_S seconds."""
        until = time.monotonic() + START_DEADLINE_S
        try:
            while (message := self._channel.receive(wait=False)) is None:
                if not readable(self._channel.fileno(), until - time.monotonic()):
                    raise DeadlineError(
                        f"the Python process that runs the loaders did not answer within {START_DEADLINE_S:g} s. See "
                        "whether this machine is overloaded, and try again"
                    )
        except LaneLostError as error:
            raise WorkerLostError("the Python process that runs the loaders died. See its output above") from error
        return message


class ForkedChild:
    """Handle by which a command controls one child of the interpreter. A pidfd reports the child's end. The end of the
    child's socket is not used for that, because descendants of the child may keep the socket open."""

    def __init__(self, parent: ForkingInterpreter, channel: ControlChannel, pid: int) -> None:
        self.channel = channel
        self.process = Process(pid)
        self._parent = parent
        self._reaped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the child and its descendants."""
        if not self._reaped:
            kill_group(self.process.pid)
        self.process.close()
        self.channel.close()

    def ask(self, task: Task) -> None:
        """Send a task to the child. If the child has died, this call raises no error; the next `poll` or `receive`
        raises it."""
        with contextlib.suppress(LaneLostError):
            self.channel.send(task.kind, task.payload, parts=len(task.parts), **task.fields)
            for part in task.parts:
                self.channel.send("part", part)

    def poll(self) -> ControlMessage | None:
        """Return the child's next message; None if no message has arrived. Raises LaneLostError if the child has
        ended."""
        ended = self.process.ended  # read first: messages sent before the end can still be read
        message = self.channel.receive(wait=False)
        if message is None and ended:
            raise LaneLostError("the child process has ended. See its output above")
        return message

    def receive(self, until: float) -> ControlMessage | None:
        """Wait for the child's next message and return it; None if no message arrives before the time `until`
        (monotonic clock, in seconds). Raises LaneLostError if the child has ended."""
        while (message := self.poll()) is None:
            if not wait_for_messages([self], until):
                return None
        return message

    def exit_description(self) -> str:
        """Return a text that says how the child ended. Call it after the child's last message was received."""
        if not self.process.wait(EXIT_S):
            return "closed its descriptors"
        status = self._parent.reap(self.process.pid)
        self._reaped = True
        return describe_exit(status)

    def show_stack(self) -> None:
        """Send the child a signal that prints the stack of each of its threads (by faulthandler) and ends it."""
        self.process.send(signal.SIGABRT)
        self.process.wait(ABORT_S)


def wait_for_messages(children: Iterable[ForkedChild], until: float) -> list[ForkedChild]:
    """Wait until at least one child has sent a message or ended, and return those children. Return an empty list at the
    time `until` (monotonic clock, in seconds)."""
    by_fd = {fd: child for child in children for fd in (child.channel.fileno(), child.process.fileno())}
    return list(dict.fromkeys(by_fd[fd] for fd in wait_for_any(by_fd, until - time.monotonic())))


# ---- the child's side


def serve(child: Callable[[ControlChannel], None]) -> None:
    """Run the forking interpreter: for each socket that the command sends, fork a child that calls `child` with it.
    Return when the command closes its own socket."""
    control = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the command ends this process
    faulthandler.enable()
    control.send("up")
    with contextlib.suppress(LaneLostError):
        while True:
            order = cast(ControlMessage, control.receive())
            if order.kind == "reap":
                control.send("reaped", status=reap(order.fields["pid"]))
                continue
            (fd,) = order.fds
            pid = fork(partial(_in_child, child, control, fd))
            os.close(fd)
            control.send("forked", pid=pid)


def _in_child(child: Callable[[ControlChannel], None], control: ControlChannel, fd: int) -> None:
    control.close()
    forks.host_user_code()
    channel = ControlChannel(socket.socket(fileno=fd))
    forks.keep(channel)
    try:
        with contextlib.suppress(LaneLostError):
            child(channel)
    finally:
        channel.sock.detach()  # the socket is closed when the process ends


def take_task(channel: ControlChannel) -> Task:
    """Wait in a child process for the command's next task and return it."""
    message = cast(ControlMessage, channel.receive())
    parts = [cast(ControlMessage, channel.receive()).payload for _ in range(message.fields.pop("parts"))]
    return Task(message.kind, message.fields, message.payload, parts)
