"""The lane's frames over TCP: u32 length (little endian), frame, and behind a BATCH frame its payload.

Towards the consumer flow Frames and payloads, towards the producer one Hello and then Acks. The pump and the lander
share this framing and nothing else. A stream has no packet borders, so both read into an `Inbox`: one large receive
takes in many small messages, and what is whole is handed out in place.

Dead peers. Keepalive finds one while nothing is under way, TCP_USER_TIMEOUT one that does not acknowledge what was
sent. The latter is for the lander's end only: the kernel counts a closed window as silence too, and the pump's peer
closes its window for as long as its training loop pauses. A pump whose peer is gone holds nothing but its own
memory until the kernel gives up on what it could not send, after a quarter of an hour at most.
"""

from __future__ import annotations

import socket
import struct
import time

from google.protobuf.message import DecodeError

from penstock.proto.errors import DeadlineError, LaneLostError, ProtocolError
from penstock.proto.frames import HEAD, MAX_FRAME
from penstock.proto.v1 import lane_pb2

__all__ = ["HelloReader", "Inbox", "fit_send_buffer", "read_hello", "tune"]

KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TRIES = 10, 5, 4
USER_TIMEOUT_S = 30
NEAR_US = 100
"""Microseconds of the shortest round trip so far, up to which a peer is near."""
NEAR_BUFFER = 256 << 10
"""Bytes, which the kernel doubles for what it needs itself. Half of it is slower, twice of it no better."""
_MIN_RTT_AT = 148
"""Where tcpi_min_rtt stands in Linux's struct tcp_info."""


def tune(sock: socket.socket, *, user_timeout: bool = False) -> None:
    """Small messages at once, and dead peers found."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TRIES)
    if user_timeout:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * USER_TIMEOUT_S)


def read_hello(sock: socket.socket, timeout: float) -> lane_pb2.Hello:
    """The Hello that opens a TCP lane, and not a byte more; `timeout` seconds for all of it, also where it trickles.

    Raises:
        DeadlineError: it did not come in time.
        LaneLostError: the peer vanished.
        ProtocolError: it is no Hello.
    """
    deadline = time.monotonic() + timeout
    reading = HelloReader()
    while reading.missing:
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            sock.settimeout(left)
            piece = sock.recv(reading.missing)
        except TimeoutError:
            raise DeadlineError(f"waited {timeout:g} s for the hello of a lane's peer") from None
        except OSError as error:
            raise LaneLostError(f"the peer of a lane vanished before its hello: {error}") from error
        reading.add(piece)
    return reading.hello()


class HelloReader:
    """Puts the Hello that opens a TCP lane together, however its bytes come. Raises as `read_hello`."""

    def __init__(self) -> None:
        self.missing = HEAD.size
        """Bytes to receive next, at most; 0 once it is whole."""
        self._data = b""
        self._head = True

    def add(self, piece: bytes) -> None:
        """What was received of the missing; nothing means that the peer is gone."""
        if not piece:
            raise LaneLostError("the peer of a lane vanished before its hello")
        self._data += piece
        self.missing -= len(piece)
        if self._head and not self.missing:
            (self.missing,) = HEAD.unpack(self._data)
            self._head, self._data = False, b""
            if not 0 < self.missing <= MAX_FRAME:
                raise ProtocolError(f"a hello of {self.missing} bytes, outside 1 to {MAX_FRAME}")

    def hello(self) -> lane_pb2.Hello:
        hello = lane_pb2.Hello()
        try:
            hello.ParseFromString(self._data)
        except DecodeError as error:
            raise ProtocolError(f"a hello that cannot be read: {error}") from error
        return hello


def fit_send_buffer(sock: socket.socket) -> None:
    """Where the peer is near, keep what is on its way small enough for a processor's cache. `sock` is connected.

    Left alone, the kernel lets 4 MiB be on their way, which then go through memory: on the loopback, 8 MiB batches took
    1,370 us of the sender's processor instead of 1,050. A bounded buffer also bounds the speed, to its size in each
    round trip; at NEAR_US that is 3 GB/s, more than a lane moves, so a peer further away keeps the kernel's choice.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    if len(info) == _MIN_RTT_AT + 4 and struct.unpack_from("=I", info, _MIN_RTT_AT)[0] < NEAR_US:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BUFFER)


class Inbox:
    """Bytes of a stream on their way in, and the whole messages among them."""

    def __init__(self, capacity: int = 4 * MAX_FRAME) -> None:
        """`capacity` bytes, more than the longest message."""
        self._buffer = memoryview(bytearray(capacity))
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def room(self, limit: int) -> memoryview:
        """Where to receive the next bytes: at most `limit`, and never none. Say how many came with `add`."""
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < HEAD.size + MAX_FRAME:
            held = self._end - self._start
            self._buffer[:held] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, held
        return self._buffer[self._end : self._end + limit]

    def add(self, size: int) -> None:
        """`size` bytes were received into `room`."""
        self._end += size

    def take(self) -> memoryview | None:
        """The next whole message, valid until the next `room`; None while it is incomplete.

        Raises ProtocolError if it is longer than any frame.
        """
        start, held = self._start + HEAD.size, self._end - self._start - HEAD.size
        if held < 0:
            return None
        (size,) = HEAD.unpack_from(self._buffer, self._start)
        if size > MAX_FRAME:
            raise ProtocolError(f"a message of {size} bytes, above the limit of {MAX_FRAME}")
        if held < size:
            return None
        self._start = start + size
        return self._buffer[start : self._start]

    def take_bytes(self, limit: int) -> memoryview:
        """Up to `limit` bytes of payload that have arrived, as they are; valid until the next `room`."""
        start = self._start
        self._start = min(self._end, start + limit)
        return self._buffer[start : self._start]
