"""The doors of lanes against peers that are nobody: silent ones, thousands of them, a daemon without descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from coroutines import in_loop
from lane_frames import frame_of
from pki import Pair, Pki

from penstock.proto.errors import AuthenticationError, InvalidArgumentError, SupersededError, UnsafeBindError
from penstock.proto.lane.frames import LANE_PROTOCOL, Frame
from penstock.proto.lane.tcp import SEAL, sealed
from penstock.proto.rpc.tls import load_tls
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon import listeners
from penstock.worker.daemon.listeners import WAITING, LaneListeners

HELLO = sealed(lane_pb2.Hello(protocol=LANE_PROTOCOL, run="job/0").SerializeToString())


async def refuse(connection: socket.socket, hello: lane_pb2.Hello) -> None:
    raise AuthenticationError("the daemon was asked")


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:70000", "localhost:http", "127.0.0.1:-1", ""])
@in_loop
async def test_address_without_a_port_is_refused(listen: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be HOST:PORT with a port from 0 to 65535"):
        LaneListeners(refuse).open(listen)


def trial(body: Callable[[LaneListeners], Awaitable[None]]) -> None:
    async def run() -> None:
        listeners = LaneListeners(refuse)
        listeners.open("127.0.0.1:0")
        try:
            await body(listeners)
        finally:
            listeners.close()

    asyncio.run(run())


async def connected(listeners: LaneListeners) -> socket.socket:
    host, _, port = listeners.tcp_address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


async def answer(sock: socket.socket) -> Frame:
    """Return the listener's answer to a Hello."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, HELLO)
    async with asyncio.timeout(10):
        data = b""
        while len(data) < SEAL.size or len(data) < SEAL.size + SEAL.unpack(data[: SEAL.size])[0]:
            piece = await loop.sock_recv(sock, 65_536)
            assert piece, "the doors closed the connection without a word"
            data += piece
    return frame_of(data[SEAL.size :])


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:  # what it had said was not read
        return True


def test_thousand_silent_peers_shut_out_no_others() -> None:
    async def body(listeners: LaneListeners) -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        silent = [await connected(listeners) for _ in range(1000)]
        try:
            honest = await connected(listeners)
            frame = await answer(honest)
            honest.close()
            assert frame.error.name == "AuthenticationError"
            gone = sum(ended(sock) for sock in silent)
            assert gone >= 1000 - WAITING
            assert len(list(Path("/proc/self/fd").iterdir())) - before <= 1000 + WAITING + 10
            assert not ended(silent[-1]), "the newest have their time"
        finally:
            for sock in silent:
                sock.close()

    trial(body)


def test_who_says_nothing_is_let_go_in_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(listeners, "HELLO_DEADLINE_S", 0.2)

    async def body(listeners: LaneListeners) -> None:
        loop = asyncio.get_running_loop()
        for said in (b"", HELLO[:2], HELLO[:-1]):
            begun = time.monotonic()
            sock = await connected(listeners)
            with contextlib.suppress(ConnectionError):  # what it had said was not read
                await loop.sock_sendall(sock, said)
                async with asyncio.timeout(20):
                    assert await loop.sock_recv(sock, 1) == b""
            assert time.monotonic() - begun >= 0.1
            sock.close()

    with caplog.at_level(logging.WARNING):
        trial(body)
    assert "no request arrived within 0.2 s" in caplog.text


def test_forged_hellos_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each was 33 KB of log: 21 MB a second from one peer."""

    async def refuse_by_name(connection: socket.socket, hello: lane_pb2.Hello) -> None:
        raise SupersededError(f"this worker does not run {hello.run}")

    forged = sealed(lane_pb2.Hello(protocol=LANE_PROTOCOL, run="x" * 30_000).SerializeToString())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listeners = LaneListeners(refuse_by_name)
        listeners.open("127.0.0.1:0")
        try:
            for _ in range(100):
                sock = await connected(listeners)
                await loop.sock_sendall(sock, forged)
                async with asyncio.timeout(20):
                    while await loop.sock_recv(sock, 65_536):
                        pass
                sock.close()
        finally:
            listeners.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    told = [one.getMessage() for one in caplog.records if one.name == "penstock.worker"]
    assert told[0].startswith("a connection from 127.0.0.1 to read batches was refused: this worker does not run xxx")
    assert sum(map(len, told)) < 5_000


def test_slot_has_one_sender_for_many_lanes() -> None:
    """Each had a thread and descriptors for as long as its peer kept the connection: 500 were the end of a daemon."""
    runner: list[socket.socket] = []

    async def take(connection: socket.socket, hello: lane_pb2.Hello) -> None:
        runner.append(connection)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listeners = LaneListeners(take)
        listeners.open("127.0.0.1:0")
        lanes_of_one, threads = [], threading.active_count()
        try:
            for _ in range(20):
                lanes_of_one.append(await connected(listeners))
                await loop.sock_sendall(lanes_of_one[-1], HELLO)
            other = await connected(listeners)
            lanes_of_one.append(other)
            hello = lane_pb2.Hello(protocol=LANE_PROTOCOL, run="job/0", slot=1)
            await loop.sock_sendall(other, sealed(hello.SerializeToString()))
            async with asyncio.timeout(20):
                for sock in lanes_of_one[:10]:
                    with contextlib.suppress(ConnectionError):
                        assert await loop.sock_recv(sock, 1) == b""
                while len(runner) < 21 or threading.active_count() > threads + 2 or listeners.remote > 2:
                    await asyncio.sleep(0.005)
            assert listeners.remote == 2
        finally:
            listeners.close()
            for sock in (*lanes_of_one, *runner):
                sock.close()

    asyncio.run(run())


def test_daemon_without_descriptors_accepts_later() -> None:
    async def body(listeners: LaneListeners) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        host, _, port = listeners.tcp_address.rpartition(":")
        waiting = socket.create_connection((host, int(port)))  # in the backlog: the loop has not run since
        waiting.setblocking(False)
        try:
            used = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
            held = []
            try:
                while True:
                    held.append(socket.socket())
            except OSError:
                pass
            await asyncio.sleep(0.05)  # turns of the loop, in which accept fails
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for sock in held:
                sock.close()
        assert (await answer(waiting)).error.name == "AuthenticationError"
        waiting.close()

    trial(body)


def test_listening_beyond_needs_tls_or_a_flag(pki: Pki, pair: Pair) -> None:
    async def run() -> None:
        with pytest.raises(UnsafeBindError, match=r"0\.0\.0\.0:0 can be reached from other machines"):
            LaneListeners(refuse).open("0.0.0.0:0")
        with pytest.raises(UnsafeBindError):
            LaneListeners(refuse, load_tls(pki.ca)).open("0.0.0.0:0")  # it has nothing to show
        for opened in (
            LaneListeners(refuse, insecure=True),
            LaneListeners(refuse, load_tls("", pair.cert, pair.key)),
        ):
            opened.open("0.0.0.0:0")
            opened.close()

    asyncio.run(run())
