"""The daemon's view of its children: zygotes, and what they fork.

All of it belongs to the event loop. A child is known by a control socket, the pipe that its output goes to, and the
exit status that its zygote reports; what a child said before it died is always read before its death is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable

from penstock.proto.errors import LaneLostError, PenstockError, ProtocolError, WorkerLostError
from penstock.worker.control import Channel, Message
from penstock.worker.ledger import Ledger

__all__ = ["Child", "Zygote"]

_log = logging.getLogger("penstock.worker")
_user_log = logging.getLogger("penstock.user")
START_DEADLINE_S = 60.0
"""For a fresh interpreter to import torch on a busy machine."""
LONGEST_LINE = 8192
_NOT_FOR_CHILDREN = (
    "PENSTOCK_TOKEN",
    "PENSTOCK_TOKEN_FILE",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def child_environment(seed: int) -> dict[str, str]:
    """What runners see: no torchrun variables, no token, no CUDA, one thread, and the run's hash seed.

    Set iteration order is randomness too, and only PYTHONHASHSEED, at the interpreter's start, fixes it.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_FOR_CHILDREN and not name.startswith("TORCHELASTIC_")
    }
    environment |= {
        "PYTHONHASHSEED": str(random.Random(seed).randrange(1, 1 << 32)),
        "CUDA_VISIBLE_DEVICES": "",
        "PENSTOCK_RUNNER": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    return environment


def _refuse_descriptors(message: Message) -> None:
    """Children are given descriptors and send none: each one taken would be one less for the daemon."""
    if message.fds:
        for fd in message.fds:
            os.close(fd)
        raise ProtocolError(f"a message {message.kind[:40]!r} with {len(message.fds)} descriptors")


class Child:
    """A runner or scratch child."""

    def __init__(self, channel: Channel, output: int, name: str, on_message: Callable[[Message], None]) -> None:
        self.name = name
        self.pid = 0
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = loop.create_future()
        """The exit code; negative for a signal, as subprocess has it."""
        self._channel = channel
        self._on_message = on_message
        self._sending = asyncio.Lock()
        self._open = True
        self._output = output
        self._line = b""
        os.set_blocking(output, False)
        loop.add_reader(channel.fileno(), self.drain)
        loop.add_reader(output, self._read_output)

    async def send(self, kind: str, payload: bytes = b"", fds: list[int] | None = None, **fields: object) -> None:
        """Say something; the descriptors are closed here once sent. A child that is gone hears nothing."""
        try:
            async with self._sending:
                if self._open:
                    with contextlib.suppress(OSError):
                        await asyncio.to_thread(self._channel.send, kind, payload, fds, **fields)
        finally:
            for fd in fds or ():
                os.close(fd)

    def drain(self) -> None:
        """Read everything that the child has said by now. One that talks nonsense is killed: it runs user code, and
        what it says next would be worth no more."""
        try:
            while self._open and (message := self._channel.receive(wait=False)) is not None:
                _refuse_descriptors(message)
                self._on_message(message)
        except LaneLostError:
            self._shut()
        except Exception as error:
            traceback = None if isinstance(error, PenstockError) else error
            _log.warning("%s: it said what no child says, and is killed: %s", self.name, error, exc_info=traceback)
            self._shut()
            self.kill()

    def kill(self) -> None:
        """Kill the child and everything in its process group; harmless when it is gone."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Ask the child to end, then see to it."""
        await self.send("stop")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.exited), grace_s)
        self.kill()

    def gone(self, status: int) -> None:
        """The zygote reaped it."""
        self.drain()
        self._read_output()
        self.kill()  # what it left in its group
        self._shut()
        with contextlib.suppress(ValueError):
            asyncio.get_running_loop().remove_reader(self._output)
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
        if not self.exited.done():
            self.exited.set_result(status)

    def _shut(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()

    def _read_output(self) -> None:
        if self._output < 0:
            return
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._output)
        lines = (self._line + data).split(b"\n")
        self._line = lines.pop()
        if len(self._line) > LONGEST_LINE or (not data and self._line):
            lines.append(self._line)
            self._line = b""
        for line in lines:
            _user_log.info("[%s] %s", self.name, line[:LONGEST_LINE].decode(errors="replace"))


class Zygote:
    """One zygote process and the children it forked."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._next = 0
        self._up = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self.dead = False

    async def start(self, seed: int, *, main_script: bool) -> None:
        """Start it; returns when it can fork. main_script: for an input_fn that is defined in the trainer's script."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = Channel(ours)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                # Not -m: the package would be imported twice, once as __main__.
                "from penstock.worker.zygote import main; main()",
                str(theirs.fileno()),
                str(os.getpid()),
                *(["main"] if main_script else []),
                pass_fds=[theirs.fileno()],
                env=child_environment(seed),
                stdin=asyncio.subprocess.DEVNULL,
            )
        asyncio.get_running_loop().add_reader(ours.fileno(), self._listen)
        try:
            await asyncio.wait_for(asyncio.shield(self._up), START_DEADLINE_S)
        except TimeoutError:
            raise WorkerLostError(f"a runner's interpreter did not start within {START_DEADLINE_S:.0f} s") from None

    async def fork(self, role: str, name: str, ledger: Ledger, on_message: Callable[[Message], None]) -> Child:
        """A new child, whose messages go to `on_message` in order."""
        if self.dead or self._channel is None:
            raise WorkerLostError("the process that forks runners has died")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read, write = os.pipe()
        self._next += 1
        number = self._next
        child = self._children[number] = Child(Channel(ours), read, name, on_message)
        try:
            self._channel.send("fork", fds=[theirs.fileno(), write, ledger.fd], id=number, role=role)
        except OSError as error:
            raise WorkerLostError("the process that forks runners has died") from error
        finally:
            theirs.close()
            os.close(write)
        return child

    def close(self) -> None:
        """Kill it and all its children."""
        for child in self._children.values():
            child.kill()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> None:
        if self._process is not None:
            await self._process.wait()

    def _listen(self) -> None:
        assert self._channel is not None
        try:
            while (message := self._channel.receive(wait=False)) is not None:
                self._hear(message)
        except (LaneLostError, PenstockError):
            self._died()

    def _hear(self, message: Message) -> None:
        if message.kind == "up":
            if not self._up.done():
                self._up.set_result(None)
            return
        number = message.fields["id"]
        if message.kind == "forked":
            self._children[number].pid = message.fields["pid"]
        elif message.kind == "exited":
            self._children.pop(number).gone(message.fields["status"])

    def _died(self) -> None:
        assert self._channel is not None
        self.dead = True
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.sock.close()
        if not self._up.done():
            self._up.set_exception(WorkerLostError("a runner's interpreter died at its start; see the worker's log"))
        for child in self._children.values():
            child.gone(-int(signal.SIGKILL))  # they die with their zygote
        self._children.clear()
