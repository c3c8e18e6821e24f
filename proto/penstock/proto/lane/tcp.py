"""The lane's frames over TCP: each sealed, and behind a BATCH frame its payload.

Towards the consumer flow frames and payloads, towards the producer one Hello and then acks. The sender and the receiver
share this framing and nothing else. A stream has no packet borders, so both read into an `SealedInbox`: one large
receive takes in many small messages, and what is whole is handed out in place.

**What arrives is what was sent.** TCP's own checksum has 16 bits, and a switch or a proxy that damages a packet mends
it. So each message carries its length twice (a damaged one would have its reader wait for bytes that nobody sends) and
an xxh3 of itself, and so does each payload of which the batch's own digest does not cover every byte. All that differs
is a BatchCorruptError: the connection is given up, and the consumer fetches again what it has not had. xxh3 takes 16 us
for 1 MiB (60 GB/s from a cache, 33 from memory, on a 2-core AMD EPYC); crc32c in hardware takes 37.

Dead peers. Keepalive finds one while nothing is under way, TCP_USER_TIMEOUT one that does not acknowledge what was
sent. The latter is for the receiver's end only: the kernel counts a closed window as silence too, and the sender's peer
closes its window for as long as its training loop pauses. A sender whose peer is gone holds nothing but its own
memory until the kernel gives up on what it could not send, after a quarter of an hour at most.
"""

from __future__ import annotations

import errno
import socket
import struct
import time

from google.protobuf.message import DecodeError
from xxhash import xxh3_64, xxh3_64_intdigest

from penstock.proto.batch.digest import FULL_BELOW, DigestCover
from penstock.proto.errors import BatchCorruptError, DeadlineError, LaneLostError, ProtocolError
from penstock.proto.lane.frames import MAX_FRAME, Frame
from penstock.proto.v1 import lane_pb2

__all__ = [
    "CHECK_BYTES",
    "SEAL",
    "HelloReader",
    "SealedInbox",
    "check_of",
    "fit_send_buffer",
    "is_checked",
    "read_hello",
    "sealed",
    "tune",
]

SEAL = struct.Struct("<IIQ")
"""In front of a message: its length, the complement of that, and its xxh3."""
CHECK_BYTES = 8
"""Behind a payload: its xxh3, little endian."""
_ALL = (1 << 32) - 1
_SEAL_BYTES, _seal, _unseal = SEAL.size, SEAL.pack, SEAL.unpack_from

KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TRIES = 10, 5, 4
PROBE_EVERY_S, USER_TIMEOUT_S = 1, 2
"""Of the receiver's end: a kernel that acknowledges nothing for so long is out of reach. Another lane, from here or to
another worker, costs less than to wait for this one."""
NEAR_US = 100
"""Microseconds of the shortest round trip so far, up to which a peer is near."""
NEAR_BUFFER = 256 << 10
"""Bytes, which the kernel doubles for what it needs itself. Half of it is slower, twice of it no better."""
_MIN_RTT_AT = 148
"""Where tcpi_min_rtt stands in Linux's struct tcp_info."""
_NO_RTT_US = (1 << 32) - 1
"""It, of a connection that has measured none."""


def tune(sock: socket.socket, *, user_timeout: bool = False) -> None:
    """Small messages at once, and dead peers found."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TRIES)
    if user_timeout:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * USER_TIMEOUT_S)


def unreachable(address: str, error: OSError) -> DeadlineError | LaneLostError:
    """What is said of an address to which no connection came about: a DeadlineError if nothing was heard of it."""
    kind = DeadlineError if isinstance(error, TimeoutError) else LaneLostError
    return kind(f"no connection to {address}: {error}")


def silence(address: str, error: OSError) -> DeadlineError | None:
    """The same of a connection that the kernel gave up, for nothing is acknowledged. None: it just ended."""
    if error.errno not in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return None
    return DeadlineError(f"{address} has acknowledged nothing for {USER_TIMEOUT_S} s: {error}")


def sealed(message: bytes | memoryview) -> bytes:
    """A message as it travels."""
    size = len(message)
    return _seal(size, size ^ _ALL, xxh3_64_intdigest(message)) + message


def length_of(seal: bytes | bytearray | memoryview, at: int = 0) -> int:
    """Bytes of the message behind this seal, at most MAX_FRAME.

    Raises BatchCorruptError for a seal that is damaged, or none; ProtocolError for one of too long a message.
    """
    size, complement, _ = SEAL.unpack_from(seal, at)
    if size ^ complement != _ALL:
        raise BatchCorruptError(
            f"a message of {size} bytes by its length and of {complement ^ _ALL} by the complement: damaged on its "
            "way, or of another protocol"
        )
    if size > MAX_FRAME:
        raise ProtocolError(f"a message of {size} bytes, above the limit of {MAX_FRAME}")
    return int(size)


def check_message(seal: bytes | bytearray | memoryview, at: int, message: bytes | memoryview) -> None:
    """Raises BatchCorruptError if this is not what was sealed."""
    if SEAL.unpack_from(seal, at)[2] != xxh3_64_intdigest(message):
        raise BatchCorruptError(f"a message of {len(message)} bytes was damaged on its way")


def is_checked(frame: Frame) -> bool:
    """Whether CHECK_BYTES follow the payload of this BATCH: where the digest of the batch does not cover every byte of
    it, and where those that travel are to be unpacked first."""
    return frame.codec != 0 or frame.nbytes > FULL_BELOW or frame.flags == DigestCover.ROWS


def check_of(hasher: xxh3_64) -> bytes:
    """What travels behind a payload that `hasher` has seen."""
    return hasher.intdigest().to_bytes(CHECK_BYTES, "little")


def read_hello(sock: socket.socket, timeout: float) -> lane_pb2.Hello:
    """The Hello that opens a TCP lane, and not a byte more; `timeout` seconds for all of it, also where it trickles.

    Raises:
        DeadlineError: it did not come in time.
        LaneLostError: the peer vanished.
        BatchCorruptError: it was damaged on its way.
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
        self.missing = SEAL.size
        """Bytes to receive next, at most; 0 once it is whole."""
        self._data = b""
        self._seal = b""

    def add(self, piece: bytes) -> None:
        """What was received of the missing; nothing means that the peer is gone."""
        if not piece:
            raise LaneLostError("the peer of a lane vanished before its hello")
        self._data += piece
        self.missing -= len(piece)
        if not self._seal and not self.missing:
            self._seal, self._data = self._data, b""
            self.missing = length_of(self._seal)
            if not self.missing:
                raise ProtocolError("a hello of 0 bytes")

    def hello(self) -> lane_pb2.Hello:
        check_message(self._seal, 0, self._data)
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
    min_rtt_us = _min_rtt_us(sock)
    if min_rtt_us is not None and min_rtt_us < NEAR_US:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BUFFER)


def round_trip_s(sock: socket.socket) -> float:
    """Seconds to the peer and back, 0 if the kernel does not know. `sock` is or was connected."""
    return min(_min_rtt_us(sock) or 0, _NO_RTT_US) % _NO_RTT_US / 1e6


def _min_rtt_us(sock: socket.socket) -> int | None:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    return int(struct.unpack_from("=I", info, _MIN_RTT_AT)[0]) if len(info) == _MIN_RTT_AT + 4 else None


class SealedInbox:
    """Bytes of a stream on their way in, and the whole messages among them."""

    def __init__(self, capacity: int = 4 * MAX_FRAME) -> None:
        """`capacity` bytes, more than the longest message."""
        self._buffer = memoryview(bytearray(capacity))
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def take_check(self, hasher: xxh3_64) -> bool:
        """Compare the check behind a payload with what `hasher` has seen of it; False while it is incomplete.

        Raises BatchCorruptError if they differ.
        """
        stop = self._start + CHECK_BYTES
        if stop > self._end:
            return False
        if self._buffer[self._start : stop] != check_of(hasher):
            raise BatchCorruptError("its payload was damaged on its way")
        self._start = stop
        return True

    def room(self, limit: int) -> memoryview:
        """Where to receive the next bytes: at most `limit`, and never none. Say how many came with `add`."""
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < SEAL.size + MAX_FRAME:
            held = self._end - self._start
            self._buffer[:held] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, held
        return self._buffer[self._end : self._end + limit]

    def add(self, size: int) -> None:
        """`size` bytes were received into `room`."""
        self._end += size

    def take(self) -> memoryview | None:
        """The next whole message, valid until the next `room`; None while it is incomplete.

        Raises BatchCorruptError if it was damaged on its way, ProtocolError if it is longer than any frame.
        """
        buffer, begin = self._buffer, self._start
        start = begin + _SEAL_BYTES
        if start > self._end:
            return None
        size, complement, check = _unseal(buffer, begin)
        if size ^ complement != _ALL or size > MAX_FRAME:
            length_of(buffer, begin)  # says which
        stop = start + size
        if stop > self._end:
            return None
        message = buffer[start:stop]
        if xxh3_64_intdigest(message) != check:
            check_message(buffer, begin, message)
        self._start = stop
        return message

    def take_bytes(self, limit: int) -> memoryview:
        """Up to `limit` bytes of payload that have arrived, as they are; valid until the next `room`."""
        start = self._start
        self._start = min(self._end, start + limit)
        return self._buffer[start : self._start]
