"""The daemon's fork server: a fresh interpreter with torch, from which all runners are forked. It is started when the
first slot needs it, replaced when it dies, and kept for a while without slots.

multiprocessing removes its temporary directory only at a normal exit, so killed children would leave thousands. A
daemon therefore makes them in a folder of its own, which the next daemon removes after a kill (private_folders.py).
Temporary files of user code are not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping

from penstock.proto.errors import LaneLostError, PenstockError, WorkerLostError
from penstock.runtime.files.private_folders import PrivateFolder
from penstock.runtime.process.spawn import Spawned
from penstock.worker.processes.child_processes import Child
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage
from penstock.worker.processes.interpreters import StartedForkServer, start_fork_server
from penstock.worker.processes.orphans import Orphans
from penstock.worker.processes.process_use import wait_while_active
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.runner_user import RunnerUser
from penstock.worker.processes.turn_queue import TurnQueue

_log = logging.getLogger("penstock.worker")

START_DEADLINE_S = 600.0
"""Default limit on a fork server's start: on a cold network file system importing torch takes minutes."""
IDLE_SHARE = 0.1
"""Fraction of the start deadline without using or waiting for a processor, after which a start is killed."""
FORK_DEADLINE_S = 15.0
"""Seconds without an answer and without running or waiting for a processor, after which a fork server is replaced."""
FORK_MOST_S = 300.0
ORPHANS_LOOK_S = 0.03
"""Seconds between two searches for orphans, processes that outlived their runner."""
ORPHANS_LEAST_S = 1.0
ORPHANS_S = 4.0
KILL_S = 5.0
"""Seconds until a killed process ends; one that hangs in a driver or a file system does not."""
_FORK_SERVER_DIED = (
    "the process that starts this worker's runners (fork server) has died or does not answer; the worker starts "
    "another one"
)
END_S = 5.0
IDLE_S = 300.0
"""Seconds that a fork server is kept without slots. A start takes over a second of processor time; idle it holds 150
MB."""
CLOSE_S = END_S + KILL_S


class TemporaryFolders:
    """Temporary directories of one daemon's children. user: their owner; None: the daemon's."""

    def __init__(self, user: RunnerUser | None = None) -> None:
        self._folder: PrivateFolder | None = None
        self._user = user
        self._count = 0
        try:
            self._folder = PrivateFolder()
            if user is not None:
                os.chmod(self._folder.path, 0o711)  # the directories below are readable by their owner only
        except OSError as error:
            _log.warning(
                "a folder for the temporary files of multiprocessing could not be made, so killed runners leave such "
                "files in the system's temporary directory: %s",
                error,
            )

    def make(self) -> str:
        """Return a new directory; "" if that fails: multiprocessing then makes one itself."""
        if self._folder is None:
            return ""
        self._count += 1
        path = self._folder.path / str(self._count)
        try:
            path.mkdir(mode=0o700)
            if self._user is not None:
                self._user.own(str(path))
        except OSError:
            return ""
        return str(path)

    def remove(self, path: str) -> None:
        if path:
            shutil.rmtree(path, ignore_errors=True)

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
        """Start the fork server, and return when it can fork; on a timeout or a cancellation, kill it. deadline_s: the
        start also fails after a tenth of it without using or waiting for a processor. started: a process already
        started with these settings. Raises WorkerLostError."""
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
        self.dead = True
        self._up.cancel()
        self._kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), KILL_S)
        if self.lives:
            _log.error(
                "fork server (process %d) was killed, and has not ended after %g s; it may wait for a driver or a file "
                "system",
                self.pid,
                KILL_S,
            )

    def _watch(self, started: StartedForkServer) -> None:
        self._process, self._channel = started.process, ControlChannel(started.control)
        _fork_servers.add(self._process.pid)
        self._process.on_end(self._reap)
        asyncio.get_running_loop().add_reader(started.control.fileno(), self._listen)

    def expect_main_script(self) -> None:
        """Import, before the next fork, what a training job's main script needs."""
        if self._channel is not None and not self._main_script:
            self._main_script = True
            with contextlib.suppress(OSError):
                self._channel.send("import", module="pydantic_settings")

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
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read, write = os.pipe()
        self._next += 1
        number, tempdir = self._next, self._tempdirs.make()
        child = Child(ControlChannel(ours), read, name, on_message, lambda: self._forget(number, tempdir), about)
        self._children[number] = child
        try:
            self._channel.send(
                "fork",
                fds=[theirs.fileno(), write, child.stacks.fd, progress_page.fd],
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
        return self._process is not None and not self._exited.done()

    def _forget(self, number: int, tempdir: str) -> None:
        self._children.pop(number, None)
        self._tempdirs.remove(tempdir)
        if self.dead and not self._children:
            self.close()

    def close(self) -> None:
        """Let the fork server end with its children and their orphans. Kill it after END_S seconds."""
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


class KeptForkServer:
    """Owner of the fork server: starts, replaces and ends it. starts: queue whose limit is lowered by one while a fork
    server that was killed during its start has not ended. Other arguments: as of ForkServer.start."""

    def __init__(
        self,
        tempdirs: TemporaryFolders,
        starts: TurnQueue,
        deadline_s: float,
        *,
        sandboxed: bool,
        user: RunnerUser | None = None,
        started: StartedForkServer | None = None,
    ) -> None:
        self._tempdirs = tempdirs
        self._starts = starts
        self._deadline_s = deadline_s
        self._sandboxed = sandboxed
        self._user = user
        self._given_up: set[asyncio.Task[ForkServer]] = set()
        self._retiring: asyncio.TimerHandle | None = None
        self._current: asyncio.Task[ForkServer] | None = None
        if started is not None:
            self._current = asyncio.ensure_future(self._start(started))

    async def get(self, *, main_script: bool = False) -> ForkServer:
        """Return the running or a new fork server. main_script: import what a training job's main script needs."""
        current = self._current
        if current is None or (current.done() and (not _is_up(current) or current.result().dead)):
            current = self._current = asyncio.ensure_future(self._start())
        fork_server = await asyncio.shield(current)
        if main_script:
            fork_server.expect_main_script()
        return fork_server

    async def _start(self, started: StartedForkServer | None = None) -> ForkServer:
        fork_server = ForkServer(self._tempdirs)
        try:
            await fork_server.start(
                sandboxed=self._sandboxed, user=self._user, deadline_s=self._deadline_s, started=started
            )
        finally:
            if fork_server.dead and fork_server.lives:
                self._starts.occupy_until(fork_server.wait())
        return fork_server

    def keep(self, *, needed: bool) -> None:
        """Say whether slots need the fork server. If not, it is ended after IDLE_S seconds."""
        if needed and self._retiring is not None:
            self._retiring.cancel()
            self._retiring = None
        elif not needed and self._retiring is None:
            self._retiring = asyncio.get_running_loop().call_later(IDLE_S, self._retire)

    def _retire(self) -> None:
        current, self._current, self._retiring = self._current, None, None
        if current is None:
            return
        if not current.done():
            current.cancel()
            self._given_up.add(current)
            current.add_done_callback(self._given_up.discard)
        elif _is_up(current):
            current.result().close()

    async def close(self) -> None:
        if self._retiring is not None:
            self._retiring.cancel()
        last = self._current
        self._retire()
        await asyncio.gather(*self._given_up, return_exceptions=True)
        if last is not None and _is_up(last):
            fork_server = last.result()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(fork_server.wait(), CLOSE_S)
            if fork_server.lives:
                _log.error(
                    "fork server (process %d) has not ended %g s after it was closed; it may wait for a driver or a "
                    "file system",
                    fork_server.pid,
                    CLOSE_S,
                )


def _is_up(starting: asyncio.Task[ForkServer]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None
