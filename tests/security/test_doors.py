"""The doors of lanes against peers that are nobody: silent ones, thousands of them, a daemon without descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from coroutines import in_loop
from lane_frames import frame_of
from pki import Pair, Pki

from penstock.proto.errors import AuthenticationError, PortTakenError, SupersededError, UnsafeBindError
from penstock.proto.lane.frames import CLOSE, LANE_PROTOCOL, Frame
from penstock.proto.lane.tcp import SEAL, sealed
from penstock.proto.rpc.tls import Tls, load_tls
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon import listeners
from penstock.worker.daemon.listeners import WAITING, LaneListeners

HELLO = sealed(lane_pb2.Hello(protocol=LANE_PROTOCOL, run="job/0").SerializeToString())


async def refuse(connection: socket.socket, hello: lane_pb2.Hello) -> None:
    raise AuthenticationError("the daemon was asked")


@contextlib.asynccontextmanager
async def listening(attach: listeners.Attach = refuse, tls: Tls | None = None) -> AsyncIterator[LaneListeners]:
    opened = LaneListeners(attach, tls)
    opened.open("127.0.0.1:0")
    try:
        yield opened
    finally:
        opened.close()


async def connected(listeners: LaneListeners) -> socket.socket:
    host, _, port = listeners.tcp_address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


async def answer(sock: socket.socket, hello: bytes = HELLO) -> Frame:
    """Return the listener's answer to a Hello."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, hello)
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


@in_loop
async def test_thousand_silent_peers_shut_out_no_others(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as listeners:
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
    assert len(caplog.records) < 10, "they fill no log"


@pytest.mark.parametrize("under_tls", [False, True])
@in_loop
async def test_who_says_nothing_is_let_go_in_time(
    under_tls: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "HELLO_DEADLINE_S", 0.2)
    caplog.set_level(logging.WARNING)
    loop = asyncio.get_running_loop()
    async with listening(tls=load_tls("", pair.cert, pair.key) if under_tls else None) as opened:
        for said in (b"", b"\x16\x03\x01\x02\x00\x01") if under_tls else (b"", HELLO[:2], HELLO[:-1]):
            begun = time.monotonic()
            sock = await connected(opened)
            with contextlib.suppress(ConnectionError):  # what it had said was not read
                await loop.sock_sendall(sock, said)
                async with asyncio.timeout(20):
                    assert await loop.sock_recv(sock, 1) == b""
            assert time.monotonic() - begun >= 0.1
            sock.close()
    assert caplog.text.count("no request arrived within 0.2 s") == 1, "the others are counted"


@in_loop
async def test_refused_lanes_are_one_line_for_each_box(caplog: pytest.LogCaptureFixture) -> None:
    """A box that opens lanes in a loop hides no refusal of another, and fills no log."""

    async def taken(connection: socket.socket, hello: lane_pb2.Hello) -> None:
        if hello.run != "nobody":
            LaneListeners.note_ticket(hello)
        raise SupersededError("a newer connection")

    async with listening(taken) as listeners:
        for number in range(60):
            who = lane_pb2.Hello(protocol=LANE_PROTOCOL, run=("nobody", "job/0")[number % 2], box=number // 2 % 2)
            sock = await connected(listeners)
            assert (await answer(sock, sealed(who.SerializeToString()))).kind == CLOSE
            sock.close()
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(" to read")[0].removeprefix("a connection from ") for line in said] == [
        *("127.0.0.1", "job/0 box 0", "job/0 box 1")
    ]


@in_loop
async def test_slot_has_one_sender_for_many_lanes() -> None:
    """Each had a thread and descriptors for as long as its peer kept the connection: 500 were the end of a daemon."""
    runner: list[socket.socket] = []

    async def take(connection: socket.socket, hello: lane_pb2.Hello) -> None:
        runner.append(connection)

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


@in_loop
async def test_daemon_without_descriptors_accepts_later() -> None:
    async with listening() as listeners:
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


@in_loop
async def test_listening_beyond_needs_a_certificate(pki: Pki, pair: Pair) -> None:
    """A worker that has a CA only has nothing to show: its lanes would be in clear text."""
    with pytest.raises(UnsafeBindError, match=r"0\.0\.0\.0:0 can be reached from other machines"):
        LaneListeners(refuse, load_tls(pki.ca)).open("0.0.0.0:0")
    opened = LaneListeners(refuse, load_tls("", pair.cert, pair.key))
    opened.open("0.0.0.0:0")
    opened.close()


@in_loop
async def test_a_taken_port_leaves_no_socket(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(PortTakenError, match="Address already in use"):
            LaneListeners(refuse, folder=tmp_path).open(f"127.0.0.1:{taken.getsockname()[1]}")
        assert not [*tmp_path.iterdir()]
