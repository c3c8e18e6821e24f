"""Child processes of the daemon: fork servers (fresh interpreters with torch imported), and the runners and helpers
that a fork server forks.

All code here runs on the event loop. The daemon holds a control socket, an output pipe and a pidfd of each child. The
pidfd shows that the child has ended, also if its fork server is stopped; the end of its sockets shows nothing, because
processes that it forked may keep them open. The fork server reports the exit status. Without that report the status is
read from /proc, as long as the fork server has not reaped the child; otherwise it is unknown. All messages of a child
are processed before its end is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping

from penstock.proto.errors import LaneLostError, PenstockError, WorkerLostError
from penstock.proto.v1 import records_pb2
from penstock.runtime.process.end import kill_group, zombie_status
from penstock.runtime.process.spawn import Spawned
from penstock.runtime.process.watch import Process
from penstock.runtime.telemetry.logs import SubjectLogger
from penstock.worker.processes.child_output import PAUSE_S, READ_BYTES, OutputLines
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage, invalid_message
from penstock.worker.processes.interpreters import StartedForkServer, start_fork_server
from penstock.worker.processes.orphans import Orphans
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.runner_user import RunnerUser
from penstock.worker.processes.stack_dump import StackFile
from penstock.worker.processes.temporary_folders import TemporaryFolders
from penstock.worker.resources.processor_time import wait_while_active

__all__ = ["Child", "ForkServer", "about_slot", "end_orphans"]

_log = logging.getLogger("penstock.worker")
_user_log = logging.getLogger("penstock.user")
START_DEADLINE_S = 600.0
"""Largest number of seconds that a fork server may take to start; the default of --start-timeout. On a cold network
file system importing torch takes minutes."""
IDLE_SHARE = 0.1
"""Fraction of the start deadline. A starting fork server is killed if it used no processor time for that part of the
deadline, and did not wait for a processor either."""
FORK_DEADLINE_S = 15.0
"""Seconds without an answer after which a fork server (the process that forks the daemon's children) is replaced, if it
neither runs nor waits for a processor meanwhile. A fork takes milliseconds, and longer on a busy machine."""
FORK_MOST_S = 300.0
"""Largest number of seconds for a fork on a busy machine."""
STATUS_S = 0.25
"""Seconds that the daemon waits for the fork server's report of a dead child's exit status, before the daemon looks for
the status itself."""
LAST_STATUS_S = 2.5
"""Seconds after a child's death at which the daemon stops waiting for its exit status. The status then counts as
unknown: the fork server has reaped the child and not reported the status."""
ORPHANS_LOOK_S = 0.03
"""Seconds between two searches for orphans, which are processes that user code started and that outlived their runner.
"""
ORPHANS_LEAST_S = 1.0
"""Smallest number of seconds that the daemon searches for orphans (processes of user code that outlived their runner)
after a fork server has died."""
ORPHANS_S = 4.0
"""Largest number of seconds that the daemon takes to end orphans (processes of user code that outlived their runner),
after a fork server has died and when the daemon ends."""
KILL_S = 5.0
"""Seconds to wait until a killed process ends. A process that hangs in a driver or a file system does not end."""
_FORK_SERVER_DIED = (
    "the process that starts this worker's runners (fork server) has died or does not answer; the worker starts "
    "another one"
)
END_S = 5.0
"""Seconds that a fork server may take to end its children and itself, before it is killed."""


def about_slot(assignment: records_pb2.WorkerAssignment) -> dict[str, str | int]:
    """Return the fields that log records about a slot carry: run, attempt, box, slot and generation."""
    a = assignment
    return {"run": a.run, "attempt": a.attempt, "box": a.box, "slot": a.slot, "generation": a.generation}


def _refuse_descriptors(message: ControlMessage) -> None:
    """Close the file descriptors that came with a child's message, and raise ProtocolError if there are any, because
    each one would cost the daemon a descriptor."""
    if message.fds:
        for fd in message.fds:
            os.close(fd)
        raise invalid_message(
            f"a runner or helper process must not send file descriptors there, got {len(message.fds)} with its message "
            f"{message.kind[:40]!r}"
        )


class Child:
    """Child process that a fork server forks for the daemon: a runner, which runs a slot's loader, or a helper, which
    does one task with a loader."""

    def __init__(
        self,
        channel: ControlChannel,
        output: int,
        name: str,
        on_message: Callable[[ControlMessage], None],
        on_gone: Callable[[], None],
        about: Mapping[str, str | int] | None = None,
    ) -> None:
        self.name = name
        self._logger = SubjectLogger(_log, **(about or {}))
        self._user_logger = SubjectLogger(_user_log, **(about or {}))
        self.pid = 0
        self._process: Process | None = None
        loop = asyncio.get_running_loop()
        self.forked: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[int | None] = loop.create_future()
        """Future for the exit status of the child: negative for a signal, as in subprocess; None if the status is
        unknown."""
        self.stacks = StackFile()
        self.last_stack = ""
        """Python stacks of the child when it crashed; "" without a crash. Set when the child has exited."""
        self._channel = channel
        self._on_message = on_message
        self._on_gone = on_gone
        self._sending = asyncio.Lock()
        self._open = True
        self.unwanted = False
        """True once `kill` was called: the daemon itself ends the child, so its death by SIGKILL is no reason to try
        again."""
        self.sends_descriptors = ""
        """Kind of the only message with which the child may send descriptors; "" = none."""
        self._output = output
        self._lines = OutputLines(time.monotonic())
        os.set_blocking(output, False)
        loop.add_reader(channel.fileno(), self.drain)
        loop.add_reader(output, self._read_output)

    async def send(self, kind: str, payload: bytes = b"", fds: list[int] | None = None, **fields: object) -> None:
        """Send a message to the child, and close the file descriptors `fds` afterwards. If the child is dead, drop the
        message."""
        try:
            async with self._sending:
                if self._open:
                    with contextlib.suppress(OSError):
                        await asyncio.to_thread(self._channel.send, kind, payload, fds, **fields)
        finally:
            for fd in fds or ():
                os.close(fd)

    @property
    def reads_late(self) -> bool:
        """True while the child has not read all messages that were sent to it."""
        return self._open and self._channel.unread > 0

    def drain(self) -> None:
        """Process all messages that the child has sent so far. Kill the child if a message is invalid: user code may
        have written to the socket, and later messages would not be reliable."""
        try:
            while self._open and (message := self._channel.receive(wait=False)) is not None:
                if message.kind != self.sends_descriptors:
                    _refuse_descriptors(message)
                self._on_message(message)
        except LaneLostError:
            self._shut()
        except Exception as error:
            traceback = None if isinstance(error, PenstockError) else error
            self._logger.warning(
                "%s: the worker killed this process, because it sent an invalid message: %s",
                *(self.name, error),
                exc_info=traceback,
            )
            self._shut()
            self.kill()

    def kill(self) -> None:
        """Kill the child if it still runs. The fork server then kills the processes that the child had started."""
        self.unwanted = True
        self.kill_process()

    def kill_process(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """Ask the child to end. Kill the child if it has not ended after `grace_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.send("stop")  # waits if the child has not read an earlier large message
                await asyncio.shield(self.exited)
        self.kill()

    async def stack(self, pid: int = 0) -> str:
        """Return the present Python stacks of the child's threads, or one line that says why there is none; ""
        if the child has ended or is not forked yet.

        pid: a descendant of the child whose stacks are wanted instead.
        """
        if self._process is None:
            return ""
        if pid in (0, self.pid):
            return await self.stacks.ask(self._process)
        try:
            process = Process(pid)
        except OSError:
            return ""
        with process:
            return await self.stacks.ask(process)

    # ---- end of a child

    def begun(self, pid: int, pidfd: int) -> None:
        """Record the process that the fork server has forked for this child: its process id, and a pidfd (a descriptor
        of the process)."""
        self.pid, self._process = pid, Process(pid, pidfd)
        self._process.on_end(self._ended)
        if self.unwanted:
            self.kill()
        if not self.forked.done():
            self.forked.set_result(None)

    def _ended(self) -> None:
        """Process the child's last messages when the kernel reports its end, then wait for its exit status."""
        self.drain()
        loop = asyncio.get_running_loop()
        loop.call_later(STATUS_S, self._find_status, loop.time() + LAST_STATUS_S)

    def _find_status(self, until: float) -> None:
        """Find the exit status of a dead child that the fork server has not reported.

        If the kernel still has the status, the fork server is stopped and has not reaped the child: take the kernel's
        status. Otherwise the fork server is busy: try again, until monotonic time `until`; the status then counts as
        unknown.
        """
        if self.exited.done():
            return
        loop = asyncio.get_running_loop()
        unreaped, status = zombie_status(self.pid)
        if unreaped:
            kill_group(self.pid)
            self.gone(status)
        elif loop.time() < until:
            loop.call_later(STATUS_S, self._find_status, until)
        else:
            self.gone(None)

    def gone(self, status: int | None) -> None:
        """Record that the child has ended with exit status `status` (None = unknown), and close all its resources."""
        if self.exited.done():
            return
        loop = asyncio.get_running_loop()
        self.drain()
        self._read_output()
        self._shut()
        if self._output >= 0:
            loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1
            self._log(self._lines.feed(b"", time.monotonic()))
        if self._process is not None:
            self._process.close()
            self._process = None
        if not self.forked.done():
            self.forked.set_result(None)
        self.last_stack = self.stacks.read()
        self.stacks.close()
        self.exited.set_result(status)
        self._on_gone()

    def _shut(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            with contextlib.suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_RDWR)  # a thread may be waiting to send
            self._channel.close()

    # ---- output of a child

    def _read_output(self) -> None:
        if self._output < 0:
            return
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        loop = asyncio.get_running_loop()
        self._log(self._lines.feed(data, time.monotonic()))
        if not data:
            loop.remove_reader(self._output)
        elif self._lines.too_fast:
            loop.remove_reader(self._output)
            loop.call_later(PAUSE_S, self._read_again)

    def _read_again(self) -> None:
        if self._output >= 0:
            asyncio.get_running_loop().add_reader(self._output, self._read_output)

    def _log(self, lines: list[str]) -> None:
        for line in lines:
            self._user_logger.info("[%s] %s", self.name, line)


_fork_servers: set[int] = set()
"""Process ids of the fork servers of this process. Any other child of this process is an orphan."""


async def end_orphans(least_s: float = 0.0) -> None:
    """Kill orphans: processes of user code that became children of this process when their fork server died. Give up
    after ORPHANS_S seconds.

    least_s: smallest number of seconds to search for orphans. Runners die a little later than their fork server, and
    only then the runners' children become children of this process.
    """
    orphans, begun = Orphans(), time.monotonic()
    while orphans.end(_fork_servers) or time.monotonic() < begun + least_s:
        if time.monotonic() > begun + ORPHANS_S:
            return
        await asyncio.sleep(ORPHANS_LOOK_S)


class ForkServer:
    """Fork server (a fresh interpreter with torch imported, which forks runners), and the children that it forked."""

    def __init__(self, tempdirs: TemporaryFolders) -> None:
        self._tempdirs = tempdirs
        self._children: dict[int, Child] = {}
        self._next = 0
        loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = loop.create_future()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._process: Spawned | None = None
        self._channel: ControlChannel | None = None
        self.dead = False
        """True if the fork server cannot be used any more, because it died or did not answer."""
        self._main_script = False
        self._ending: asyncio.Task[None] | None = None

    async def start(
        self,
        *,
        sandboxed: bool = True,
        user: RunnerUser | None = None,
        deadline_s: float = START_DEADLINE_S,
        started: StartedForkServer | None = None,
    ) -> None:
        """Start the fork server, and return when it can fork. If the start takes too long or this call is cancelled,
        kill the process.

        Args:
            sandboxed: True to sandbox the children; see sandbox.py.
            user: user of the children; None: this process's own user. See runner_user.py.
            deadline_s: largest number of seconds for the start. The start also fails if for a tenth of this time the
                main thread neither runs nor waits for a processor.
            started: the fork server's process, if it was already started with these settings; None = start one.

        Raises:
            WorkerLostError: the process died, or did not start in time.
        """
        try:
            self._watch(started or start_fork_server(sandboxed=sandboxed, user=user.encode() if user else ""))
            still_s = IDLE_SHARE * deadline_s
            await wait_while_active(asyncio.shield(self._up), self.pid, still_s, deadline_s)
        except BaseException as error:
            await self._give_up()
            if not isinstance(error, TimeoutError):
                raise
            raise WorkerLostError(
                f"the Python interpreter for runners did not start within {deadline_s:g} s, or used no processor time "
                f"for {still_s:g} s, and was killed. If the file system from which Python is imported is slow, raise "
                "penstock worker --start-timeout (an embedded worker has no such setting: use one that runs by itself)"
            ) from None

    async def _give_up(self) -> None:
        """Kill a fork server whose start failed, took too long or was cancelled. Return when the process has ended,
        after KILL_S seconds at the latest."""
        self.dead = True
        self._up.cancel()
        self._kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), KILL_S)
        if self.lives:
            _log.error(
                "fork server (process %d) was killed, and has not ended after %g s; it may wait for a driver or a file "
                "system",
                *(self.pid, KILL_S),
            )

    def _watch(self, started: StartedForkServer) -> None:
        self._process, self._channel = started.process, ControlChannel(started.control)
        _fork_servers.add(self._process.pid)
        self._process.on_end(self._reap)
        asyncio.get_running_loop().add_reader(started.control.fileno(), self._listen)

    def expect_main_script(self) -> None:
        """Let the fork server import, before it forks the next child, the modules that an input_fn from a training
        job's main script (`__main__`) needs."""
        if self._channel is not None and not self._main_script:
            self._main_script = True
            with contextlib.suppress(OSError):
                self._channel.send("main")

    def _reap(self) -> None:
        """Reap the fork server's process after its end."""
        assert self._process is not None
        self._process.wait()
        self._process.close()
        _fork_servers.discard(self._process.pid)
        self._exited.set_result(None)

    async def fork(
        self,
        role: str,
        name: str,
        progress_page: ProgressPage,
        on_message: Callable[[ControlMessage], None],
        about: Mapping[str, str | int] | None = None,
    ) -> Child:
        """Let the fork server fork a child, and return the child. Raise WorkerLostError if the fork server has died or
        does not answer.

        Args:
            role: program of the child, for example "helper".
            name: name of the child in messages.
            progress_page: shared memory in which the child records its progress.
            on_message: called with each message of the child, in order.
            about: fields of log records about the child.
        """
        if self.dead or self._channel is None:
            raise WorkerLostError(_FORK_SERVER_DIED)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read, write = os.pipe()
        self._next += 1
        number, tempdir = self._next, self._tempdirs.make()
        child = Child(ControlChannel(ours), read, name, on_message, lambda: self._forget(number, tempdir), about)
        self._children[number] = child
        try:
            self._channel.send(
                "fork",
                fds=[theirs.fileno(), write, progress_page.fd, child.stacks.fd],
                id=number,
                role=role,
                tempdir=tempdir,
            )
        except OSError as error:
            self.dead = True
            child.gone(None)
            raise WorkerLostError(_FORK_SERVER_DIED) from error
        finally:
            theirs.close()
            os.close(write)
        try:
            await wait_while_active(asyncio.shield(child.forked), self.pid, FORK_DEADLINE_S, FORK_MOST_S)
        except TimeoutError:
            self.dead = True
            child.gone(None)
            _log.warning("fork server (process %d) does not answer: the worker starts another one", self.pid)
            raise WorkerLostError(
                "the process that starts this worker's runners (fork server) did not answer: it used no processor time "
                f"for {FORK_DEADLINE_S:g} s, or took {FORK_MOST_S:g} s in all; the worker starts another one"
            ) from None
        except BaseException:
            child.kill()  # the fork server may still fork the child later
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def lives(self) -> bool:
        """True while the fork server's process exists."""
        return self._process is not None and not self._exited.done()

    def _forget(self, number: int, tempdir: str) -> None:
        self._children.pop(number, None)
        self._tempdirs.remove(tempdir)
        if self.dead and not self._children:
            self.close()

    def close(self) -> None:
        """Ask the fork server to end its children, their orphans and itself. Kill the fork server if it has not ended
        after END_S seconds."""
        for child in list(self._children.values()):
            child.kill()
        if self._channel is not None and not self.dead:
            with contextlib.suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_RDWR)
        asyncio.get_running_loop().call_later(END_S, self._kill)

    def _kill(self) -> None:
        if self._process is not None and self.lives:
            self._process.kill()

    async def wait(self) -> None:
        """Wait until the fork server has ended; call this after `close`."""
        if self._process is not None:
            await asyncio.shield(self._exited)

    def _listen(self) -> None:
        assert self._channel is not None
        try:
            while (message := self._channel.receive(wait=False)) is not None:
                self._on_message(message)
        except (LaneLostError, PenstockError):
            self._died()

    def _on_message(self, message: ControlMessage) -> None:
        if message.kind == "up":
            if not self._up.done():
                self._up.set_result(None)
            return
        child = self._children.get(message.fields["id"])
        if message.kind == "forked":
            if child is not None:
                child.begun(message.fields["pid"], message.fds[0])
            else:  # no longer wanted: the child finds its control socket closed, and ends
                os.close(message.fds[0])
        elif message.kind == "exited" and child is not None:
            child.gone(message.fields["status"])

    def _died(self) -> None:
        assert self._channel is not None
        self.dead = True
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.sock.close()
        if not self._up.done():
            self._up.set_exception(
                WorkerLostError("the Python interpreter for runners died while it started; see the worker's log")
            )
        for child in list(self._children.values()):
            child.kill_process()  # the kernel kills it with its fork server
            child.gone(-int(signal.SIGKILL))
        self._ending = asyncio.ensure_future(end_orphans(ORPHANS_LEAST_S))
