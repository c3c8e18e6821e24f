"""The framing over TCP, alone."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_frames import a_frame, read_hello

from penstock.proto.batch.digest import FULL_BELOW, DigestCover
from penstock.proto.errors import BatchCorruptError, PenstockError, ProtocolError
from penstock.proto.lane import tcp
from penstock.proto.lane.frames import BATCH, COUNTED, MAX_FRAME
from penstock.proto.lane.tcp import SEAL, sealed
from penstock.proto.v1 import lane_pb2


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    yield ours, theirs
    ours.close()
    theirs.close()


HELLO = lane_pb2.Hello(protocol=1, run="job/0", next_total=5, ticket="t" * 300)


def test_a_hello_is_read_and_not_a_byte_more(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    ours.sendall(sealed(HELLO.SerializeToString()) + b"rest")
    assert read_hello(theirs, 10) == HELLO
    assert theirs.recv(10) == b"rest"


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (sealed(HELLO.SerializeToString())[:-1] + b"?", BatchCorruptError),
        (SEAL.pack(MAX_FRAME + 1, (MAX_FRAME + 1) ^ 0xFFFFFFFF, 0), ProtocolError),
        (sealed(b"\xff\xff"), ProtocolError),
    ],
)
def test_what_is_no_hello(ends: tuple[socket.socket, socket.socket], sent: bytes, error: type[PenstockError]) -> None:
    ours, theirs = ends
    ours.sendall(sent)
    with pytest.raises(error):
        read_hello(theirs, 10)


def test_sender_tolerates_a_closed_window(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    tcp.tune(ours)
    tcp.tune(theirs, user_timeout=True)
    for sock in ends:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * tcp.USER_TIMEOUT_S


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.binary(max_size=300) | st.integers(0, MAX_FRAME).map(bytes), max_size=12),
    st.lists(st.integers(1, 90_000), min_size=1, max_size=8),
)
def test_messages_are_whole_for_any_split(messages: list[bytes], pieces: list[int]) -> None:
    stream = b"".join(map(sealed, messages))
    inbox, taken, at, index = tcp.SealedInbox(2 * MAX_FRAME), [], 0, 0
    while True:
        while (message := inbox.take()) is not None:
            taken.append(bytes(message))
        if at == len(stream):
            break
        room = inbox.room(pieces[index % len(pieces)])
        assert room
        index += 1
        size = min(len(room), len(stream) - at)
        room[:size] = stream[at : at + size]
        inbox.add(size)
        at += size
    assert taken == messages
    assert len(inbox) == 0


@pytest.mark.parametrize(
    ("cover", "nbytes", "codec", "checked"),
    [
        (DigestCover.SAMPLE, FULL_BELOW, 0, False),
        (DigestCover.SAMPLE, FULL_BELOW + 64, 0, True),
        (DigestCover.SAMPLE, 64, lane_pb2.LZ4, True),
        (DigestCover.ROWS, 64, 0, True),
        (DigestCover.FULL, 1 << 30, 0, False),
        (DigestCover.FULL, 64, lane_pb2.LZ4, True),
    ],
)
def test_payload_has_one_checksum(cover: DigestCover, nbytes: int, codec: int, checked: bool) -> None:
    for flags in (cover, cover | COUNTED):
        assert tcp.is_checked(a_frame(BATCH, flags=flags, nbytes=nbytes, codec=codec)) is checked


def test_no_flipped_bit_of_a_message_is_missed() -> None:
    """Detect also a bit that makes the message longer than it is: its reader would wait for bytes that nobody sends."""
    for at in range(8 * len(sealed(b"message"))):
        stream = bytearray(sealed(b"message"))
        stream[at // 8] ^= 1 << at % 8
        inbox = tcp.SealedInbox()
        inbox.room(100)[: len(stream)] = stream
        inbox.add(len(stream))
        with pytest.raises(BatchCorruptError):
            inbox.take()


# ---- buffers


def test_near_peer_gets_cache_sized_send_buffer(ends: tuple[socket.socket, socket.socket]) -> None:
    tcp.fit_send_buffer(ends[0])
    assert ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * tcp.NEAR_BUFFER, "the kernel doubles it"


def test_far_peer_keeps_kernels_send_buffer(ends: tuple[socket.socket, socket.socket]) -> None:
    class Far(socket.socket):
        def getsockopt(self, *what: int) -> Any:
            found: Any = super().getsockopt(*what)
            return found[:-4] + struct.pack("=I", tcp.NEAR_US) if what[1] == socket.TCP_INFO else found

    with Far(fileno=ends[0].detach()) as far:
        before = far.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        tcp.fit_send_buffer(far)
        assert far.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
