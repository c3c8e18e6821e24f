"""Frames (from producer to consumer) and acks (back), with their limits and checks.

They are fixed headers (lane.proto): one `struct` call writes or reads one, in a quarter of the time of a protobuf
message (whose object grows, if reused, by 57 to 1,000 bytes each). The limits bound the memory that a peer can make
this process allocate. They are the same on the Unix socket and over TCP, so frames can be forwarded unchanged."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from penstock.proto.errors import ProtocolError, malformed
from penstock.proto.lane.ring import Ring
from penstock.proto.v1 import records_pb2

LANE_PROTOCOL = 8
"""Number of the protocol of lanes. Workers and training jobs name theirs to the coordinator, and a job's slots go only
to workers of the same one. Raise it also if a worker could not take a slot over from one of the release before."""
MAX_FRAME = 64 << 10
"""Largest size of a frame in bytes. The default buffer of a Unix socket holds three of them."""
HEAD = struct.Struct("<I")
"""Format of the length before each frame on a local lane (TCP: a seal, tcp.py), and after a BATCH frame's counts."""
MAX_PACKET = HEAD.size + MAX_FRAME
PIECE = 32 << 10
"""Largest part of a structure in one STRUCTURE frame, in bytes."""
LONG_SHAPES = 2048
"""Largest number of dims in a frame. Longer lists follow the batch in its ring entry."""
MAX_DIMS = 65_536 * 32
"""Largest number of dims of a batch: MAX_LEAVES tensors with MAX_RANK dims each."""
MAX_STRUCTURE = 4 << 20
MAX_RINGS = 64
"""Largest number of rings in use. The next ring's entries are usually twice as large, so no correct peer reaches it."""
KNOWN_STRUCTURES = 64
"""Largest number of announced structures at a time. Above it, both ends forget the one announced longest ago."""
KNOWN_BYTES = 8 << 20
"""Largest size of all announced structures together in bytes. Objects made for them take up to sixty times as much."""
MAX_UNUSED = 1 << 16
"""Largest number of frames in a row without a batch or end of an epoch: a peer must not keep its reader busy."""

BATCH, RING, STRUCTURE, END, ERROR, CLOSE = range(1, 7)

COVER = 0x03
"""Bits of a BATCH frame's flags that say which bytes of the batch its digest covers (DigestCover)."""
COUNTED = 0x80
"""Flag of a BATCH frame with counts (penstock.proto.state.counts) after the dims, before their length, a u32."""

LOST = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF})
"""Error numbers of a send if the peer is gone. Data that the peer sent before may still be read."""

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def framed(message: bytes) -> bytes:
    return HEAD.pack(len(message)) + message


def structure_frames(structure: int, data: bytes) -> list[bytes]:
    return [
        framed(Frame(STRUCTURE, structure=structure, size=len(data), rest=data[start : start + PIECE]).encode())
        for start in range(0, max(len(data), 1), PIECE)
    ]


def pack_shapes(shapes: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(shapes)}Q", *shapes)


_FRAME = struct.Struct("<BBBxIIIIIQQQQQ")
FRAME_BYTES: Final = _FRAME.size
_ACK = struct.Struct("<BxxxIIQQQQQ")
"""close, numbers in released and in wanted, delivered, open_epochs, abandon_epoch, labelled, label"""
_pack_frame, _unpack_frame, _new = _FRAME.pack, _FRAME.unpack_from, tuple.__new__


class Frame(NamedTuple):
    """Message of a producer: the fields of the header, in order; lane.proto says what they mean in each kind."""

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
    """Packed dims and perhaps counts (COUNTED), a piece of a structure, or an ErrorDetail."""

    def encode(self) -> bytes:
        return _pack_frame(*self[:-1]) + self.rest

    @property
    def dims(self) -> bytes:
        """Packed dims in a BATCH frame. For dims that are in the ring entry instead, use `dims_of`."""
        return self.rest[: -HEAD.size - len(counts_of(self))] if self.flags & COUNTED else self.rest

    @property
    def entries(self) -> int:
        return self.entry

    @property
    def entry_bytes(self) -> int:
        return self.nbytes

    @property
    def error(self) -> records_pb2.ErrorDetail:
        """Error in an ERROR or CLOSE frame. Raises ProtocolError if it cannot be decoded."""
        try:
            return records_pb2.ErrorDetail.FromString(self.rest)
        except DecodeError as error:
            raise malformed(f"the worker sent an error that cannot be decoded ({error})") from error


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
    rest: bytes,
    counts: bytes = b"",
) -> bytes:
    """Return a framed BATCH without a Frame object, because each batch needs one. `counts` set COUNTED."""
    if counts:
        flags, rest = flags | COUNTED, rest + counts + HEAD.pack(len(counts))
    return (
        _pack_framed(
            *(FRAME_BYTES + len(rest), BATCH, 0, flags, ring, entry, structure, abandons, size),
            *(total, epoch, nbytes, digest, 0),
        )
        + rest
    )


def counts_of(frame: Frame) -> bytes:
    """Encoded counts at the end of a BATCH frame. Raises ProtocolError for a wrong length."""
    if not frame.flags & COUNTED:
        return b""
    rest = frame.rest
    end = len(rest) - HEAD.size
    size = HEAD.unpack_from(rest, end)[0] if end >= 0 else 0
    if not 0 < size <= end:
        raise malformed(f"the counts of a batch must have 1 to {end} bytes at the end of its frame, got {size} bytes")
    return rest[end - size : end]


def read_frame(view: memoryview, start: int, stop: int) -> Frame:
    """Raises ProtocolError for fewer bytes than a header has."""
    if stop - start < FRAME_BYTES:
        raise malformed(f"a frame must have at least {FRAME_BYTES} bytes, got {stop - start}")
    return _new(Frame, (*_unpack_frame(view, start), view[start + FRAME_BYTES : stop].tobytes()))


class Ack(NamedTuple):
    """Message that a consumer sends. A field that is 0 or empty says nothing new."""

    delivered: int = 0
    """Last batch delivered to the training loop, counted over the run."""
    open_epochs: int = 0
    abandon_epoch: int = 0
    """Epoch that the loop has abandoned, plus 1; 0 = none. It ends after batch `delivered`."""
    released: Sequence[int] = ()
    """Ring entries that the producer may fill again: ring id, entry, ring id, entry ..."""
    wanted: Sequence[int] = ()
    """Requested snapshots of the loader: step, number of the slot's last batch up to it, step, number ..."""
    close: bool = False
    """The consumer closes the lane on purpose."""
    labelled: int = 0
    """Epoch that has got a label, plus 1; 0 = none."""
    label: int = 0

    def encode(self) -> bytes:
        """Return b"" if no field says anything; do not send that, because an empty packet means the end of the lane."""
        if not any(self):
            return b""
        released, wanted = self.released, self.wanted
        head = _ACK.pack(
            *(self.close, len(released), len(wanted), self.delivered, self.open_epochs, self.abandon_epoch),
            *(self.labelled, self.label),
        )
        return head + struct.pack(f"<{len(released)}I{len(wanted)}Q", *released, *wanted)


def read_ack(view: memoryview, start: int, stop: int) -> Ack:
    """Raises ProtocolError for too few or too many bytes."""
    size = stop - start
    if size < _ACK.size:
        raise malformed(f"an acknowledgement must have at least {_ACK.size} bytes, got {size}")
    close, released, wanted, delivered, open_epochs, abandon_epoch, labelled, label = _ACK.unpack_from(view, start)
    if size != _ACK.size + 4 * released + 8 * wanted:
        raise malformed(f"an acknowledgement of {released} + {wanted} numbers must not have {size} bytes")
    start += _ACK.size
    entries = struct.unpack_from(f"<{released}I", view, start)
    steps = struct.unpack_from(f"<{wanted}Q", view, start + 4 * released)
    return Ack(delivered, open_epochs, abandon_epoch, entries, steps, bool(close), labelled, label)


SO_PEEK_OFF = 42
"""Linux: recv with MSG_PEEK begins at this offset in the queue, and moves it. Not in Python's socket module."""


def unread_break(sock: socket.socket) -> bool:
    """True if an ack that abandons an epoch waits on a local lane. It stays there; others may read it meanwhile."""
    buffer = bytearray(MAX_FRAME)  # of a longer message the next recv would give the rest
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 0)
        while size := sock.recv_into(buffer, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            if size >= _ACK.size and _ACK.unpack_from(buffer)[5]:
                return True
    except OSError:  # all were looked at, or the connection is lost
        pass
    finally:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, -1)
    return False


def dims_of(frame: Frame, ring: Ring) -> bytes:
    """Packed dims of a batch, from its frame or its ring entry. Raises ProtocolError for invalid numbers."""
    if not frame.size:
        return frame.dims
    if frame.size > MAX_DIMS:
        raise malformed(f"a batch must have <= {MAX_DIMS} dimensions in its shapes, got {frame.size}")
    if frame.entry >= ring.entries or frame.nbytes + 8 * frame.size > ring.entry_bytes:
        raise malformed(f"a batch with {frame.size} dimensions must lie within entry {frame.entry} of its ring")
    start = frame.entry * ring.entry_bytes + frame.nbytes
    return ring.view[start : start + 8 * frame.size].tobytes()


def forget_oldest(structures: dict[int, bytes]) -> None:
    """Drop the oldest structures, but never the newest, until the rest is within KNOWN_STRUCTURES and KNOWN_BYTES."""
    held = sum(map(len, structures.values()))
    while len(structures) > KNOWN_STRUCTURES or (held > KNOWN_BYTES and len(structures) > 1):
        held -= len(structures.pop(next(iter(structures))))


class StructurePieces:
    """Assembler of structures from STRUCTURE frames. Those of one structure arrive before those of the next."""

    def __init__(self) -> None:
        self._structure = 0
        self._data = bytearray()

    def add(self, frame: Frame) -> bytes | None:
        """Return the encoded structure if this was its last piece. Raises ProtocolError for an invalid piece."""
        size, piece, data = frame.size, frame.rest, self._data
        if data and frame.structure != self._structure:
            raise malformed(f"the pieces of batch structure {self._structure} must arrive before those of others")
        if size > MAX_STRUCTURE or len(data) + len(piece) > size or (size and not piece):
            raise malformed(f"the pieces of a batch structure must have {size} bytes, at most {MAX_STRUCTURE}")
        self._structure = frame.structure
        data += piece
        if len(data) < size:
            return None
        self._data = bytearray()
        return bytes(data)


def connect_local(address: str, timeout: float, folder: Path | None = None) -> socket.socket:
    """Return a SEQPACKET connection to a Unix socket in a folder; None: to an abstract one. Raises OSError, and
    ProtocolError as check_peer."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout)
        sock.connect(f"\0{address}" if folder is None else str(folder / Path(address).name))
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket) -> int:
    """Return the peer's pid. Raises ProtocolError unless it is this user or root: abstract names are open to all."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid not in (0, os.getuid()):
        raise ProtocolError(
            f"a lane's other end must run as user {os.getuid()} or root, got user {uid}: use one user, or lane='tcp'"
        )
    return int(pid)
