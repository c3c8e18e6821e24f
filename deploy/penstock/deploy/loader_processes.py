"""Child processes in which `penstock doctor` and `replay` run loaders as workers do: forked from a server
(worker/runner/fork_server.py) with torch, no user code, and the hash seed of runners. A child's program is
`run_child` of a module, with a socket for tasks and answers. The server and its children end with the command."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from penstock.proto.errors import DeadlineError, LaneLostError, WorkerLostError, error_named
from penstock.runtime.process.end import describe_exit
from penstock.runtime.process.watch import Process, readable, wait_for_any
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage
from penstock.worker.processes.fork_servers import END_S, START_DEADLINE_S
from penstock.worker.processes.interpreters import start_fork_server

_STDERR = 2
ABORT_S = 2.0
"""Longest time in seconds until a child has printed its stack and ended."""
EXIT_S = 2.0
"""Longest time in seconds until a child ends after its socket was closed."""


@dataclass(frozen=True)
class Task:
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes = b""
    parts: Sequence[bytes] = ()


class LoaderForkServer:
    """Fork server of a command; all waits have deadlines. User code prints to stderr. `module`: children's program."""

    def __init__(self, module: str) -> None:
        started = start_fork_server(sandboxed=False)
        self._process, self._channel = started.process, ControlChannel(started.control)
        self._module = module
        self._count = 0
        self._statuses: dict[int, int] = {}
        try:
            self._receive("up", time.monotonic() + START_DEADLINE_S)
            self._channel.send("import", module=module)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server, its children and what they have started."""
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        if not self._process.wait(END_S):
            self._process.kill()
            self._process.wait()
        self._process.close()
        self._channel.close()

    def fork(self, title: str) -> LoaderProcess:
        """Return a new child process, which has seen no user code. `title`: what it does, for errors."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = ControlChannel(here)
        self._count += 1
        try:
            with there:
                fds = [there.fileno(), _STDERR, _STDERR]
                self._channel.send("fork", fds=fds, id=self._count, role=self._module, tempdir="")
            forked = self._receive("forked", time.monotonic() + START_DEADLINE_S)
            return LoaderProcess(self, title, channel, self._count, Process(forked.fields["pid"], forked.fds[0]))
        except BaseException:
            channel.close()
            raise

    def status(self, number: int, until: float) -> int | None:
        """Return a child's exit status, negative for a signal; None if it is not known by the time `until`."""
        with contextlib.suppress(DeadlineError):
            while number not in self._statuses:
                self._receive("exited", until)
        return self._statuses.get(number)

    def _receive(self, kind: str, until: float) -> ControlMessage:
        """Return the server's next message of this kind. Raise WorkerLostError if it died, DeadlineError at `until`."""
        try:
            while True:
                while (message := self._channel.receive(wait=False)) is None:
                    if not readable(self._channel.fileno(), until - time.monotonic()):
                        raise DeadlineError(
                            "the Python process that runs the loaders did not answer in time. See whether this machine "
                            "is overloaded, and try again"
                        )
                if message.kind == "exited":
                    self._statuses[message.fields["id"]] = message.fields["status"]
                if message.kind == kind:
                    return message
        except LaneLostError as error:
            raise WorkerLostError("the Python process that runs the loaders died. See its output above") from error


class LoaderProcess:
    """Child of a fork server. A pidfd reports its end: its socket may be kept open by descendants."""

    def __init__(
        self, parent: LoaderForkServer, title: str, channel: ControlChannel, number: int, process: Process
    ) -> None:
        self.title, self.channel, self.process = title, channel, process
        self._parent, self._number = parent, number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the child; the fork server then kills what it has started."""
        self.process.kill()
        self.process.close()
        self.channel.close()

    def ask(self, task: Task) -> None:
        """Send a task. If the child has died, the next `poll` raises the error."""
        with contextlib.suppress(LaneLostError):
            self.channel.send(task.kind, task.payload, parts=len(task.parts), **task.fields)
            for part in task.parts:
                self.channel.send("part", part)

    def poll(self) -> ControlMessage | None:
        """Return the next message, if one has arrived. Raises LaneLostError if the child has ended."""
        ended = self.process.ended  # read first: messages sent before the end can still be read
        message = self.channel.receive(wait=False)
        if message is None and ended:
            raise LaneLostError("the child process has ended. See its output above")
        return message

    def exit_description(self) -> str:
        """Say how the child ended, after its last message was received."""
        if not self.process.wait(EXIT_S):
            return "closed its descriptors"
        return describe_exit(self._parent.status(self._number, time.monotonic() + EXIT_S))

    def show_stack(self) -> None:
        """Send a signal that prints the stacks of the child's threads (faulthandler) and ends it."""
        self.process.send(signal.SIGABRT)
        self.process.wait(ABORT_S)


def run_tasks(
    tasks: Mapping[LoaderProcess, Task], until: float, received: Callable[[LoaderProcess, ControlMessage], object]
) -> dict[LoaderProcess, ControlMessage]:
    """Run a task in each of these children at the same time, and return the answers. `until`: in monotonic seconds;
    `received`: called with each message before the answer. Raises the first error of a child; WorkerLostError if one
    died; DeadlineError, after the stacks of those that are late were printed to standard error."""
    for child, task in tasks.items():
        child.ask(task)
    answers: dict[LoaderProcess, ControlMessage] = {}
    while waited := [child for child in tasks if child not in answers]:
        fds = [fd for child in waited for fd in (child.channel.fileno(), child.process.fileno())]
        if not wait_for_any(fds, until - time.monotonic()):
            for child in waited:
                child.show_stack()
            late = ", ".join(child.title for child in waited)
            raise DeadlineError(f"not done in time: {late} (stacks are above). Raise --deadline if the loader is slow")
        for child in waited:
            try:
                while child not in answers and (message := child.poll()) is not None:
                    if message.kind == "failed":
                        raise error_named(**message.fields["error"])
                    if message.kind == "done":
                        answers[child] = message
                    else:
                        received(child, message)
            except LaneLostError as error:
                raise WorkerLostError(
                    f"{child.title}: the process that ran it {child.exit_description()}. See its output above"
                ) from error
    return answers


def take_task(channel: ControlChannel) -> Task:
    message = cast(ControlMessage, channel.receive())
    parts = [cast(ControlMessage, channel.receive()).payload for _ in range(message.fields.pop("parts"))]
    return Task(message.kind, message.fields, message.payload, parts)
