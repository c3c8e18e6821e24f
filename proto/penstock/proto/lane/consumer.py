"""The end of a lane that reads: the training loop's, and towards another host the sender's.

The hot path is one `recv_into` for a packet of frames, and for each of them one `unpack` and the checks that keep a
wrong peer from steering reads outside its ring; everything rarer stands below it. Two things are shaped by what a peer
may be doing meanwhile:

A ring's descriptor comes in the packet behind its RING frame. The producer may have had room for the one and not for
the other, and be inside user code for minutes since; so this end never waits for the second packet, it only
remembers that the next one must be it.

Acks gather in one message until `flush`. While an earlier one waits for room they go on gathering, so a producer that
does not read costs no memory here; only an abandon, whose place among the others counts, closes the message at once.
Whoever passes on what another process says (the sender) bounds it by `backlog`.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Iterable
from typing import Any

from penstock.proto.errors import LaneClosedError, LaneLostError, PenstockError, ProtocolError
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

__all__ = ["Consumer"]

_log = logging.getLogger(__name__)
_length = HEAD.unpack_from
_ANNOUNCEMENTS = frozenset((RING, STRUCTURE))
_GROUP = 2048
"""Numbers of one kind in one ack, so that it stays far below MAX_FRAME. Even: they come in pairs."""


class Consumer:
    """The end that reads. Holds the lane's socket, the mapped rings and the structures announced so far.

    Frames are read when the caller wants one, a packet at a time: what has not been read waits in the socket, which is
    as deep as the ring.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        """For messages: which worker, box and slot is at the other end."""
        self.rings: dict[int, Ring] = {}
        """By id, those that a frame may still name: the one of the last batch and newer ones."""
        self.structures: dict[int, bytes] = {}
        self.compiled: dict[int, Any] = {}
        """What the reader has made of `structures`, by id; it goes when a structure is forgotten or announced again."""
        self.closed = False
        self.abandons = 0
        """Passes left so far, over all connections of this slot: set it from the previous consumer's."""
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray(MAX_PACKET)
        self._view = memoryview(self._buffer)
        self._begin = self._at = self._end = 0  # in the buffer: the frame received last, what follows it, and its end
        self._ring_id = 0  # of the last batch
        self._ring: Ring | None = None
        self._newest = 0
        self._unused = 0  # frames since the last batch, or the end of an epoch
        self._reset = False  # the peer was killed; what it had sent is still to be read
        self._coming: Frame | None = None  # a RING whose descriptor the next packet holds
        self._pieces = StructurePieces()
        # What the next ack will say.
        self._delivered = self._open_epochs = self._abandon = 0
        self._released: list[int] = []
        self._wanted: list[int] = []
        self._leaving = False
        self._dirty = False
        self._unsent: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def forked(self) -> None:
        """See penstock.runtime.process.forks."""
        silence(self._sock.fileno())
        self.closed = True

    # ---- frames

    def receive(self) -> Frame | None:
        """The next BATCH, END, ERROR or CLOSE frame, or None while none is there.

        END and ERROR may come again after a reconnect: they are resent until a later batch was delivered.

        Raises:
            LaneLostError: the peer vanished, after everything it sent has been read.
            ProtocolError: it sent what no producer sends.
        """
        while True:
            frame = self.receive_any()
            if frame is None or frame.kind not in _ANNOUNCEMENTS:
                return frame

    def receive_any(self) -> Frame | None:
        """Like `receive`, but RING (once its descriptor is here) and STRUCTURE frames too, for who passes frames on.

        `framed` is the frame as it came.
        """
        view = self._view
        while self._coming is None:
            if self._unused > MAX_UNUSED:
                raise ProtocolError(f"{self.name}: {self._unused} frames without a batch")
            begin = self._at
            if begin == self._end:
                if not self._receive_packet():
                    return None
                begin = 0
            start = begin + HEAD.size
            if start > self._end:
                raise ProtocolError(f"{self.name}: {self._end - begin} bytes of a frame in a packet of {self._end}")
            stop = start + _length(view, begin)[0]
            if stop > self._end:
                raise ProtocolError(f"{self.name}: a frame of {stop - start} bytes in a packet of {self._end}")
            try:
                frame = read_frame(view, start, stop)
            except ProtocolError as error:
                raise ProtocolError(f"{self.name}: {error}") from None
            self._begin, self._at = begin, stop
            kind = frame.kind
            if kind == BATCH:
                if frame.abandons < self.abandons:
                    self._unused += 1
                    continue  # of an epoch that the loop has left: the producer has taken its slot back already
                ring = self._ring if frame.ring == self._ring_id else self._turn_to(frame.ring)
                # `size` is how many dims ride behind the batch in its slot.
                if ring is None or frame.entry >= ring.entries or frame.nbytes + 8 * frame.size > ring.entry_bytes:
                    raise ProtocolError(
                        f"{self.name}: a batch of {frame.nbytes} bytes in no ring entry that was announced"
                    )
                if frame.structure not in self.structures:
                    raise ProtocolError(f"{self.name}: a batch of structure {frame.structure}, never announced")
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
                raise ProtocolError(f"{self.name}: a frame of unknown kind {kind}")
        return self._take_ring(self._coming)

    @property
    def framed(self) -> memoryview:
        """The frame received last as it came, with its length in front; valid until the next call."""
        return self._view[self._begin : self._at]

    @property
    def frame_bytes(self) -> bytes:
        """The frame received last as it came, without that length."""
        return self._view[self._begin + HEAD.size : self._at].tobytes()

    def _receive_packet(self) -> bool:
        """The next packet into the buffer. False while none is there."""
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
            raise LaneLostError(f"{self.name}: the peer vanished")
        if size > MAX_PACKET:
            raise ProtocolError(f"{self.name}: a packet of {size} bytes, above the limit of {MAX_PACKET}")
        self._end = size
        return True

    def _after_error(self, error: OSError) -> int | None:
        """A killed peer shows as ECONNRESET once, before its last frames: read on until the end of file."""
        if self.closed:
            raise LaneClosedError(f"{self.name}: the lane is closed") from None
        try:
            return self._sock.recv_into(self._buffer, MAX_PACKET, socket.MSG_TRUNC)
        except BlockingIOError:
            return None
        except OSError:
            raise LaneLostError(f"{self.name}: the peer vanished: {error}") from error

    def _turn_to(self, ring_id: int) -> Ring | None:
        """A batch in another ring than the last one. Producers never go back to an older ring: let those go."""
        ring = self.rings.get(ring_id)
        if ring is not None:
            self._ring_id, self._ring = ring_id, ring
            for older in [known for known in self.rings if known < ring_id]:
                del self.rings[older]
        return ring

    def _expect_ring(self, frame: Frame) -> None:
        if frame.ring <= self._newest or len(self.rings) >= MAX_RINGS:
            raise ProtocolError(f"{self.name}: ring {frame.ring} after {self._newest}, with {len(self.rings)} in use")
        self._coming = frame

    def _take_ring(self, frame: Frame) -> Frame | None:
        """The ring whose frame came last, once its descriptor is here."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 8, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            if self.closed:
                raise LaneClosedError(f"{self.name}: the lane is closed") from None
            if isinstance(error, ConnectionResetError) and not self._reset:
                self._reset = True  # shows once, before the last packets
                return self._take_ring(frame)
            raise LaneLostError(f"{self.name}: the ring's descriptor did not come: {error}") from error
        try:
            if not data:
                raise LaneLostError(f"{self.name}: the peer vanished before its ring's descriptor came")
            if len(fds) != 1:
                raise ProtocolError(f"{self.name}: a ring was announced with {len(fds)} descriptors instead of one")
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
            raise ProtocolError(f"{self.name}: structure {frame.structure} was announced before as another one")
        self.structures[frame.structure] = whole
        forget_oldest(self.structures)
        self.compiled = {number: kept for number, kept in self.compiled.items() if number in self.structures}

    # ---- acks

    def delivered(self, total: int) -> None:
        """The training loop was handed everything up to `total`. Sent with the next flush."""
        self._delivered = total
        self._dirty = True

    def release(self, entries: Iterable[int]) -> None:
        """Ring slots of delivered batches whose last view has died: ring, slot, ring, slot ... Sent with the next
        flush. Not of batches that an abandon overtook before they were delivered: the producer has those back already.
        """
        self._released += entries
        self._dirty = True

    def open_epochs(self, epoch: int) -> None:
        """Passes up to `epoch` may be opened."""
        self._open_epochs = epoch
        self._dirty = True

    def abandon(self, epoch: int) -> None:
        """The loop left this epoch. Goes out at once, behind all earlier acks."""
        self.abandons += 1
        self._abandon = epoch + 1
        self._seal()
        self.flush()

    def want(self, pairs: Iterable[int]) -> None:
        """Snapshots that will be asked for: step, total, step, total ..."""
        self._wanted += pairs
        self._dirty = True

    @property
    def backlog(self) -> int:
        """Messages, and numbers in the one that gathers, that the producer has not taken yet."""
        return len(self._unsent) + len(self._released) + len(self._wanted)

    def flush(self) -> bool:
        """Send the acks gathered so far; never blocks. False if some wait for room in the socket."""
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
                    # The peer is gone; receive() says so after its last frames. For any other reason an ack is lost
                    # all the same, and with it credits, so the lane is: the next one says everything again.
                    if error.errno not in LOST:
                        _log.warning("%s: an ack could not be sent, the lane is closed: %s", self.name, error)
                        self._sock.shutdown(socket.SHUT_RDWR)
                    unsent.clear()
                    self._begin_ack()
                    return True
                unsent.popleft()
            if not self._dirty:
                return True
            self._seal()

    def _seal(self) -> None:
        """Close the message that acks gather in. Of too many numbers, the first go ahead in messages of their own."""
        unsent, released, wanted = self._unsent, self._released, self._wanted
        while len(released) > _GROUP or len(wanted) > _GROUP:
            first = Ack(self._delivered, released=released[:_GROUP], wanted=wanted[:_GROUP])
            unsent.append(first.encode())
            del released[:_GROUP]
            del wanted[:_GROUP]
        message = Ack(self._delivered, self._open_epochs, self._abandon, released, wanted, self._leaving).encode()
        if message:
            unsent.append(message)
        self._begin_ack()

    def _begin_ack(self) -> None:
        """Nothing is to be said so far."""
        self._delivered = self._open_epochs = self._abandon = 0
        self._released.clear()
        self._wanted.clear()
        self._leaving = self._dirty = False

    def close(self, *, say_so: bool = True) -> None:
        """Leave. Rings stay mapped while views of them live."""
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
