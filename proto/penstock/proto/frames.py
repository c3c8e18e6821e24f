"""What both ends of a lane agree on besides the frames themselves: limits, shapes in the slot, and who may connect.

The limits bound what a peer can make this process hold: a frame, the pieces of one structure, the rings and
structures that are remembered. They are the same on the Unix socket and over TCP, so that a process between the two
can pass frames on verbatim.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence

from penstock.proto.errors import ProtocolError
from penstock.proto.ring import Ring
from penstock.proto.v1 import lane_pb2

__all__ = [
    "BATCH",
    "CLOSE",
    "END",
    "ERROR",
    "HEAD",
    "KNOWN_BYTES",
    "KNOWN_STRUCTURES",
    "LANE_PROTOCOL",
    "LONG_SHAPES",
    "LOST",
    "MAX_DIMS",
    "MAX_FRAME",
    "MAX_PACKET",
    "MAX_RINGS",
    "MAX_STRUCTURE",
    "MAX_UNUSED",
    "PIECE",
    "RING",
    "STRUCTURE",
    "Pieces",
    "check_peer",
    "connect_local",
    "forget_oldest",
    "framed",
    "long_shapes",
    "pack_shapes",
]

LANE_PROTOCOL = 3
MAX_FRAME = 64 << 10
"""Bytes. A default Unix socket buffer holds 208 KiB, so three of the largest are always on their way."""
HEAD = struct.Struct("<I")
"""The length of a frame, in front of it on both lanes."""
MAX_PACKET = HEAD.size + MAX_FRAME
"""Bytes of one packet of the local lane: one frame of any length, or many small ones."""
PIECE = 32 << 10
"""Bytes of a structure in one STRUCTURE frame."""
LONG_SHAPES = 2048
"""Dims. A longer shape list rides behind the batch in its slot instead of in the frame."""
MAX_DIMS = 65_536 * 32
"""Dims of one batch: what a structure can ask for (its MAX_LEAVES of MAX_RANK). Each of them becomes an object."""
MAX_STRUCTURE = 4 << 20
"""Bytes of one structure: what penstock.proto.structure accepts."""
MAX_RINGS = 64
"""Rings in use at once. Each is at least twice its predecessor, so nobody gets near this in good faith."""
KNOWN_STRUCTURES = 64
"""Structures that the two ends remember; the least recently announced is forgotten first, on both ends alike."""
KNOWN_BYTES = 8 << 20
"""Bytes of all that they remember: two of the largest. Compiled they take up to sixty times as much. An ordinary
structure has some hundred bytes."""
MAX_UNUSED = 1 << 16
"""Frames in a row that bring the training loop no batch. A reconnect brings a few thousand at most: 64 structures in
128 pieces each. A peer that sends nothing else would keep its reader busy for ever."""

BATCH, RING, STRUCTURE, END, ERROR, CLOSE = (
    lane_pb2.BATCH,
    lane_pb2.RING,
    lane_pb2.STRUCTURE,
    lane_pb2.END,
    lane_pb2.ERROR,
    lane_pb2.CLOSE,
)

LOST = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF})
"""What a send says when nobody is there any more. What it had sent before may still be read."""

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def framed(message: bytes) -> bytes:
    """A message with its length in front."""
    return HEAD.pack(len(message)) + message


def pack_shapes(shapes: Sequence[int]) -> bytes:
    """Shapes as they ride in the slot when there are more than LONG_SHAPES of them: little-endian u64."""
    return struct.pack(f"<{len(shapes)}Q", *shapes)


def long_shapes(frame: lane_pb2.Frame, ring: Ring) -> Sequence[int]:
    """The shapes of a batch, wherever they travelled."""
    if not frame.size:
        return frame.shapes
    if frame.size > MAX_DIMS:
        raise ProtocolError(f"a batch of {frame.size} dims, above the {MAX_DIMS} that any structure has")
    if frame.slot >= ring.slots or frame.nbytes + 8 * frame.size > ring.slot_bytes:
        raise ProtocolError(f"a batch announced {frame.size} dims that lie beyond its ring slot")
    return struct.unpack_from(f"<{frame.size}Q", ring.map, frame.slot * ring.slot_bytes + frame.nbytes)


def forget_oldest(structures: dict[int, bytes]) -> None:
    """Keep of what was announced, oldest first, no more than both ends remember; the newest always."""
    held = sum(map(len, structures.values()))
    while len(structures) > KNOWN_STRUCTURES or (held > KNOWN_BYTES and len(structures) > 1):
        held -= len(structures.pop(next(iter(structures))))


class Pieces:
    """Puts a structure together from its STRUCTURE frames, which come in order and without another one's between."""

    def __init__(self) -> None:
        self._structure = 0
        self._data = bytearray()

    def add(self, frame: lane_pb2.Frame) -> bytes | None:
        """The structure, with its last piece. Raises ProtocolError for a piece that cannot be."""
        size, piece, data = frame.size, frame.inline, self._data
        if data and frame.structure != self._structure:
            raise ProtocolError(f"a piece of structure {frame.structure} amid those of {self._structure}")
        if size > MAX_STRUCTURE or len(data) + len(piece) > size or (size and not piece):
            raise ProtocolError(f"a structure of {size} bytes with pieces of {len(data)} + {len(piece)}")
        self._structure = frame.structure
        data += piece
        if len(data) < size:
            return None
        self._data = bytearray()
        return bytes(data)


def connect_local(address: str, timeout: float) -> socket.socket:
    """A SEQPACKET connection to an abstract Unix socket, whose peer must run as this user or as root."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout)
        sock.connect("\0" + address)
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket) -> int:
    """The peer's pid. An abstract name has no file permissions, so ask the kernel who is there."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid not in (0, os.getuid()):
        raise ProtocolError(f"the peer of a Unix socket runs as user {uid}, not as {os.getuid()}")
    return int(pid)
