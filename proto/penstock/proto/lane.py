"""The two ends of a lane: who fills a ring, and who reads it.

Both ends speak the frames of lane.proto over a SEQPACKET Unix socket, which keeps each frame whole, while the payload
stays in the ring. `Producer` is the runner's end (and, on another host, the lander's); `Consumer` is the training
loop's end (and, for another host, the pump's). So there is one producer path and one consumer path to make right and
fast, and the TCP lane is the local lane twice with TCP between.

Neither end has threads or locks: the caller's thread does everything, and blocks only where it says so. The producer
outlives its consumers: it keeps each batch until it was delivered, so a consumer that comes back gets what it had not
yet handed out, from the ring, with nothing computed again.

Three rules keep it free of deadlock. A consumer's acks go out before it waits for anything. A producer that waits for a
free slot reads acks. Neither ever waits for room to write: what does not fit in the socket now stays queued and goes
out at the next call.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.proto.errors import BatchTooLargeError, LaneClosedError, LaneLostError, ProtocolError
from penstock.proto.ring import Ring, slots_for
from penstock.proto.v1 import lane_pb2, records_pb2

__all__ = ["LANE_PROTOCOL", "MAX_FRAME", "Consumer", "Producer", "Slab", "check_peer", "connect_local", "long_shapes"]

LANE_PROTOCOL = 1
MAX_FRAME = 64 << 10
"""Bytes. Nothing larger is sent as one packet: a default Unix socket buffer holds 208 KiB."""
PIECE = 32 << 10
"""Bytes of a structure in one STRUCTURE frame."""
LONG_SHAPES = 2048
"""Dims. A longer shape list rides behind the batch in its slot instead of in the frame."""
MAX_STRUCTURE = 16 << 20
MAX_RINGS = 64
KNOWN_STRUCTURES = 64
"""Structures that the two ends remember; the least recently announced is forgotten first, on both ends alike."""

BATCH, RING, STRUCTURE, END, ERROR, CLOSE = (
    lane_pb2.BATCH,
    lane_pb2.RING,
    lane_pb2.STRUCTURE,
    lane_pb2.END,
    lane_pb2.ERROR,
    lane_pb2.CLOSE,
)
_OF_A_PASS = frozenset((BATCH, END))


def pack_shapes(shapes: Sequence[int]) -> bytes:
    """Shapes as they ride in the slot when there are more than LONG_SHAPES of them: little-endian u64."""
    return struct.pack(f"<{len(shapes)}Q", *shapes)


def long_shapes(frame: lane_pb2.Frame, ring: Ring) -> Sequence[int]:
    """The shapes of a batch, wherever they travelled."""
    if not frame.size:
        return frame.shapes
    start = frame.slot * ring.slot_bytes + frame.nbytes
    if frame.nbytes + 8 * frame.size > ring.slot_bytes:
        raise ProtocolError(f"a batch announced {frame.size} dims that lie beyond its ring slot")
    return struct.unpack_from(f"<{frame.size}Q", ring.map, start)


@dataclass(slots=True)
class Slab:
    """A ring slot that the producer may fill."""

    ring_id: int
    slot: int
    ring: Ring

    @property
    def offset(self) -> int:
        """Bytes from the start of the ring's mapping."""
        return self.slot * self.ring.slot_bytes


@dataclass(slots=True)
class _Kept:
    """A frame that may have to be sent again."""

    total: int
    epoch: int
    message: bytes
    slab: Slab | None
    """None for END, ERROR and CLOSE."""
    structure: int


class Producer:
    """The end that owns the rings. One for each slot and generation, whatever consumers come and go."""

    def __init__(self, max_batch_bytes: int) -> None:
        self.max_batch_bytes = max_batch_bytes
        self.open_epochs = 0
        """Passes up to this epoch may be opened."""
        self.abandoned: deque[int] = deque()
        """Epochs that the consumer left; the runner takes them from here."""
        self.wanted: dict[int, list[int]] = {}
        """total -> steps for which the consumer will ask for the state after that batch."""
        self.delivered = 0
        """Largest total that the training loop was handed."""
        self.closed = False
        """The consumer said that it goes away on purpose."""
        self.cuts = 0
        """Abandons seen; frames carry it, so that the consumer can tell a pass it left from the one that follows."""
        self._sock: socket.socket | None = None
        self._rings: dict[int, Ring] = {}
        self._next_ring = 1
        self._current = 0
        self._free: list[int] = []
        self._lent: dict[int, set[int]] = {}
        self._kept: deque[_Kept] = deque()
        self._unsent: deque[bytes | _Descriptor] = deque()
        self._structures: dict[int, bytes] = {}
        self._announced: dict[int, None] = {}
        self._frame = lane_pb2.Frame()
        self._ack = lane_pb2.Ack()

    # ---- the consumer

    @property
    def attached(self) -> bool:
        return self._sock is not None

    def fileno(self) -> int:
        """The socket to poll, -1 while no consumer is attached."""
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def blocked(self) -> bool:
        """Frames wait for room in the socket: poll for writing too."""
        return bool(self._unsent)

    def attach(self, sock: socket.socket, hello: lane_pb2.Hello) -> None:
        """Take on a consumer, dropping the one before: send again what it has not delivered, from the ring."""
        self.detach()
        self.closed = False
        sock.setblocking(False)
        self._sock = sock
        held = {(slot.ring, slot.slot) for slot in hello.held}
        self.delivered = max(self.delivered, hello.next_total - 1)
        for ring_id, lent in self._lent.items():
            for slot in [slot for slot in lent if (ring_id, slot) not in held]:
                self._give_back(ring_id, slot)
        self._drop_delivered(held)
        if hello.cuts == self.cuts:
            hello.ack.abandon_epoch = 0  # seen before the lane broke
        self._apply(hello.ack)
        self.cuts = hello.cuts
        self._announced.clear()
        for ring_id in self._rings:
            self._announce_ring(ring_id)
        for kept in self._kept:
            if kept.structure:
                self._announce_structure(kept.structure)
            self._unsent.append(kept.message)
        self.flush()

    def detach(self) -> None:
        """Forget the consumer; everything it has not delivered is kept."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._unsent.clear()

    def take_acks(self) -> None:
        """Read what the consumer said; never blocks. A vanished consumer is detached."""
        sock, ack = self._sock, self._ack
        while sock is not None:
            try:
                data = sock.recv(MAX_FRAME)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.detach()
                return
            ack.ParseFromString(data)
            self._apply(ack)

    def flush(self) -> None:
        """Send what is queued as far as the socket takes it; never blocks."""
        sock, unsent = self._sock, self._unsent
        if sock is None:
            unsent.clear()
            return
        while unsent:
            message = unsent[0]
            try:
                if isinstance(message, _Descriptor):
                    socket.send_fds(sock, [b"\x00"], [message.fd])
                else:
                    sock.send(message)
            except BlockingIOError:
                return
            except OSError:
                # Its last acks may still be readable; take_acks sees the end of file after them.
                unsent.clear()
                return
            unsent.popleft()

    # ---- batches

    def reserve(self, nbytes: int) -> Slab | None:
        """A slot for a batch of `nbytes`, or None while all are taken. A larger batch starts a larger ring."""
        ring = self._rings.get(self._current)
        if ring is None or nbytes > ring.slot_bytes:
            if nbytes > self.max_batch_bytes:
                raise BatchTooLargeError(
                    f"a batch of {nbytes} bytes is above max_batch_bytes={self.max_batch_bytes}; "
                    "make smaller batches, or raise max_batch_bytes"
                )
            ring = self._start_ring(nbytes, 0 if ring is None else ring.slot_bytes)
        if not self._free:
            return None
        return Slab(self._current, self._free.pop(), ring)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def ring_slots(self) -> int:
        """Slots of the current ring, 0 before the first batch."""
        ring = self._rings.get(self._current)
        return 0 if ring is None else ring.slots

    def know_structure(self, structure: int, data: bytes) -> None:
        """Make a structure known under an id before the first batch that uses it."""
        self._structures[structure] = data

    def publish(
        self, slab: Slab, total: int, epoch: int, structure: int, nbytes: int, shapes: Sequence[int], digest: int
    ) -> None:
        """Send the batch that was written into `slab`, and keep it until it was delivered."""
        frame = self._frame
        frame.Clear()
        frame.kind = BATCH
        frame.total = total
        frame.epoch = epoch
        frame.ring = slab.ring_id
        frame.slot = slab.slot
        frame.structure = structure
        frame.nbytes = nbytes
        frame.digest = digest
        frame.cut = self.cuts
        if len(shapes) > LONG_SHAPES:
            frame.size = len(shapes)
            start = slab.offset + nbytes
            slab.ring.map[start : start + 8 * len(shapes)] = pack_shapes(shapes)
        else:
            frame.shapes.extend(shapes)
        message = frame.SerializeToString()
        if structure not in self._announced:
            self._announce_structure(structure)
        self._lent.setdefault(slab.ring_id, set()).add(slab.slot)
        self._kept.append(_Kept(total, epoch, message, slab, structure))
        self._send(message)

    def return_unused(self, slab: Slab) -> None:
        """Give a reserved slot back without publishing it."""
        self._free_slot(slab.ring_id, slab.slot)

    def end(self, epoch: int, total: int) -> None:
        """The pass `epoch` is over; `total` is the last batch so far."""
        message = lane_pb2.Frame(kind=END, epoch=epoch, total=total, cut=self.cuts).SerializeToString()
        self._kept.append(_Kept(total, epoch, message, None, 0))
        self._send(message)

    def fail(self, epoch: int, total: int, error: records_pb2.ErrorDetail) -> None:
        """The input failed after batch `total`: the last frame."""
        kept = records_pb2.ErrorDetail(
            name=error.name, message=error.message[:8192], remote_traceback=error.remote_traceback[-16384:]
        )
        message = lane_pb2.Frame(kind=ERROR, epoch=epoch, total=total, error=kept, cut=self.cuts).SerializeToString()
        self._kept.append(_Kept(total, epoch, message, None, 0))
        self._send(message)

    def close(self) -> None:
        """Say that this end goes away on purpose."""
        if self._sock is not None:
            self._send(lane_pb2.Frame(kind=CLOSE).SerializeToString())
        self.detach()

    def _drop_pass(self, epoch: int) -> None:
        """The consumer left this pass: nothing of it, or of one opened ahead of it, will be delivered any more."""
        kept = self._kept
        for item in [item for item in kept if item.epoch >= epoch]:
            kept.remove(item)
            if item.slab is not None:
                self._give_back(item.slab.ring_id, item.slab.slot)

    # ---- inside

    def _send(self, message: bytes) -> None:
        sock = self._sock
        if sock is None:
            return
        if not self._unsent:
            try:
                sock.send(message)
                return
            except BlockingIOError:
                pass
            except OSError:
                return
        self._unsent.append(message)

    def _start_ring(self, nbytes: int, previous: int) -> Ring:
        size = min(max(nbytes, 2 * previous), max(self.max_batch_bytes, nbytes))
        ring = Ring.create(size, slots_for(size))
        old = self._current
        self._current = self._next_ring
        self._next_ring += 1
        self._rings[self._current] = ring
        self._free = list(range(ring.slots))
        self._lent[self._current] = set()
        self._retire(old)
        if self._sock is not None:
            self._announce_ring(self._current)
            self.flush()
        return ring

    def _announce_ring(self, ring_id: int) -> None:
        ring = self._rings[ring_id]
        frame = lane_pb2.Frame(kind=RING, ring=ring_id, slot_bytes=ring.slot_bytes, slots=ring.slots)
        self._unsent.append(frame.SerializeToString())
        self._unsent.append(_Descriptor(ring.fd))

    def _announce_structure(self, structure: int) -> None:
        announced = self._announced
        announced[structure] = None
        if len(announced) > KNOWN_STRUCTURES:
            del announced[next(iter(announced))]
        data = self._structures[structure]
        for start in range(0, max(len(data), 1), PIECE):
            piece = data[start : start + PIECE]
            self._send(
                lane_pb2.Frame(kind=STRUCTURE, structure=structure, inline=piece, size=len(data)).SerializeToString()
            )

    def _apply(self, ack: lane_pb2.Ack) -> None:
        if ack.delivered > self.delivered:
            self.delivered = ack.delivered
            self._drop_delivered(None)
        released = ack.released
        for index in range(0, len(released) - 1, 2):
            self._give_back(released[index], released[index + 1])
        if ack.open_epochs > self.open_epochs:
            self.open_epochs = ack.open_epochs
        if ack.abandon_epoch:
            self.cuts += 1
            self._drop_pass(ack.abandon_epoch - 1)
            self.abandoned.append(ack.abandon_epoch - 1)
        wanted = ack.wanted
        for index in range(0, len(wanted) - 1, 2):
            self.wanted.setdefault(wanted[index + 1], []).append(wanted[index])
        if ack.close:
            self.closed = True

    def _drop_delivered(self, held: set[tuple[int, int]] | None) -> None:
        """Forget what need not be sent again. Its slots stay lent until released, unless nobody holds them."""
        kept = self._kept
        while kept and kept[0].total <= self.delivered:
            item = kept[0]
            if item.slab is None and item.total == self.delivered:
                return  # an END or ERROR right behind the last delivered batch
            kept.popleft()
            if held is not None and item.slab is not None and (item.slab.ring_id, item.slab.slot) not in held:
                self._give_back(item.slab.ring_id, item.slab.slot)

    def _give_back(self, ring_id: int, slot: int) -> None:
        lent = self._lent.get(ring_id)
        if lent is None or slot not in lent:
            return  # said twice, or of a ring that is gone: idempotent
        lent.discard(slot)
        self._free_slot(ring_id, slot)

    def _free_slot(self, ring_id: int, slot: int) -> None:
        if ring_id == self._current:
            self._free.append(slot)
        else:
            self._retire(ring_id)

    def _retire(self, ring_id: int) -> None:
        """Let an outgrown ring go once none of its slots is lent."""
        if ring_id in self._rings and ring_id != self._current and not self._lent[ring_id]:
            self._rings.pop(ring_id).close_fd()
            del self._lent[ring_id]


@dataclass(slots=True)
class _Descriptor:
    fd: int


class Consumer:
    """The end that reads. Holds the lane's socket, the mapped rings and the structures announced so far.

    Frames are read one at a time, when the caller wants one: what has not been read waits in the socket, which is as
    deep as the ring.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        """For messages: which worker, box and slot is at the other end."""
        self.rings: dict[int, Ring] = {}
        self.structures: dict[int, bytes] = {}
        self.closed = False
        sock.setblocking(False)
        self._sock = sock
        self._frame = lane_pb2.Frame()
        self._buffer = bytearray(MAX_FRAME)
        self._view = memoryview(self._buffer)
        self._pieces: dict[int, bytearray] = {}
        self._ack = lane_pb2.Ack()
        self._dirty = False
        self._unsent: deque[bytes] = deque()
        self.cuts = 0
        """Passes left so far, over all connections of this slot: set it from the previous consumer's."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> lane_pb2.Frame | None:
        """The next BATCH, END, ERROR or CLOSE frame, or None while none is there; valid until the next call.

        Raises:
            LaneLostError: the peer vanished, after everything it sent has been read.
            ProtocolError: it sent what no producer sends.
        """
        frame, view = self._frame, self._view
        while True:
            size = self._receive_packet()
            if size is None:
                return None
            try:
                frame.ParseFromString(view[:size])  # type: ignore[arg-type]  # upb reads any buffer
            except Exception as error:
                raise ProtocolError(f"{self.name}: a frame that cannot be read: {error}") from error
            kind = frame.kind
            if frame.cut < self.cuts and kind in _OF_A_PASS:
                continue  # of a pass that the loop has left: the producer has taken its slot back already
            if kind == BATCH:
                ring = self.rings.get(frame.ring)
                if ring is None or frame.slot >= ring.slots or frame.nbytes > ring.slot_bytes:
                    raise ProtocolError(
                        f"{self.name}: a batch of {frame.nbytes} bytes in no ring slot that was announced"
                    )
                if frame.structure not in self.structures:
                    raise ProtocolError(f"{self.name}: a batch of structure {frame.structure}, never announced")
                return frame
            if kind == RING:
                self._open_ring(frame)
            elif kind == STRUCTURE:
                self._learn_structure(frame)
            elif kind in (END, ERROR, CLOSE):
                return frame
            else:
                raise ProtocolError(f"{self.name}: a frame of unknown kind {kind}")

    def _receive_packet(self) -> int | None:
        if self.closed:
            raise LaneClosedError(f"{self.name}: the lane is closed")
        for attempt in (1, 2):
            try:
                size = self._sock.recv_into(self._buffer, MAX_FRAME, socket.MSG_TRUNC)
                break
            except BlockingIOError:
                return None
            except ConnectionResetError as error:
                # A killed peer shows as this once, before its last frames: read on until the end of file.
                if attempt == 2:
                    raise LaneLostError(f"{self.name}: the peer vanished") from error
        if size == 0:
            raise LaneLostError(f"{self.name}: the peer vanished")
        if size > MAX_FRAME:
            raise ProtocolError(f"{self.name}: a frame of {size} bytes, above the limit of {MAX_FRAME}")
        return size

    def _open_ring(self, frame: lane_pb2.Frame) -> None:
        if len(self.rings) >= MAX_RINGS:
            # Outgrown rings are small next to the newest; forgetting one only drops this end's reference.
            del self.rings[min(self.rings)]
        ring_id, slot_bytes, slots = frame.ring, frame.slot_bytes, frame.slots
        # The descriptor's packet was sent right behind, so it is there or about to be.
        self._sock.setblocking(True)
        self._sock.settimeout(10.0)
        try:
            _, fds, _, _ = socket.recv_fds(self._sock, 1, 4)
        except OSError as error:
            raise LaneLostError(f"{self.name}: the ring's descriptor did not come: {error}") from error
        finally:
            self._sock.setblocking(False)
        if len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"{self.name}: a ring was announced with {len(fds)} descriptors instead of one")
        try:
            ring = Ring.open(fds[0], slot_bytes, slots)
        except BaseException:
            os.close(fds[0])
            raise
        ring.close_fd()
        self.rings[ring_id] = ring

    def _learn_structure(self, frame: lane_pb2.Frame) -> None:
        if frame.size > MAX_STRUCTURE:
            raise ProtocolError(f"{self.name}: a structure of {frame.size} bytes, above the limit of {MAX_STRUCTURE}")
        pieces = self._pieces.setdefault(frame.structure, bytearray())
        pieces += frame.inline
        if len(pieces) >= frame.size:
            self.structures.pop(frame.structure, None)
            self.structures[frame.structure] = bytes(self._pieces.pop(frame.structure))
            if len(self.structures) > KNOWN_STRUCTURES:
                del self.structures[next(iter(self.structures))]

    # ---- acks

    def delivered(self, total: int) -> None:
        """The training loop was handed everything up to `total`. Sent with the next flush."""
        self._ack.delivered = total
        self._dirty = True

    def release(self, slots: Iterable[int]) -> None:
        """Ring slots whose last view has died: ring, slot, ring, slot ... Sent with the next flush."""
        self._ack.released.extend(slots)
        self._dirty = True

    def open_epochs(self, epoch: int) -> None:
        """Passes up to `epoch` may be opened."""
        self._ack.open_epochs = epoch
        self._dirty = True

    def abandon(self, epoch: int) -> None:
        """The loop left this pass. Goes out at once, behind all earlier acks."""
        self.cuts += 1
        self._ack.abandon_epoch = epoch + 1
        self._dirty = True
        self.flush()

    def want(self, pairs: Iterable[int]) -> None:
        """Snapshots that will be asked for: step, total, step, total ..."""
        self._ack.wanted.extend(pairs)
        self._dirty = True

    def flush(self) -> bool:
        """Send the acks gathered so far; never blocks. False if some wait for room in the socket."""
        if self._dirty:
            self._unsent.append(self._ack.SerializeToString())
            self._ack.Clear()
            self._dirty = False
        unsent = self._unsent
        while unsent:
            try:
                self._sock.send(unsent[0])
            except BlockingIOError:
                return False
            except OSError:
                unsent.clear()  # the peer is gone; receive() says so after its last frames
                return True
            unsent.popleft()
        return True

    def close(self, *, say_so: bool = True) -> None:
        """Leave. Rings stay mapped while views of them live."""
        if self.closed:
            return
        self.closed = True
        if say_so:
            self._ack.close = True
            self._dirty = True
            with contextlib.suppress(OSError):
                self.flush()
        self._sock.close()
        self.rings.clear()
        self._view.release()


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
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = array.array("i", data)
    if uid not in (0, os.getuid()):
        raise ProtocolError(f"the peer of a Unix socket runs as user {uid}, not as {os.getuid()}")
    return pid
