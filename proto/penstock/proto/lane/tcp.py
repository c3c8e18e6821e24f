"""Frames of a lane over TCP. Each has a checksum, and a BATCH frame is followed by the batch's bytes, its payload.

Frames and payloads go to the consumer; one Hello and then acks go to the producer. TCP has no packet borders, so both
read into a `SealedInbox`: one large receive, then whole messages without a copy.

**Damage is detected.** TCP's checksum has 16 bits, and a switch or proxy that damages a packet recomputes it. So before
each message is a *seal*: its length, twice (a damaged one would make the reader wait for ever), and its xxh3. A payload
is followed by an xxh3, unless its digest covers all its bytes (`is_checked`). After any BatchCorruptError the
connection is closed, and the consumer fetches again what it lacks. xxh3 takes 16 us for 1 MiB; crc32c in hardware takes
37.

**Dead peers are detected** by keepalive while idle, and by TCP_USER_TIMEOUT while sent data is not acknowledged, which
is set at the receiver's end only: the kernel also counts a closed window as silence, and a receiver closes its window
while its training loop pauses. A sender whose peer is gone only keeps its own memory until the kernel gives up."""

from __future__ import annotations

import errno
import socket
import struct

from google.protobuf.message import DecodeError
from xxhash import xxh3_64, xxh3_64_intdigest

from penstock.proto.batch.digest import FULL_BELOW, DigestCover
from penstock.proto.errors import BatchCorruptError, DeadlineError, LaneLostError, malformed
from penstock.proto.lane.frames import COVER, MAX_FRAME, Frame
from penstock.proto.v1 import lane_pb2

SEAL = struct.Struct("<IIQ")
"""Format of the seal: the message's length, the complement of the length, and the message's xxh3."""
CHECK_BYTES = 8
"""Bytes of the check that follows a payload: its xxh3, little endian."""
_REMEDY = "Check memory and network of both machines if this happens often"
_ALL = (1 << 32) - 1
_SEAL_BYTES, _seal, _unseal = SEAL.size, SEAL.pack, SEAL.unpack_from

KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TRIES = 10, 5, 4
PROBE_EVERY_S, USER_TIMEOUT_S = 1, 2
"""Seconds between keepalive probes, and without an acknowledgement until the receiver's peer counts as unreachable:
waiting longer would cost more than a new lane."""
NEAR_US = 100
"""Longest round trip in microseconds to a peer that counts as near, by the shortest that the kernel has measured."""
NEAR_BUFFER = 256 << 10
"""Send buffer in bytes for a near peer. Half the size is slower, and twice the size is not faster."""
_MIN_RTT_AT = 148
"""Offset of tcpi_min_rtt in Linux's struct tcp_info."""
_NO_RTT_US = (1 << 32) - 1


def tune(sock: socket.socket, *, user_timeout: bool = False) -> None:
    """Send small messages at once, and detect dead peers. `user_timeout`: TCP_USER_TIMEOUT, and probes each second."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TRIES)
    if user_timeout:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * USER_TIMEOUT_S)


def unreachable_error(address: str, error: OSError) -> DeadlineError | LaneLostError:
    kind = DeadlineError if isinstance(error, TimeoutError) else LaneLostError
    return kind(f"no connection to {address}: {error}")


def silence_error(address: str, error: OSError) -> DeadlineError | None:
    """DeadlineError if the kernel ended the connection because acknowledgements were missing; else None."""
    if error.errno not in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return None
    return DeadlineError(
        f"{address} has not acknowledged data for {USER_TIMEOUT_S} s, so the connection was closed: {error}"
    )


def sealed(message: bytes | memoryview) -> bytes:
    size = len(message)
    return _seal(size, size ^ _ALL, xxh3_64_intdigest(message)) + message


def length_of(seal: bytes | bytearray | memoryview, at: int = 0) -> int:
    """Length of the message after a seal. Raises BatchCorruptError if its two differ, ProtocolError if too long."""
    size, complement, _ = SEAL.unpack_from(seal, at)
    if size ^ complement != _ALL:
        raise BatchCorruptError(f"a message was damaged in transit, or its sender is not Penstock. {_REMEDY}")
    if size > MAX_FRAME:
        raise malformed(f"a message must have at most {MAX_FRAME} bytes, got {size}")
    return int(size)


def check_message(seal: bytes | bytearray | memoryview, at: int, message: bytes | memoryview) -> None:
    """Raise BatchCorruptError if the message does not match its seal."""
    if SEAL.unpack_from(seal, at)[2] != xxh3_64_intdigest(message):
        raise BatchCorruptError(f"the checksum of a message of {len(message)} bytes differs. {_REMEDY}")


def is_checked(frame: Frame) -> bool:
    """True if a check follows the payload of this BATCH frame: none does if the digest covers all of what is sent."""
    cover = frame.flags & COVER
    return frame.codec != 0 or (cover != DigestCover.FULL and (frame.nbytes > FULL_BELOW or cover == DigestCover.ROWS))


def check_of(hasher: xxh3_64) -> bytes:
    return hasher.intdigest().to_bytes(CHECK_BYTES, "little")


def parsed_hello(data: bytes) -> lane_pb2.Hello:
    """Return the Hello that opens a lane. Raises ProtocolError for another message."""
    try:
        return lane_pb2.Hello.FromString(data)
    except DecodeError as error:
        raise malformed(f"a request to read batches (Hello) cannot be decoded ({error})") from error


def fit_send_buffer(sock: socket.socket) -> None:
    """Limit the unsent data to a near peer to the size of a processor's cache.

    The kernel keeps 4 MiB in flight: on the loopback 8 MiB batches took 1,370 us of processor time instead of 1,050.
    The bound is one full buffer in each round trip: 3 GB/s at NEAR_US, more than a lane needs."""
    min_rtt_us = _min_rtt_us(sock)
    if min_rtt_us is not None and min_rtt_us < NEAR_US:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BUFFER)


def round_trip_s(sock: socket.socket) -> float:
    """Shortest round trip to the peer in seconds; 0 if the kernel has not measured it."""
    return min(_min_rtt_us(sock) or 0, _NO_RTT_US) % _NO_RTT_US / 1e6


def _min_rtt_us(sock: socket.socket) -> int | None:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    return int(struct.unpack_from("=I", info, _MIN_RTT_AT)[0]) if len(info) == _MIN_RTT_AT + 4 else None


class SealedInbox:
    def __init__(self, capacity: int = 4 * MAX_FRAME) -> None:
        """`capacity`: bytes, more than the longest message has."""
        self._buffer = memoryview(bytearray(capacity))
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def take_check(self, hasher: xxh3_64, total: int) -> bool:
        """Compare the check after a payload with its hash. False if it has not arrived. Raises BatchCorruptError."""
        stop = self._start + CHECK_BYTES
        if stop > self._end:
            return False
        if self._buffer[self._start : stop] != check_of(hasher):
            raise BatchCorruptError(f"the checksum of batch {total} of the slot differs. {_REMEDY}")
        self._start = stop
        return True

    def room(self, limit: int) -> memoryview:
        """Return the memory into which to receive the next bytes: at most `limit`, never empty. Then call `add`."""
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < SEAL.size + MAX_FRAME:
            held = self._end - self._start
            self._buffer[:held] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, held
        return self._buffer[self._end : self._end + limit]

    def add(self, size: int) -> None:
        self._end += size

    def take(self) -> memoryview | None:
        """Return the next message without its seal, valid until the next `room`; None if incomplete. Raises
        BatchCorruptError, ProtocolError if it is longer than any frame."""
        buffer, begin = self._buffer, self._start
        start = begin + _SEAL_BYTES
        if start > self._end:
            return None
        size, complement, check = _unseal(buffer, begin)
        if size ^ complement != _ALL or size > MAX_FRAME:
            length_of(buffer, begin)  # raises the right error
        stop = start + size
        if stop > self._end:
            return None
        message = buffer[start:stop]
        if xxh3_64_intdigest(message) != check:
            check_message(buffer, begin, message)
        self._start = stop
        return message

    def take_bytes(self, limit: int) -> memoryview:
        """Return up to `limit` bytes of a payload, valid until the next call of `room`."""
        start = self._start
        self._start = min(self._end, start + limit)
        return self._buffer[start : self._start]
