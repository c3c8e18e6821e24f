"""The doors that consumers come in by: an abstract Unix socket for this host, a TCP port for others.

A consumer says Hello; if it shows the slot's ticket, its connection goes to the runner and the daemon is out of the
way. A remote one gets a pump in between: to the runner it is a consumer like any other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable

from penstock.proto.channel import detail_of
from penstock.proto.errors import PenstockError, PortTakenError, ProtocolError, SupersededError, VersionSkewError
from penstock.proto.frames import framed
from penstock.proto.lane import LANE_PROTOCOL, MAX_FRAME, check_peer
from penstock.proto.tcp import read_hello
from penstock.proto.v1 import lane_pb2
from penstock.worker.pump import Pump

__all__ = ["LaneDoors", "SlotOf", "slot_of"]

_log = logging.getLogger("penstock.worker")
HELLO_DEADLINE_S = 10.0

Attach = Callable[[socket.socket, lane_pb2.Hello], Awaitable[None]]
SlotOf = tuple[str, int, int, int, int]
"""(run, attempt, box, slot, generation)."""


def slot_of(hello: lane_pb2.Hello) -> SlotOf:
    """Whose batches it asks for."""
    return hello.run, hello.attempt, hello.box, hello.slot, hello.generation


def check_hello(hello: lane_pb2.Hello) -> None:
    """Raises VersionSkewError for a lane protocol that is not ours."""
    if hello.protocol != LANE_PROTOCOL:
        raise VersionSkewError(
            f"the lane's other end speaks lane protocol {hello.protocol}, this worker {LANE_PROTOCOL}; run the same "
            "version of Penstock on both"
        )


class LaneDoors:
    """Listens on both; `attach` gets each connection whose Hello could be read, and verifies it."""

    def __init__(self, attach: Attach) -> None:
        self._attach = attach
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumps: dict[Pump, SlotOf] = {}
        self.local_address = ""
        self.tcp_address = ""

    def open(self, listen: str) -> None:
        """`listen`: host:port for TCP, port 0 for any."""
        local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.local_address = f"penstock-lanes-{secrets.token_hex(8)}"
        local.bind("\0" + self.local_address)
        host, _, port = listen.rpartition(":")
        tcp = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tcp.bind((host.strip("[]"), int(port)))
        except OSError as error:
            local.close()
            tcp.close()
            raise PortTakenError(f"cannot listen on {listen} for lanes: {error.strerror}") from error
        self.tcp_address = f"{host}:{tcp.getsockname()[1]}"
        for listener, serve in ((local, self._greet_local), (tcp, self._greet_tcp)):
            listener.listen(256)
            listener.setblocking(False)
            self._sockets.append(listener)
            self._spawn(self._accept(listener, serve))

    def close(self) -> None:
        """Stop listening, and the pumps with it."""
        for task in self._tasks:
            task.cancel()
        for listener in self._sockets:
            listener.close()
        for pump in self._pumps:
            pump.stop()

    def drop(self, slot: SlotOf) -> None:
        """Nobody is to get anything of this slot any more: its runner ends, and a consumer whose host has vanished
        would keep the pump, the connection and the ring's memory until the kernel gives up."""
        for pump in [pump for pump, of in self._pumps.items() if of == slot]:
            pump.stop(0)
            del self._pumps[pump]

    async def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            self._spawn(self._greeted(connection, serve))

    async def _greeted(self, connection: socket.socket, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
        try:
            await serve(connection)
        except (PenstockError, OSError, TimeoutError) as error:
            _log.warning("a lane was refused: %s", error)
            connection.close()

    async def _greet_local(self, connection: socket.socket) -> None:
        check_peer(connection)
        connection.setblocking(False)
        async with asyncio.timeout(HELLO_DEADLINE_S):
            data = await asyncio.get_running_loop().sock_recv(connection, MAX_FRAME)
        hello = _parse(data)
        try:
            check_hello(hello)
            await self._attach(connection, hello)
        except PenstockError as error:
            if connection.fileno() >= 0:
                connection.send(_refusal(error))
            raise

    async def _greet_tcp(self, connection: socket.socket) -> None:
        hello = await asyncio.to_thread(read_hello, connection, HELLO_DEADLINE_S)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            check_hello(hello)
            await self._attach(theirs, hello)
        except PenstockError as error:
            ours.close()
            theirs.close()
            connection.setblocking(True)
            connection.sendall(_refusal(error))
            raise
        self._pumps = {pump: slot for pump, slot in self._pumps.items() if pump.is_alive()}
        name = f"{hello.run} box {hello.box} slot {hello.slot}"
        pump = Pump(connection, ours, hello, name)
        self._pumps[pump] = slot_of(hello)
        pump.start()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _parse(data: bytes) -> lane_pb2.Hello:
    try:
        return lane_pb2.Hello.FromString(data)
    except Exception as error:
        raise ProtocolError(f"a hello that cannot be read: {error}") from error


def _refusal(error: PenstockError) -> bytes:
    """The one frame that a refused consumer gets, as it travels; of an older generation's it says that, and no more."""
    kind = lane_pb2.CLOSE if isinstance(error, SupersededError) else lane_pb2.ERROR
    return framed(lane_pb2.Frame(kind=kind, error=detail_of(error)).SerializeToString())
