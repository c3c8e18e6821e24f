"""The daemon's fork server: a fresh interpreter with torch, from which all runners are forked. It is started when the
first slot needs it, and replaced when it dies.

multiprocessing removes its temporary directory only at a normal exit, so killed children would leave thousands. A
daemon therefore gives them one in a folder of its own, which the next daemon removes after a kill (private_folders.py).
Temporary files of user code are not touched.
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

from penstock.proto.errors import PenstockError, WorkerLostError
from penstock.runtime.files.private_folders import PrivateFolder
from penstock.runtime.process.spawn import Spawned
from penstock.worker.processes.child_processes import Child
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage
from penstock.worker.processes.interpreters import StartedForkServer, start_fork_server
from penstock.worker.processes.orphans import Orphans
from penstock.worker.processes.process_use import wait_while_active
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.runner_user import RunnerUser

_log = logging.getLogger("penstock.worker")

START_DEADLINE_S = 600.0
"""Limit on a fork server's start: on a cold network file system importing torch takes minutes."""
START_STILL_S = 60.0
"""Seconds without using or waiting for a processor, after which a start is killed."""
FORK_DEADLINE_S = 15.0
"""Seconds without an answer and without running or waiting for a processor, after which a fork server is replaced."""
FORK_MOST_S = 300.0
ORPHANS_LOOK_S = 0.03
"""Seconds between two searches for orphans, processes that outlived their runner."""
ORPHANS_LEAST_S = 1.0
ORPHANS_S = 4.0
KILL_S = 5.0
"""Seconds until a killed process ends; one that hangs in a driver or a file system does not."""
_FORK_SERVER_DIED = "the process that starts this worker's runners (fork server) has died; the worker starts another"
END_S = 5.0
CLOSE_S = END_S + KILL_S
IDLE_S = 300.0
"""Seconds without children after which a fork server, which holds 150 MB, ends; the next slot starts another."""


class TemporaryFolder:
    """Folder for the temporary files of multiprocessing in one daemon's children. user: its owner; None: the daemon's.
    path: "" if it could not be made: multiprocessing then makes one itself."""

    def __init__(self, user: RunnerUser | None = None) -> None:
        self._folder: PrivateFolder | None = None
        self.path = ""
        try:
            self._folder = PrivateFolder()
            path = self._folder.path / "children"
            path.mkdir(mode=0o700)
            if user is not None:
                os.chmod(self._folder.path, 0o711)
                user.own(str(path))
            self.path = str(path)
        except OSError:
            pass  # the daemon has warned at its start: machine_needs.py

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()


_fork_servers: set[int] = set()
"""Fork servers of this process. Any other child of it is an orphan."""


async def end_orphans(least_s: float = 0.0) -> None:
    """Kill processes of user code that became this process's children when their fork server died, for at most
    ORPHANS_S. least_s: seconds to search: they come only when their runners die, a little after their fork server."""
    orphans, begun = Orphans(), time.monotonic()
    while orphans.end(_fork_servers) or time.monotonic() < begun + least_s:
        if time.monotonic() > begun + ORPHANS_S:
            return
        await asyncio.sleep(ORPHANS_LOOK_S)


class ForkServer:
    """tempdir: of multiprocessing in the children; "" = the system's."""

    def __init__(self, tempdir: str = "", idle_s: float = IDLE_S) -> None:
        self._tempdir, self._idle_s = tempdir, idle_s
        self._idle_timer: asyncio.TimerHandle | None = None
        self._children: dict[int, Child] = {}
        self._next = 0
        loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = loop.create_future()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._process: Spawned | None = None
        self._channel: ControlChannel | None = None
        self.dead = False
        self._ending: asyncio.Task[None] | None = None

    async def start(
        self,
        *,
        sandboxed: bool = True,
        user: RunnerUser | None = None,
        started: StartedForkServer | None = None,
    ) -> None:
        """Start the fork server, and return when it can fork; on a timeout or a cancellation, kill it. started: a
        process already started with these settings. Raises WorkerLostError."""
        try:
            self._watch(started or start_fork_server(sandboxed=sandboxed, user=user.encode() if user else ""))
            await wait_while_active(asyncio.shield(self._up), self.pid, START_STILL_S, START_DEADLINE_S)
        except BaseException as error:
            self.dead = True
            self._up.cancel()
            self._kill()
            await self.wait_at_most(KILL_S)
            if not isinstance(error, TimeoutError):
                raise
            raise WorkerLostError(
                f"the Python interpreter for runners did not start within {START_DEADLINE_S:g} s, or used no processor "
                f"time for {START_STILL_S:g} s, and was killed. Install Python on a faster file system"
            ) from None

    def _watch(self, started: StartedForkServer) -> None:
        self._process, self._channel = started.process, ControlChannel(started.control)
        _fork_servers.add(self._process.pid)
        self._process.on_end(self._reap)
        asyncio.get_running_loop().add_reader(started.control.fileno(), self._listen)

    def _reap(self) -> None:
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
        """Fork and return a child. Raises WorkerLostError if the fork server is dead or silent. role: "runner" or
        "task". about: fields of log records."""
        if self.dead or self._channel is None:
            raise WorkerLostError(_FORK_SERVER_DIED)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        self._next += 1
        number = self._next
        child = Child(ControlChannel(ours), read, name, on_message, lambda: self._forget(number), about)
        self._children[number] = child
        try:
            fds = [theirs.fileno(), write, child.stacks.fd, progress_page.fd]
            self._channel.send("fork", fds=fds, id=number, role=role, tempdir=self._tempdir)
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
            raise WorkerLostError(_FORK_SERVER_DIED) from None
        except BaseException:
            child.kill()  # the fork server may still fork the child later
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def lives(self) -> bool:
        return self._process is not None and not self._exited.done()

    def _forget(self, number: int) -> None:
        self._children.pop(number, None)
        if self.dead and not self._children:
            self.close()
        self.end_when_idle()

    def end_when_idle(self) -> None:
        """End it once it has had no child for `idle_s` from now on."""
        self._stay()
        if not self._children and not self.dead:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle)

    def _stay(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _end_idle(self) -> None:
        if not self._children and not self.dead:
            self.close()
            self.dead = True

    def close(self) -> None:
        """Let the fork server end with its children and their orphans. Kill it after END_S seconds."""
        self._stay()
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
        if self._process is not None:
            await asyncio.shield(self._exited)

    async def wait_at_most(self, most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), most_s)
        if self.lives:
            _log.error("fork server (process %d) has not ended after %g s", self.pid, most_s)

    def _listen(self) -> None:
        assert self._channel is not None
        try:
            while (message := self._channel.receive(wait=False)) is not None:
                self._on_message(message)
        except PenstockError:
            self._died()

    def _on_message(self, message: ControlMessage) -> None:
        if message.kind == "up":
            if not self._up.done():
                self._up.set_result(None)
            self.end_when_idle()
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


class KeptForkServer:
    """Owner of the fork server: starts, replaces and ends it. Arguments: as of ForkServer and its `start`."""

    def __init__(
        self,
        tempdir: str,
        *,
        sandboxed: bool,
        user: RunnerUser | None = None,
        started: StartedForkServer | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._tempdir, self._sandboxed, self._user, self._idle_s = tempdir, sandboxed, user, idle_s
        self._current = None if started is None else asyncio.ensure_future(self._start(started))

    async def get(self) -> ForkServer:
        """Return the running or a new fork server."""
        current = self._current
        if current is None or (current.done() and (not _is_up(current) or current.result().dead)):
            current = self._current = asyncio.ensure_future(self._start())
        fork_server = await asyncio.shield(current)
        fork_server.end_when_idle()  # counted again, so that it does not end between this call and `fork`
        return fork_server

    async def _start(self, started: StartedForkServer | None = None) -> ForkServer:
        fork_server = ForkServer(self._tempdir, self._idle_s)
        await fork_server.start(sandboxed=self._sandboxed, user=self._user, started=started)
        return fork_server

    async def close(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.cancel()  # only if it is starting
            await asyncio.gather(current, return_exceptions=True)
            if _is_up(current):
                current.result().close()
                await current.result().wait_at_most(CLOSE_S)


def _is_up(starting: asyncio.Task[ForkServer]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None
