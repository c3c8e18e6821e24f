"""Listeners for lanes, the connections through which training jobs (consumers) read a slot's batches: a Unix socket for
this host, a TCP port for others. A consumer whose Hello has a valid ticket is passed to the runner, one on another host
through a sender. The Unix socket is beside the coordinator's, if that has one: containers with a network of their own
reach both through the folder. Else it is abstract.

A peer that has not sent a Hello must cost little: no thread, few bytes, one deadline. At the limit of such peers the
oldest connection of the address with the most is closed, so a peer with many silent connections loses its own.

Every user of this host can connect to an abstract Unix socket, so the daemon checks the peer's user, which the kernel
reports. A remote consumer's certificate is checked before its Hello is read. If only one end uses TLS, the peer gets an
error at once; otherwise both would wait for each other.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.proto.errors import (
    InvalidArgumentError,
    LaneLostError,
    PenstockError,
    PortTakenError,
    SupersededError,
    TlsError,
    VersionSkewError,
)
from penstock.proto.lane import tcp
from penstock.proto.lane.frames import CLOSE, ERROR, LANE_PROTOCOL, MAX_FRAME, Frame, check_peer, framed
from penstock.proto.lane.tls_socket import PEEKED, TlsSocket, accept_tls, looks_like_tls, when_readable
from penstock.proto.rpc.addresses import refuse_unsafe
from penstock.proto.rpc.tls import Renewing, Tls, dns_names, no_tls_here
from penstock.proto.rpc.wire_errors import detail_of
from penstock.proto.v1 import lane_pb2
from penstock.runtime.telemetry.logs import RepeatedWarnings
from penstock.worker.daemon.sender import Sender
from penstock.worker.slots.slot_record import SlotKey

_log = logging.getLogger("penstock.worker")
HELLO_DEADLINE_S = 10.0
WAITING = 256
LANES = "penstock-lanes-"
"""Beginning of the name of a Unix socket for lanes."""
SHOWN = 200
REFUSALS_S = 60.0
"""Seconds between two log lines about refused connections of one training job's box, or without a ticket of one
address."""
PAUSE_S = 0.1
"""Pause after a connection could not be accepted, for example for lack of descriptors."""

Attach = Callable[[socket.socket, lane_pb2.Hello], Awaitable[None]]


def slot_of(hello: lane_pb2.Hello) -> SlotKey:
    return hello.run, hello.attempt, hello.box, hello.slot, hello.generation


def check_hello(hello: lane_pb2.Hello) -> None:
    if hello.protocol != LANE_PROTOCOL:
        raise VersionSkewError(
            f"a job has version {hello.protocol} of the protocol for batches, not {LANE_PROTOCOL}: install one release"
        )


class LaneListeners:
    """Listeners for lanes. attach: called with each connection and its Hello. tls: None = no TLS; with a CA, remote
    training jobs must show a certificate too. insecure: allows an address beyond this machine without TLS. folder: of
    the coordinator's Unix socket; None: it has none."""

    def __init__(
        self, attach: Attach, tls: Tls | None = None, *, insecure: bool = False, folder: Path | None = None
    ) -> None:
        self._attach = attach
        self._folder = folder
        # With a CA alone this worker can check its coordinator, but has no certificate to show to consumers.
        self._files: Renewing | None = None
        self._context: ssl.SSLContext | None = None
        if tls is not None and tls.cert:
            tls.check_own("worker")
            self._files, self._context = Renewing(tls, "worker"), tls.server_context()
        self._insecure = insecure
        self._refusals = RepeatedWarnings(_log, every_s=REFUSALS_S)
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], str] = {}
        """Peers without a Hello, oldest first, with their addresses."""
        self._senders: dict[Sender, SlotKey] = {}
        self._sent_bytes = 0
        self.local_address = ""
        self.tcp_address = ""

    def open(self, listen: str) -> None:
        """Listen on the local socket, and for TCP at host:port (port 0: any). Raises UnsafeBindError, PortTakenError,
        or InvalidArgumentError for an address that is not host:port or at which this machine cannot listen."""
        host, _, port = listen.rpartition(":")
        if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
            raise InvalidArgumentError(f"--listen must be HOST:PORT with a port from 0 (any) to 65535, got {listen!r}")
        refuse_unsafe(listen, encrypted=self._context is not None, insecure=self._insecure)
        tcp_listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        tcp_listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tcp_listener.bind((host.strip("[]"), int(port)))
        except OSError as error:
            tcp_listener.close()
            kind = PortTakenError if error.errno == errno.EADDRINUSE else InvalidArgumentError
            raise kind(f"the worker cannot listen on {listen}: {error.strerror}. Set --listen HOST:PORT") from error
        local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # after the port: it may leave a file
        self.local_address = f"{LANES}{secrets.token_hex(4)}"
        where = f"\0{self.local_address}" if self._folder is None else str(self._folder / self.local_address)
        try:
            local.bind(where)
        except OSError as error:
            local.close()
            tcp_listener.close()
            raise InvalidArgumentError(
                f"the worker cannot listen at {where}: {error}. Choose a shorter path"
            ) from error
        self.tcp_address = f"{host}:{tcp_listener.getsockname()[1]}"
        for listener, greet in ((local, self._greet_local), (tcp_listener, self._greet_tcp)):
            listener.listen(WAITING)
            listener.setblocking(False)
            self._sockets.append(listener)
            self._spawn(self._accept(listener, greet))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for listener in self._sockets:
            listener.close()
        if self._folder is not None:
            (self._folder / self.local_address).unlink(missing_ok=True)
        for sender in self._senders:
            sender.stop()

    def drop(self, slot: SlotKey) -> None:
        """End the slot's senders: its runner ends or has a newer lane. For a vanished host a sender would hold the
        ring's memory until TCP times out, minutes later, and a job that opens lanes again and again could have any
        number."""
        for sender in [sender for sender, served in self._senders.items() if served == slot]:
            sender.stop(0)
            self._forget(sender)

    def _forget(self, sender: Sender) -> None:
        self._sent_bytes += sender.sent_bytes
        del self._senders[sender]

    @property
    def certificate_expires_at(self) -> float:
        """Unix time in seconds; 0 = no certificate."""
        return self._files.expires_at if self._files is not None else 0.0

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes + sum(sender.sent_bytes for sender in self._senders)

    @property
    def remote(self) -> int:
        return sum(sender.is_alive() for sender in self._senders)

    async def _accept(self, listener: socket.socket, greet: Callable[[socket.socket], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            # for example no free descriptor: continue, because a listener that ends here is never opened again
            except OSError as error:
                _log.warning("a connection to read batches could not be accepted; trying again: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            address = peer[0] if listener.family != socket.AF_UNIX else "this host"
            while len(self._waiting) >= WAITING:
                self._close_oldest()
            task = self._spawn(self._greeted(connection, greet))
            task.set_name(address)
            self._waiting[task] = address
            task.add_done_callback(self._forget_waiting)

    def _close_oldest(self) -> None:
        (busiest, count), *_ = Counter(self._waiting.values()).most_common(1)
        oldest = next(task for task, address in self._waiting.items() if address == busiest)
        why = f"{count} connections from {busiest} sent no request to read batches after connecting: closing the oldest"
        self._refusals.warning(f"{busiest} sends nothing", why)
        del self._waiting[oldest]
        oldest.cancel()

    def _forget_waiting(self, task: asyncio.Task[None]) -> None:
        self._waiting.pop(task, None)

    def _note_hello(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._forget_waiting(task)

    @staticmethod
    def note_ticket(hello: lane_pb2.Hello) -> None:
        """Log a refusal of the present task's connection as one of this box, because its ticket is valid."""
        task = asyncio.current_task()
        assert task is not None
        task.set_name(f"{hello.run} box {hello.box}")

    async def _greeted(self, connection: socket.socket, greet: Callable[[socket.socket], Awaitable[None]]) -> None:
        try:
            await greet(connection)
        except (PenstockError, OSError, TimeoutError) as error:
            why = str(error) or f"no request arrived within {HELLO_DEADLINE_S:g} s"
            who = asyncio.current_task().get_name()  # type: ignore[union-attr]
            self._refusals.warning(who, f"a connection from {who} to read batches was refused: {why}")
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    async def _greet_local(self, connection: socket.socket) -> None:
        check_peer(connection)
        connection.setblocking(False)
        async with asyncio.timeout(HELLO_DEADLINE_S):
            data = await asyncio.get_running_loop().sock_recv(connection, MAX_FRAME)
        self._note_hello()
        hello = tcp.parsed_hello(data)
        try:
            check_hello(hello)
            await self._attach(connection, hello)
        except PenstockError as error:
            if connection.fileno() >= 0:
                connection.send(framed(_refusal(error)))
            raise

    async def _greet_tcp(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        lane = connection
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                lane = await self._under_tls(connection)
                hello = await _read_hello(lane)
            self._note_hello()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                check_hello(hello)
                await self._attach(theirs, hello)
            except BaseException:
                ours.close()
                theirs.close()
                raise
        except PenstockError as error:
            _send_last(lane, tcp.sealed(_refusal(error)))
            lane.close()
            raise
        except BaseException:
            lane.close()
            raise
        for ended in [sender for sender in self._senders if not sender.is_alive()]:
            self._forget(ended)
        self.drop(slot_of(hello))  # the runner has replaced an older lane by this one
        name = f"{hello.run} box {hello.box} slot {hello.slot}"
        try:
            sender = Sender(lane, ours, hello, name)
            sender.start()
        except (OSError, RuntimeError) as error:  # the limit on descriptors or threads is reached
            ours.close()
            lane.close()
            raise LaneLostError(f"no thread for the batches of {name}: {error}. Raise ulimit -u and -n") from error
        self._senders[sender] = slot_of(hello)

    async def _under_tls(self, connection: socket.socket) -> socket.socket:
        under_tls = looks_like_tls(await _first_bytes(connection))
        if self._files is None or self._context is None:
            if under_tls:
                raise TlsError("the job uses TLS, but this worker has no TLS files: pass --tls-cert and --tls-key")
            return connection
        if not under_tls:
            raise no_tls_here("this worker's lane")
        if self._files.renew():
            self._context = self._files.tls.server_context()
        lane = await accept_tls(connection, self._context)
        try:
            _check_certificate(lane, self._files.tls)
        except TlsError:
            lane.close()
            raise
        return lane

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _check_certificate(lane: TlsSocket, tls: Tls) -> None:
    """Check for a role that may read batches: "client" for training jobs, "admin" for `penstock doctor`."""
    names = dns_names(lane.getpeercert() or {})
    if tls.ca and not tls.roles_named(names, ("client", "admin")):
        shown = ascii(", ".join(names)[:SHOWN])
        raise TlsError(f"the certificate of a job must be for the name {tls.expected('client')}, got one for {shown}")


async def _first_bytes(connection: socket.socket) -> bytes:
    """Peek at the first bytes, which show whether the peer uses TLS."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, PEEKED)
    await when_readable(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    first = connection.recv(PEEKED, socket.MSG_PEEK)
    if len(first) < PEEKED:
        raise LaneLostError("the other end closed the connection at once; let a health check use penstock.deploy.probe")
    return first


async def _read_hello(lane: socket.socket) -> lane_pb2.Hello:
    """Read a Hello. Leave all later bytes in the socket, because the sender reads them."""
    seal = await _receive(lane, tcp.SEAL.size)
    message = await _receive(lane, tcp.length_of(seal))
    tcp.check_message(seal, 0, message)
    return tcp.parsed_hello(message)


async def _receive(lane: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            piece = lane.recv(size - len(data))
        except (BlockingIOError, ssl.SSLWantReadError):
            await when_readable(lane)
            continue
        if not piece:
            raise LaneLostError("the other end closed the connection before its request to read batches (Hello)")
        data += piece
    return data


def _send_last(lane: socket.socket, frame: bytes) -> None:
    """Send a last frame without waiting: the send buffer is empty, so it fits unless the peer is gone."""
    try:
        lane.setblocking(False)
        lane.send(frame)
    except (OSError, ValueError):
        pass


def _refusal(error: PenstockError) -> bytes:
    """Return CLOSE if the connection is out of date (slot moved or ended, newer connection), otherwise ERROR with the
    cause."""
    kind = CLOSE if isinstance(error, SupersededError) else ERROR
    return Frame(kind, rest=detail_of(error).SerializeToString()).encode()
