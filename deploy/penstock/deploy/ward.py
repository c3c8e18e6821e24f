"""Where the doctor's patients are: the process that runs loaders, seen from the doctor, who waits with a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from penstock.proto.errors import DeadlineError, LaneLostError, WorkerLostError, error_named
from penstock.worker.children import START_DEADLINE_S, child_environment
from penstock.worker.control import Channel, Message

__all__ = ["Answer", "Ward", "kill_group", "show_stack"]

ABORT_S = 2.0
"""For a child that is told to show its stack and end."""


class Answer(list[Message]):
    """What a task said, in order; the last message is its `done`."""

    @property
    def done(self) -> Message:
        return self[-1]


class Ward:
    """One interpreter that forks a fresh process for each task. What user code prints goes to standard error.

    `deadline_s`: of each task, seconds.
    """

    def __init__(self, seed: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = Channel(ours)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from penstock.deploy.examine import main; main()",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                env=child_environment(seed),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,  # Ctrl-C is ours alone
            )
        try:
            self._hear("the interpreter that runs the loader did not start", time.monotonic() + START_DEADLINE_S, 0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ward:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill it; a child of it dies with it."""
        self._process.kill()
        self._process.wait()
        self._channel.sock.close()

    def ask(self, what: str, kind: str, parts: Sequence[bytes] = (), **fields: Any) -> Answer:
        """Have a fresh process do a task. `what` names it in errors.

        Raises what the task raised; WorkerLostError if its process died; DeadlineError, with the stack on standard
        error.
        """
        self._channel.send(kind, parts=len(parts), **fields)
        for part in parts:
            self._channel.send("part", part)
        until = time.monotonic() + self._deadline_s
        said = Answer()
        pid = status = 0
        try:
            while True:
                message = self._hear(f"{what} took more than {self._deadline_s:g} s", until, pid)
                if message.kind == "forked":
                    pid = message.fields["pid"]
                elif message.kind == "exited":
                    status = message.fields["status"]
                    break
                else:
                    said.append(message)
        finally:
            kill_group(pid)  # what it left behind too
        if said and said.done.kind == "failed":
            raise error_named(**said.done.fields["error"])
        if not said or said.done.kind != "done":
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
            raise WorkerLostError(f"{what}: the process that ran it {how}")
        return said

    def _hear(self, late: str, until: float, pid: int) -> Message:
        try:
            while (message := self._channel.receive(wait=False)) is None:
                if not select.select([self._channel.fileno()], [], [], max(0.0, until - time.monotonic()))[0]:
                    show_stack(pid)
                    raise DeadlineError(late + ("; its stack is above" if pid else ""))
        except LaneLostError as error:
            raise WorkerLostError("the interpreter that runs the loader died; see above") from error
        return message


def show_stack(pid: int) -> None:
    """faulthandler prints the stack of every thread before it dies."""
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGABRT)
            select.select([fd], [], [], ABORT_S)
        finally:
            os.close(fd)


def kill_group(pid: int) -> None:
    """A child, and whatever it started."""
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
