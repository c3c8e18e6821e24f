"""Consumer: the reading end of a lane. The training loop has one for each lane. For a loop on another host, each end of
the TCP connection has one: the loop reads the receiver's ring, and the sender reads the runner's ring.

The descriptor of a ring comes in the packet after the RING frame. The producer may be in user code for minutes between
the two, so the consumer never blocks for the second, and only records that it must hold the descriptor.

Acks (what was delivered, which ring entries are free again) are collected in one message until `flush`, even while an
earlier one waits for the socket, so a producer that does not read costs no memory here. Only the abandonment of an
epoch ends the message at once, because its order among the acks matters. The sender, which forwards another process's
acks, limits their number by `backlog`."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Iterable
from typing import Any

from penstock.proto.errors import LaneClosedError, LaneLostError, PenstockError, ProtocolError, malformed
from penstock.proto.lane.frames import (
    BATCH,
    CLOSE,
    END,
    ERROR,
    HEAD,
    LOST,
    MAX_PACKET,
    MAX_RINGS,
    MAX_UNUSED,
    RING,
    STRUCTURE,
    Ack,
    Frame,
    StructurePieces,
    forget_oldest,
    read_frame,
)
from penstock.proto.lane.ring import Ring
from penstock.runtime.process.forks import silence

_log = logging.getLogger(__name__)
_length = HEAD.unpack_from
_ANNOUNCEMENTS = frozenset((RING, STRUCTURE))
_GROUP = 2048
"""Largest number of values of one kind in one ack, far below MAX_FRAME. It is even, because values come in pairs."""


class Consumer:
    """Reading end of a lane: its socket, the rings that are mapped, and the structures announced so far."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        """Name for messages: worker, box and slot of the producer."""
        self.rings: dict[int, Ring] = {}
        """Rings that a frame may still name: that of the newest batch, and newer ones."""
        self.structures: dict[int, bytes] = {}
        self.compiled: dict[int, Any] = {}
        self.closed = False
        self.abandons = 0
        """Epochs abandoned so far, over all connections of this worker slot."""
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray(MAX_PACKET)
        self._view = memoryview(self._buffer)
        self._begin = self._at = self._end = 0  # offsets in the buffer: last frame, next frame, end of packet
        self._ring_id = 0  # of the last batch
        self._ring: Ring | None = None
        self._newest = 0
        self._unused = 0  # frames since the last batch, or the end of an epoch
        self._reset = False  # the peer was killed; its earlier data is still to be read
        self._coming: Frame | None = None  # a RING whose descriptor the next packet holds
        self._pieces = StructurePieces()
        # Content of the next ack.
        self._delivered = self._open_epochs = self._abandon = self._labelled = self._label = 0
        self._released: list[int] = []
        self._wanted: list[int] = []
        self._leaving = False
        self._dirty = False
        self._unsent: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def forked(self) -> None:
        silence(self._sock.fileno())
        self.closed = True

    # ---- frames

    def receive(self) -> Frame | None:
        """Return the next BATCH, END, ERROR or CLOSE frame; None if none has arrived. After a reconnect the producer
        sends END and ERROR again, until a later batch is delivered.

        Raises LaneClosedError if this process has closed the lane, LaneLostError if the peer is gone and its frames are
        read, ProtocolError for invalid frames."""
        while True:
            frame = self.receive_any()
            if frame is None or frame.kind not in _ANNOUNCEMENTS:
                return frame

    def receive_any(self) -> Frame | None:
        """Return the next frame of any kind, to forward `framed`. A RING frame is returned with its descriptor."""
        view = self._view
        while self._coming is None:
            if self._unused > MAX_UNUSED:
                raise self._malformed(f"at most {MAX_UNUSED} frames in a row may come without a batch")
            begin = self._at
            if begin == self._end:
                if not self._receive_packet():
                    return None
                begin = 0
            start = begin + HEAD.size
            stop = start + _length(view, begin)[0] if start <= self._end else start
            if stop > self._end:
                raise self._malformed(f"a packet of {self._end} bytes must hold whole frames, got a part of one")
            try:
                frame = read_frame(view, start, stop)
            except ProtocolError as error:
                raise ProtocolError(f"{self.name}: {error}") from None
            self._begin, self._at = begin, stop
            kind = frame.kind
            if kind == BATCH:
                if frame.abandons < self.abandons:
                    self._unused += 1
                    continue  # belongs to an abandoned epoch: the producer has already taken the entry back
                ring = self._ring if frame.ring == self._ring_id else self._turn_to(frame.ring)
                # `size` is the number of dims after the batch in its entry.
                if ring is None or frame.entry >= ring.entries or frame.nbytes + 8 * frame.size > ring.entry_bytes:
                    raise self._malformed(f"{frame.nbytes} bytes are in no entry {frame.entry} of a ring {frame.ring}")
                if frame.structure not in self.structures:
                    raise self._malformed(f"the structure {frame.structure} of a batch must be announced before it")
                self._unused = 0
                return frame
            if kind == RING:
                self._unused += 1
                self._expect_ring(frame)
            elif kind == STRUCTURE:
                self._unused += 1
                self._learn_structure(frame)
                return frame
            elif kind == END:
                if frame.abandons < self.abandons:
                    self._unused += 1
                    continue
                self._unused = 0
                return frame
            elif kind in (ERROR, CLOSE):
                return frame
            else:
                raise self._malformed(f"a frame must have a known kind, got {kind}")
        return self._take_ring(self._coming)

    def _malformed(self, what: str) -> ProtocolError:
        return malformed(f"{self.name}: {what}")

    @property
    def framed(self) -> memoryview:
        """Last received frame, preceded by its length. Valid until the next frame is received."""
        return self._view[self._begin : self._at]

    @property
    def frame_bytes(self) -> bytes:
        return self._view[self._begin + HEAD.size : self._at].tobytes()

    def _receive_packet(self) -> bool:
        try:
            size = self._sock.recv_into(self._buffer, MAX_PACKET, socket.MSG_TRUNC)
        except BlockingIOError:
            return False
        except OSError as error:
            again = self._after_error(error)
            if again is None:
                return False
            size = again
        self._begin = self._at = self._end = 0
        if not size:
            raise LaneLostError(f"{self.name}: the other end closed the connection")
        if size > MAX_PACKET:
            raise self._malformed(f"a packet must have at most {MAX_PACKET} bytes, got {size}")
        self._end = size
        return True

    def _after_error(self, error: OSError) -> int | None:
        """Receive once more after an error, because a killed peer causes one ECONNRESET before its last frames."""
        if self.closed:
            raise self._was_closed() from None
        try:
            return self._sock.recv_into(self._buffer, MAX_PACKET, socket.MSG_TRUNC)
        except BlockingIOError:
            return None
        except OSError:
            raise LaneLostError(f"{self.name}: the connection was lost: {error}") from error

    def _was_closed(self) -> LaneClosedError:
        return LaneClosedError(f"{self.name}: this process has closed the lane. Do not iterate after close()")

    def _turn_to(self, ring_id: int) -> Ring | None:
        """Make the ring with this id the current one, if known, and drop older ones, to which no producer returns."""
        ring = self.rings.get(ring_id)
        if ring is not None:
            self._ring_id, self._ring = ring_id, ring
            for older in [known for known in self.rings if known < ring_id]:
                del self.rings[older]
        return ring

    def _expect_ring(self, frame: Frame) -> None:
        if frame.ring <= self._newest or len(self.rings) >= MAX_RINGS:
            raise self._malformed(f"ring {frame.ring} must be above {self._newest}, and one of at most {MAX_RINGS}")
        self._coming = frame

    def _take_ring(self, frame: Frame) -> Frame | None:
        """Map the new ring that `frame` announces, once its descriptor has arrived. Return `frame` then."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 8, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            if self.closed:
                raise self._was_closed() from None
            if isinstance(error, ConnectionResetError) and not self._reset:
                self._reset = True  # occurs once, before the last packets
                return self._take_ring(frame)
            raise LaneLostError(f"{self.name}: the descriptor of a ring did not arrive: {error}") from error
        try:
            if not data:
                raise LaneLostError(f"{self.name}: the other end closed the connection")
            if len(fds) != 1:
                raise self._malformed(f"a ring must come with one file descriptor, got {len(fds)}")
            try:
                ring = Ring.open(fds[0], frame.entry_bytes, frame.entries)
            except PenstockError as error:
                raise type(error)(f"{self.name}: {error.message}") from error
        finally:
            for fd in fds:  # the mapping keeps the memory
                os.close(fd)
        ring.fd = -1
        self._coming = None
        self._newest = frame.ring
        self.rings[frame.ring] = ring
        return frame

    def _learn_structure(self, frame: Frame) -> None:
        try:
            whole = self._pieces.add(frame)
        except ProtocolError as error:
            raise ProtocolError(f"{self.name}: {error}") from None
        if whole is None:
            return
        if self.structures.pop(frame.structure, whole) != whole:
            raise self._malformed(f"batch structure {frame.structure} must have the same contents each time")
        self.structures[frame.structure] = whole
        forget_oldest(self.structures)
        self.compiled = {number: kept for number, kept in self.compiled.items() if number in self.structures}

    # ---- acks

    def delivered(self, total: int) -> None:
        """Record that all batches up to number `total`, counted over the run, are delivered."""
        self._delivered = total
        self._dirty = True

    def release(self, entries: Iterable[int]) -> None:
        """`entries`: ring id, entry, ring id, entry ... of delivered batches whose views are gone. Those of batches
        abandoned before delivery the producer has taken back already."""
        self._released += entries
        self._dirty = True

    def open_epochs(self, epoch: int) -> None:
        self._open_epochs = epoch
        self._dirty = True

    def label_epoch(self, epoch: int, label: int) -> None:
        """Give a label to an epoch that is not open yet: call this before `open_epochs`, without a flush in between."""
        self._labelled, self._label = epoch + 1, label
        self._dirty = True

    def abandon(self, epoch: int, total: int) -> None:
        """Tell the producer, after all earlier acks, that the loop has abandoned this epoch after the slot's batch
        `total`: again, because the process that has read an earlier ack may be killed."""
        self.abandons += 1
        self._abandon, self._delivered = epoch + 1, total
        self._queue_ack()
        self.flush()

    def want(self, pairs: Iterable[int]) -> None:
        """Request snapshots of the loader. `pairs`: step, number of the slot's last batch up to it, step, number ..."""
        self._wanted += pairs
        self._dirty = True

    @property
    def backlog(self) -> int:
        """Messages that wait for the socket, plus values in the message that is being collected."""
        return len(self._unsent) + len(self._released) + len(self._wanted)

    def flush(self) -> bool:
        """Send the acks, without blocking. False if some do not fit; True on a lost lane: `receive` then raises."""
        unsent = self._unsent
        if self.closed:
            return True
        while True:
            while unsent:
                try:
                    self._sock.send(unsent[0])
                except BlockingIOError:
                    return False
                except OSError as error:
                    # If the peer is gone, receive() raises after its last frames. After any other error acks are lost,
                    # and with them free entries: close the lane, because the next lane sends everything again.
                    if error.errno not in LOST:
                        _log.warning("%s: an ack could not be sent, so the lane is opened again: %s", self.name, error)
                        self._sock.shutdown(socket.SHUT_RDWR)
                    unsent.clear()
                    self._begin_ack()
                    return True
                unsent.popleft()
            if not self._dirty:
                return True
            self._queue_ack()

    def _queue_ack(self) -> None:
        unsent, released, wanted = self._unsent, self._released, self._wanted
        while len(released) > _GROUP or len(wanted) > _GROUP:
            first = Ack(self._delivered, released=released[:_GROUP], wanted=wanted[:_GROUP])
            unsent.append(first.encode())
            del released[:_GROUP]
            del wanted[:_GROUP]
        message = Ack(
            *(self._delivered, self._open_epochs, self._abandon, released, wanted, self._leaving),
            *(self._labelled, self._label),
        ).encode()
        if message:
            unsent.append(message)
        self._begin_ack()

    def _begin_ack(self) -> None:
        self._delivered = self._open_epochs = self._abandon = self._labelled = self._label = 0
        self._released.clear()
        self._wanted.clear()
        self._leaving = self._dirty = False

    def close(self, *, say_so: bool = True) -> None:
        """`say_so`: tell the producer that this is on purpose. A ring stays mapped while views of its batches exist."""
        if self.closed:
            return
        if say_so:
            self._leaving = True
            self._dirty = True
            self.flush()
        self.closed = True
        self._sock.close()
        self._ring = None
        self.rings.clear()
