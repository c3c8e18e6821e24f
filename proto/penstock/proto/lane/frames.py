"""What both ends of a lane agree on: the bytes of frames and acks, limits, shapes in the slot, and who may connect.

Frames and acks are fixed headers, as lane.proto describes them: one `struct` call writes or reads one, in a quarter of
the time that a protobuf message takes, and nothing of it stays behind. (A protobuf message that is reused keeps memory
of everything that it ever parsed: 57 bytes a batch with one dim, 1,000 with 120.)

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
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from penstock.proto.errors import ProtocolError
from penstock.proto.lane.ring import Ring
from penstock.proto.v1 import records_pb2

__all__ = [
    "BATCH",
    "CLOSE",
    "END",
    "ERROR",
    "FRAME_BYTES",
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
    "Ack",
    "Frame",
    "StructurePieces",
    "check_peer",
    "connect_local",
    "dims_of",
    "forget_oldest",
    "framed",
    "framed_batch",
    "pack_shapes",
    "read_ack",
    "read_frame",
    "unpack_shapes",
]

LANE_PROTOCOL = 4
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
"""Bytes of one structure: what penstock.proto.batch.structure accepts."""
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

BATCH, RING, STRUCTURE, END, ERROR, CLOSE = range(1, 7)
"""Kinds of frames."""

LOST = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF})
"""What a send says when nobody is there any more. What it had sent before may still be read."""

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def framed(message: bytes) -> bytes:
    """A message with its length in front."""
    return HEAD.pack(len(message)) + message


def pack_shapes(shapes: Sequence[int]) -> bytes:
    """Shapes as they travel: little-endian u64."""
    return struct.pack(f"<{len(shapes)}Q", *shapes)


def unpack_shapes(packed: bytes) -> list[int]:
    """Shapes that have travelled."""
    if len(packed) & 7:
        raise ProtocolError(f"dims of {len(packed)} bytes")
    return list(struct.unpack(f"<{len(packed) >> 3}Q", packed))


_FRAME = struct.Struct("<BBBxIIIIIQQQQQ")
FRAME_BYTES: Final = _FRAME.size
"""Bytes of the header that each frame begins with."""
_ACK = struct.Struct("<BxxxIIQQQ")  # close, numbers in released and in wanted, delivered, open_epochs, abandon_epoch
_pack_frame, _unpack_frame, _new = _FRAME.pack, _FRAME.unpack_from, tuple.__new__


class Frame(NamedTuple):
    """What a producer says. The fields are those of the header, in order; lane.proto says what they mean in each kind.

    Made anew for each frame and never changed, so it may be kept.
    """

    kind: int = 0
    codec: int = 0
    flags: int = 0
    ring: int = 0
    entry: int = 0
    structure: int = 0
    abandons: int = 0
    size: int = 0
    total: int = 0
    epoch: int = 0
    nbytes: int = 0
    digest: int = 0
    wire: int = 0
    rest: bytes = b""
    """What follows the header: packed dims, a piece of a structure, or an ErrorDetail."""

    def encode(self) -> bytes:
        return _pack_frame(*self[:-1]) + self.rest

    @property
    def shapes(self) -> list[int]:
        """Of a BATCH whose shapes do not ride in its slot."""
        return unpack_shapes(self.rest)

    @property
    def entries(self) -> int:
        """Of a RING."""
        return self.entry

    @property
    def entry_bytes(self) -> int:
        """Of a RING."""
        return self.nbytes

    @property
    def error(self) -> records_pb2.ErrorDetail:
        """Of an ERROR or CLOSE. Raises ProtocolError if it cannot be read."""
        try:
            return records_pb2.ErrorDetail.FromString(self.rest)
        except DecodeError as error:
            raise ProtocolError(f"an error that cannot be read: {error}") from error


_pack_framed = struct.Struct("<I" + _FRAME.format.removeprefix("<")).pack


def framed_batch(
    flags: int,
    ring: int,
    entry: int,
    structure: int,
    abandons: int,
    size: int,
    total: int,
    epoch: int,
    nbytes: int,
    digest: int,
    dims: bytes,
) -> bytes:
    """A BATCH frame of the local lane with its length in front, in one call: there is one for each batch."""
    return (
        _pack_framed(
            *(FRAME_BYTES + len(dims), BATCH, 0, flags, ring, entry, structure, abandons, size),
            *(total, epoch, nbytes, digest, 0),
        )
        + dims
    )


def read_frame(view: memoryview, start: int, stop: int) -> Frame:
    """The frame that lies in these bytes of `view`. Raises ProtocolError if they are too few."""
    if stop - start < FRAME_BYTES:
        raise ProtocolError(f"a frame of {stop - start} bytes that cannot be read: its header alone has {FRAME_BYTES}")
    return _new(Frame, (*_unpack_frame(view, start), view[start + FRAME_BYTES : stop].tobytes()))


class Ack(NamedTuple):
    """What a consumer says, in groups; fields that are 0 or empty say nothing new."""

    delivered: int = 0
    """Largest total handed to the training loop."""
    open_epochs: int = 0
    """Passes up to this epoch may be opened."""
    abandon_epoch: int = 0
    """Value + 1: leave this epoch after `delivered`, and go on with the next."""
    released: Sequence[int] = ()
    """Ring, slot, ring, slot ..."""
    wanted: Sequence[int] = ()
    """Step, total, step, total ...: snapshots wanted after `total` for `step`."""
    close: bool = False
    """The consumer goes away on purpose."""

    def encode(self) -> bytes:
        """Nothing, if nothing is said: an empty packet would read as the end of the lane."""
        if not any(self):
            return b""
        released, wanted = self.released, self.wanted
        head = _ACK.pack(self.close, len(released), len(wanted), self.delivered, self.open_epochs, self.abandon_epoch)
        return head + struct.pack(f"<{len(released)}I{len(wanted)}Q", *released, *wanted)


def read_ack(view: memoryview, start: int, stop: int) -> Ack:
    """The ack that lies in these bytes of `view`. Raises ProtocolError if it does not fill them exactly."""
    size = stop - start
    if size < _ACK.size:
        raise ProtocolError(f"an ack of {size} bytes that cannot be read: its header alone has {_ACK.size}")
    close, released, wanted, delivered, open_epochs, abandon_epoch = _ACK.unpack_from(view, start)
    if size != _ACK.size + 4 * released + 8 * wanted:
        raise ProtocolError(f"an ack of {size} bytes that cannot be read: it claims {released} and {wanted} numbers")
    start += _ACK.size
    entries = struct.unpack_from(f"<{released}I", view, start)
    steps = struct.unpack_from(f"<{wanted}Q", view, start + 4 * released)
    return Ack(delivered, open_epochs, abandon_epoch, entries, steps, bool(close))


def dims_of(frame: Frame, ring: Ring) -> bytes:
    """The packed shapes of a batch, wherever they travelled."""
    if not frame.size:
        return frame.rest
    if frame.size > MAX_DIMS:
        raise ProtocolError(f"a batch of {frame.size} dims, above the {MAX_DIMS} that any structure has")
    if frame.entry >= ring.entries or frame.nbytes + 8 * frame.size > ring.entry_bytes:
        raise ProtocolError(f"a batch announced {frame.size} dims that lie beyond its ring entry")
    start = frame.entry * ring.entry_bytes + frame.nbytes
    return ring.view[start : start + 8 * frame.size].tobytes()


def forget_oldest(structures: dict[int, bytes]) -> None:
    """Keep of what was announced, oldest first, no more than both ends remember; the newest always."""
    held = sum(map(len, structures.values()))
    while len(structures) > KNOWN_STRUCTURES or (held > KNOWN_BYTES and len(structures) > 1):
        held -= len(structures.pop(next(iter(structures))))


class StructurePieces:
    """Puts a structure together from its STRUCTURE frames, which come in order and without another one's between."""

    def __init__(self) -> None:
        self._structure = 0
        self._data = bytearray()

    def add(self, frame: Frame) -> bytes | None:
        """The structure, with its last piece. Raises ProtocolError for a piece that cannot be."""
        size, piece, data = frame.size, frame.rest, self._data
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
