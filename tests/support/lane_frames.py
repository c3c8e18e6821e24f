"""Frames and acks as tests write them: by the names that their fields have in each kind."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from xxhash import xxh3_64

from penstock.proto.errors import LaneLostError
from penstock.proto.lane import tcp
from penstock.proto.lane.frames import Ack, Frame, pack_shapes, read_ack, read_frame
from penstock.proto.lane.tcp import SEAL, check_of, is_checked
from penstock.proto.lane.tls_socket import TlsSocket
from penstock.proto.v1 import lane_pb2, records_pb2

__all__ = ["a_frame", "accept_tls_blocking", "ack_of", "checked", "frame_of", "read_hello", "read_sealed", "received"]


def a_frame(
    kind: int = 0,
    *,
    shapes: Sequence[int] = (),
    inline: bytes = b"",
    entry_bytes: int = 0,
    entries: int = 0,
    error: records_pb2.ErrorDetail | None = None,
    **fields: int,
) -> Frame:
    """A frame. inline: of a STRUCTURE, and of any other whatever follows the header."""
    rest = pack_shapes(shapes) + inline + (b"" if error is None else error.SerializeToString())
    if entry_bytes:
        fields["nbytes"] = entry_bytes
    if entries:
        fields["entry"] = entries
    return Frame(kind, **fields, rest=rest)


def frame_of(data: bytes | memoryview) -> Frame:
    return read_frame(memoryview(data), 0, len(data))


def ack_of(data: bytes | memoryview) -> Ack:
    return read_ack(memoryview(data), 0, len(data))


def checked(frame: Frame, payload: bytes) -> bytes:
    """A BATCH frame over TCP, with its payload as it travels and what follows that."""
    return tcp.sealed(frame.encode()) + payload + (check_of(xxh3_64(payload)) if is_checked(frame) else b"")


def shapes_of(packed: bytes) -> list[int]:
    return list(memoryview(packed).cast("Q"))


def read_hello(sock: socket.socket, timeout: float) -> lane_pb2.Hello:
    sock.settimeout(timeout)
    try:
        seal = received(sock, SEAL.size)
        message = received(sock, tcp.length_of(seal))
    except AssertionError as error:
        raise LaneLostError(str(error)) from error
    tcp.check_message(seal, 0, message)
    return tcp.parsed_hello(message)


def accept_tls_blocking(sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    context.sslsocket_class = TlsSocket
    wrapped = context.wrap_socket(sock, server_side=True)
    assert isinstance(wrapped, TlsSocket)
    return wrapped


def read_sealed(sock: socket.socket) -> bytes:
    """The next message over TCP."""
    size, complement, check = SEAL.unpack(received(sock, SEAL.size))
    assert size ^ complement == 0xFFFFFFFF
    data = received(sock, size)
    assert xxh3_64(data).intdigest() == check
    return data


def received(sock: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes: MSG_WAITALL does not wait on a socket that has a timeout."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        assert piece, "the connection ended"
        data += piece
    return data
