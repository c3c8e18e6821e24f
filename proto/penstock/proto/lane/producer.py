"""Producer: the end of a lane that owns the rings. A runner has one, and a receiver has one for each of its lanes.

A ring entry is in one of four states. Only this module changes the state:

    free ── reserve ──> reserved ── publish ──> kept ── Ack.delivered ──> lent ── Ack.released ──> free
                            └─ return_unused ─> free       └─ Ack.abandon_epoch, Hello.abandons ──> free

A *kept* batch is not delivered yet, and sent again to a consumer that reconnects. A *lent* one belongs to the loop,
which may have written into it, and is never sent again; its entry is free when the consumer releases it, or reconnects
without naming it in Hello.held. Ring ids start at a random number, so that another producer's ring is never mistaken
for one of this producer."""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from penstock.proto.batch.digest import DigestCover
from penstock.proto.errors import BatchTooLargeError, ProtocolError, malformed
from penstock.proto.lane.frame_log import FrameLog
from penstock.proto.lane.frames import (
    CLOSE,
    END,
    ERROR,
    HEAD,
    KNOWN_BYTES,
    KNOWN_STRUCTURES,
    LONG_SHAPES,
    LOST,
    MAX_FRAME,
    RING,
    Ack,
    Frame,
    forget_oldest,
    framed,
    framed_batch,
    read_ack,
    read_frame,
    structure_frames,
    unread_break,
)
from penstock.proto.lane.outbox import Outbox
from penstock.proto.lane.ring import BOX_BYTES, Ring, RingBudget, entries_for, grown
from penstock.proto.state.epoch_labels import MOST_LABELS, put_label
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.runtime.process.forks import silence

_log = logging.getLogger(__name__)

GROUPS = 4
"""Smallest number of packets for the batches of a full ring, so that some are filled while others are read."""
CROWD = 1024
"""Largest number of frames that are queued for a consumer that does not read."""
MOST_WANTED = 4096
"""Largest number of requested snapshots that the runner has not taken yet."""
MOST_ABANDONED = 1 << 16
"""Largest number of abandoned epochs that the runner, which may be in user code, has not noticed yet."""
MOST_ABANDONS = (1 << 32) - 1
_HANDED_OVER = (
    *("open_epochs", "delivered", "closed", "abandons", "numbered", "rings_changed", "wanted", "labels"),
    *("_sent_total", "_met", "_next_ring", "_current", "_group", "_free", "_lent", "known_structures", "_announced"),
)
_RESERVED = 1 << 64
"""Batch number of an entry that is being filled, above any real one, so that it never counts as delivered."""


def check_size(nbytes: int, most: int) -> None:
    if nbytes > most:
        raise BatchTooLargeError(
            f"a batch must have <= max_batch_bytes={most} bytes, got {nbytes}: raise PENSTOCK_MAX_BATCH_BYTES"
        )


@dataclass(slots=True)
class FreeEntry:
    ring_id: int
    entry: int
    ring: Ring

    @property
    def offset(self) -> int:
        return self.entry * self.ring.entry_bytes

    @property
    def view(self) -> memoryview:
        start = self.entry * self.ring.entry_bytes
        return self.ring.view[start : start + self.ring.entry_bytes]


@dataclass(slots=True)
class _Kept:
    total: int
    epoch: int
    message: bytes
    reserved: FreeEntry | None
    structure: int
    number: int
    """Number in the log; 0 without a log."""
    last: bool = False
    """True for an ERROR frame, the last one, which is kept even if its epoch is abandoned."""


class Producer:
    """End of a lane that owns the rings. It serves its consumers one after another, all in the thread of its owner.

    `ring_bytes`: size above which a ring gets fewer entries; `budget`: limit on all rings of the process together;
    `log`: gets each frame that is kept, for a process that serves a new consumer first."""

    def __init__(
        self,
        max_batch_bytes: int,
        ring_bytes: int = BOX_BYTES,
        budget: RingBudget | None = None,
        log: FrameLog | None = None,
    ) -> None:
        self._create_ring = Ring.create if budget is None else budget.create
        self.max_batch_bytes = max_batch_bytes
        self.ring_bytes = ring_bytes
        self.open_epochs = 0
        """Last epoch (from 0) that the runner may begin."""
        self.labels: dict[int, int] = {}
        self.abandoned: deque[int] = deque()
        """Epochs that the loop has abandoned. The runner empties this list, and continues after the last of them."""
        self.wanted: dict[int, list[int]] = {}
        """Batch number, counted over the run -> steps of the box for which a snapshot after the batch is requested."""
        self.delivered = 0
        """Last batch that the training loop got, counted over the run."""
        self.closed = False
        """True once the consumer has closed the lane on purpose."""
        self.abandons = 0
        """Epochs abandoned so far. Each frame has this number, by which the consumer recognises abandoned ones."""
        self.numbered = 0
        """Structures that the runner has numbered so far, from 1."""
        self.on_ack: Callable[[Ack], None] | None = None
        self.rings_changed = False
        """True if a ring was started or dropped. Who tells the process that reads the log sets it to False."""
        self._frame_log = log
        self._sent_total = 0
        self._sock: socket.socket | None = None
        self._met = False
        self.rings: dict[int, Ring] = {}
        self._next_ring = 1 + secrets.randbits(31)
        self._current = 0
        self._group = 1  # largest number of frames in one packet
        self._free: list[int] = []
        self._lent: dict[int, dict[int, int]] = {}  # ring -> entry -> total, for all entries not free
        self._kept: deque[_Kept] = deque()
        self._unsent = Outbox()
        self.known_structures: dict[int, bytes] = {}
        self._announced: dict[int, bytes] = {}
        self._buffer = bytearray(MAX_FRAME)
        self._view = memoryview(self._buffer)

    # ---- the consumer

    @property
    def attached(self) -> bool:
        return self._sock is not None

    def fileno(self) -> int:
        """Descriptor of the consumer's socket, to poll; -1 if none is attached."""
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def blocked(self) -> bool:
        """True if `flush` could not send all frames. Then poll the socket for writing too, and call `flush` again."""
        return len(self._unsent) > 0

    @property
    def crowded(self) -> bool:
        """True if more than CROWD frames wait. A caller that forwards frames must then stop."""
        return len(self._unsent) > CROWD

    def attach(self, sock: socket.socket, hello: lane_pb2.Hello, served: int = 0, rings: Collection[int] = ()) -> None:
        """Attach a new consumer in place of the previous one, and send it the undelivered batches that are in the ring.

        `served`, `rings`: what another process has sent it already: frames of the log before this number, and rings. A
        consumer that requests delivered batches, or counts fewer abandoned epochs, gets an ERROR frame and is not
        attached. Raises ProtocolError if `hello` requests too many snapshots."""
        self.detach()
        sock.setblocking(False)
        wanted = max(1, hello.next_total)
        if wanted <= self.delivered or hello.abandons < self.abandons:
            where = f"after {hello.abandons} abandoned epochs, but this worker is at {self.delivered + 1}"
            self._refuse(sock, f"the job requests batch {wanted} {where} after {self.abandons}. Start the job anew")
            return
        self.closed = False
        self._sock = sock
        if hello.abandons > self.abandons:
            self._catch_up(hello)
        self._met = True
        self._deliver(wanted - 1)
        held = {(entry.ring, entry.entry) for entry in hello.held}
        for ring_id, entry in [
            (ring_id, entry)
            for ring_id, lent in self._lent.items()
            for entry, total in lent.items()
            if total <= self.delivered and (ring_id, entry) not in held
        ]:
            self._give_back(ring_id, entry)
        # Without `abandon_epoch`: `abandons` has the same information.
        for known in hello.labels[-MOST_LABELS:]:
            put_label(self.labels, known.epoch, known.label)
        self._apply(Ack(hello.delivered, hello.open_epochs, wanted=hello.wanted))
        self._announced.clear()
        for ring_id in self.rings:
            if ring_id not in rings:
                self._announce_ring(ring_id)
        for kept in self._kept:
            if kept.number >= served:
                if kept.reserved is not None and kept.structure not in self._announced:
                    self._announce_structure(kept.structure)
                self._unsent.add(kept.message)
        self.flush()

    def forked(self) -> None:
        """Cut the lane off in a process that user code has forked. The rings' memory becomes private there."""
        for ring in self.rings.values():
            ring.forked()
        silence(self.fileno())
        self.detach()

    def detach(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # the slot's process may hold it too (keep_watching)
            self._sock.close()
            self._sock = None
        self._unsent.clear()

    def take_acks(self) -> None:
        """Apply the consumer's acks, without blocking. Detach a consumer that is gone or sends invalid acks."""
        tries = 2
        while (sock := self._sock) is not None:
            try:
                size = sock.recv_into(self._buffer, MAX_FRAME, socket.MSG_TRUNC)
            except BlockingIOError:
                return
            except OSError:
                tries -= 1
                if tries:
                    continue  # a killed peer causes ECONNRESET once, before its last acks
                size = 0
            if not size:
                self.detach()
                return
            try:
                if size > MAX_FRAME:
                    raise malformed(f"an acknowledgement must have at most {MAX_FRAME} bytes, got {size}")
                ack = read_ack(self._view, 0, size)
                if ack.delivered > max(self.delivered, self._sent_total):
                    raise malformed(f"batches up to {self._sent_total} were sent, got an ack of {ack.delivered}")
                self._apply(ack)
            except ProtocolError as error:
                # Only the consumer failed: keep the batches for the next one.
                # the text alone: a record would keep the error, and with its frames the socket
                _log.warning("the connection of a consumer that sent an invalid ack was closed: %s", str(error))
                self.detach()
                return
            if self.on_ack is not None:
                self.on_ack(ack)

    def flush(self) -> None:
        if self._sock is None:
            self._unsent.clear()
            return
        try:
            self._unsent.flush(self._sock)
        except OSError as error:
            if error.errno in LOST:
                return  # its last acks may still be readable; take_acks sees the end of file after them
            # For example no buffers, or too many descriptors in flight. Frames are lost, so close the lane: the next
            # one sends everything again.
            _log.warning("a frame could not be sent to a consumer of batches, and its connection was closed: %s", error)
            self.detach()

    # ---- batches

    def reserve(self, nbytes: int, dims: int = 0) -> FreeEntry | None:
        """Return a free entry for a batch with `dims` dimensions in all; None if none is free. A batch larger than an
        entry starts a ring with larger entries. Publish or return the entry before the next `reserve`. Raises
        BatchTooLargeError, OSError if memory is short."""
        if dims > LONG_SHAPES:
            nbytes += 8 * dims
        ring = self.rings.get(self._current)
        if ring is None or nbytes > ring.entry_bytes:
            check_size(nbytes, self.max_batch_bytes)
            ring = self._start_ring(nbytes, 0 if ring is None else ring.entry_bytes)
        return self.reserve_current()

    def reserve_current(self) -> FreeEntry | None:
        """Return a free entry of the current ring, perhaps one of several, for a batch of a size not yet known."""
        ring = self.rings.get(self._current)
        if ring is None or not self._free:
            return None
        entry = self._free.pop()  # the last one released: most likely still in the cache
        self._lent[self._current][entry] = _RESERVED
        return FreeEntry(self._current, entry, ring)

    def is_current(self, reserved: FreeEntry) -> bool:
        """True if an entry belongs to the current ring. One of an older ring must not be published."""
        return reserved.ring_id == self._current

    @property
    def free_entries(self) -> int:
        return len(self._free)

    @property
    def ring_entries(self) -> int:
        ring = self.rings.get(self._current)
        return 0 if ring is None else ring.entries

    @property
    def entry_bytes(self) -> int:
        ring = self.rings.get(self._current)
        return 0 if ring is None else ring.entry_bytes

    def knows_structure(self, structure: int) -> bool:
        return structure in self.known_structures

    def know_structure(self, structure: int, data: bytes) -> None:
        """Register an encoded structure before each `publish` with it. At twice KNOWN_STRUCTURES or KNOWN_BYTES the
        oldest unused ones are dropped until half is left. Raises ProtocolError for another one of this id."""
        known = self.known_structures
        if structure not in known and (
            len(known) >= 2 * KNOWN_STRUCTURES or sum(map(len, known.values())) > 2 * KNOWN_BYTES
        ):
            needed = {kept.structure for kept in self._kept} | self._announced.keys()
            held = sum(map(len, known.values()))
            for old in [old for old in known if old not in needed]:
                if len(known) <= KNOWN_STRUCTURES and held <= KNOWN_BYTES:
                    break
                held -= len(known.pop(old))
        if known.setdefault(structure, data) != data:
            raise malformed(f"batch structure {structure} must have the same contents each time")

    def publish(
        self,
        reserved: FreeEntry,
        total: int,
        epoch: int,
        structure: int,
        nbytes: int,
        dims: bytes,
        digest: int,
        more: bool = False,
        cover: DigestCover = DigestCover.SAMPLE,
        counts: bytes = b"",
    ) -> None:
        """Send the batch in the entry `reserved`, and keep it until it is delivered.

        Args:
            total: number of the slot's batch, counted over the run.
            dims: packed dims of its tensors (frames.pack_shapes).
            more: True if another `publish` or a `flush` follows at once, so that the batch may share a packet.
            counts: encoded counts that the batch has changed (penstock.proto.state.counts).
        """
        count = len(dims) >> 3
        if count > LONG_SHAPES:
            assert nbytes + len(dims) <= reserved.ring.entry_bytes, "reserve() was called without dims"
            start = reserved.offset + nbytes
            reserved.ring.map[start : start + len(dims)] = dims
            dims = b""
        else:
            count = 0
        ring, entry, numbers = reserved.ring_id, reserved.entry, (self.abandons, count, total, epoch, nbytes, digest)
        message = framed_batch(cover, ring, entry, structure, *numbers, dims, counts)
        self._keep_and_send(reserved, total, epoch, structure, message, more)

    def forward(self, reserved: FreeEntry, frame: Frame, more: bool = False) -> None:
        """Send another producer's BATCH frame. `reserved`: entry with the uncompressed batch, instead of its own."""
        _, _, flags, _, _, structure, abandons, size, total, epoch, nbytes, digest, _, dims = frame
        message = framed_batch(
            flags, reserved.ring_id, reserved.entry, structure, abandons, size, total, epoch, nbytes, digest, dims
        )
        self._keep_and_send(reserved, total, epoch, structure, message, more)

    def _keep_and_send(
        self, reserved: FreeEntry, total: int, epoch: int, structure: int, message: bytes, more: bool
    ) -> None:
        if structure not in self._announced:
            self._announce_structure(structure)
        self._lent[reserved.ring_id][reserved.entry] = total
        self._sent_total = max(self._sent_total, total)
        self._kept.append(_Kept(total, epoch, message, reserved, structure, self._log_frame(message)))
        self._send(message, more)

    def return_unused(self, reserved: FreeEntry) -> None:
        self._give_back(reserved.ring_id, reserved.entry)

    def end(self, epoch: int, total: int) -> None:
        self.forward_end(Frame(END, epoch=epoch, total=total, abandons=self.abandons))

    def fail(self, epoch: int, total: int, error: records_pb2.ErrorDetail) -> None:
        """Send the error with which the input has failed after batch `total`, as the last frame."""
        detail = records_pb2.ErrorDetail(  # below MAX_FRAME; of a long traceback the end is kept
            name=error.name[:256],
            message=error.message.encode()[:16384].decode(errors="ignore"),
            remote_traceback=error.remote_traceback.encode()[-32768:].decode(errors="ignore"),
        )
        rest = detail.SerializeToString()
        self.forward_end(Frame(ERROR, epoch=epoch, total=total, abandons=self.abandons, rest=rest))

    def forward_end(self, frame: Frame) -> None:
        """Send an END, ERROR or CLOSE frame. END and ERROR are kept until a later batch is delivered."""
        message = framed(frame.encode())
        if frame.kind != CLOSE:
            number = self._log_frame(message)
            self._kept.append(_Kept(frame.total, frame.epoch, message, None, 0, number, frame.kind == ERROR))
        self._send(message)

    def close(self, timeout: float = 1.0, *, say_so: bool = True) -> None:
        """Close the lane for good. `say_so`: tell the consumer; wait at most `timeout` s until all frames are sent."""
        if self._sock is not None and say_so:
            self.forward_end(Frame(CLOSE))
            deadline = time.monotonic() + timeout
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            while self._unsent and poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                self.flush()
        self.detach()
        self._kept.clear()
        self._lent.clear()
        self._free.clear()
        self._current = 0
        for ring in self.rings.values():
            ring.close_fd()
        self.rings.clear()

    # ---- another process of the owner

    def hand_over(self) -> tuple[dict[str, Any], list[int]]:
        """Return values and descriptors for `take_over`. Reserved entries become free, and this object useless."""
        fds = [] if self._sock is None else [self._sock.fileno()]
        fds += [ring.fd for ring in self.rings.values()]
        for ring_id, lent in self._lent.items():
            for entry in [entry for entry, total in lent.items() if total == _RESERVED]:
                del lent[entry]
                if ring_id == self._current:
                    self._free.append(entry)
        numbers = {ring.fd: ring_id for ring_id, ring in self.rings.items()}
        return {
            "attached": self._sock is not None,
            "rings": [[ring_id, ring.entry_bytes, ring.entries] for ring_id, ring in self.rings.items()],
            "kept": [
                [
                    *(kept.total, kept.epoch, kept.message, kept.structure, kept.number, kept.last),
                    *((0, 0) if kept.reserved is None else (kept.reserved.ring_id, kept.reserved.entry)),
                ]
                for kept in self._kept
            ],
            "unsent": [numbers.get(item, 0) if isinstance(item, int) else item for item in self._unsent],
            "abandoned": list(self.abandoned),
            **{name: getattr(self, name) for name in _HANDED_OVER},
        }, fds

    def take_over(self, record: dict[str, Any], fds: list[int]) -> None:
        """Continue another process's end of a lane, and own `fds`. The rings are not mapped: see `map_rings`."""
        if self._frame_log is not None:
            self._frame_log.resume()
        if self._sock is not None:
            self._sock.close()
        for ring in self.rings.values():
            ring.close_fd()
        rest = iter(fds)
        self._sock = socket.socket(fileno=next(rest)) if record["attached"] else None
        if self._sock is not None:
            self._sock.setblocking(False)
        self.rings = {number: Ring(next(rest), *sizes, mapped=False) for number, *sizes in record["rings"]}
        self._kept.clear()
        for total, epoch, message, structure, number, last, ring_id, entry in record["kept"]:
            reserved = FreeEntry(ring_id, entry, self.rings[ring_id]) if ring_id else None
            self._kept.append(_Kept(total, epoch, message, reserved, structure, number, last))
        self._unsent.clear()
        for item in record["unsent"]:
            if isinstance(item, bytes):
                self._unsent.add(item)
            elif item in self.rings:
                self._unsent.add(self.rings[item].fd)
        self.abandoned = deque(record["abandoned"])
        for name in _HANDED_OVER:
            setattr(self, name, record[name])

    def begin_anew(self, sent_total: int) -> None:
        """Forget all that was made: the lane's process was killed, because the loop has abandoned its epoch. The
        connection stays, with unread acks; batches that the loop holds stay valid. `sent_total`: last batch sent."""
        if self._frame_log is not None:
            self._frame_log.resume()
        sock, self._sock = self._sock, None
        self.close()
        self._sock = sock
        self.known_structures.clear()
        self._announced.clear()
        self.wanted.clear()
        self._next_ring = 1 + secrets.randbits(31)
        self._sent_total = sent_total

    def keep_watching(self, sock: socket.socket | None) -> None:
        """Keep a descriptor of the consumer's socket, which another process has now, for `has_unread_break` only."""
        self.release_socket()
        self._sock = sock

    def has_unread_break(self) -> bool:
        """True if the process that has the lane has not read that the loop has abandoned an epoch."""
        return self._sock is not None and unread_break(self._sock)

    def map_rings(self) -> None:
        for ring in self.rings.values():
            ring.attach()

    def release_socket(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    # ---- inside

    def _log_frame(self, message: bytes) -> int:
        return 0 if self._frame_log is None else self._frame_log.add(message)

    def _send(self, message: bytes, more: bool = False) -> None:
        if self._sock is None:
            return
        self._unsent.add(message)
        if not more or len(self._unsent) >= self._group:
            self.flush()

    def _start_ring(self, nbytes: int, previous: int) -> Ring:
        size = grown(nbytes, previous, self.max_batch_bytes)
        ring = self._create_ring(size, entries_for(size, self.ring_bytes))
        old = self._current
        self._current = self._next_ring
        self._group = max(1, ring.entries // GROUPS)
        self._next_ring += 1
        self.rings[self._current] = ring
        self._free = list(range(ring.entries))
        self._lent[self._current] = {}
        self.rings_changed = True
        self._retire(old)
        if self._sock is not None:
            self._announce_ring(self._current)
            self.flush()
        return ring

    def _announce_ring(self, ring_id: int) -> None:
        ring = self.rings[ring_id]
        frame = Frame(RING, ring=ring_id, entry=ring.entries, nbytes=ring.entry_bytes)
        self._unsent.add(framed(frame.encode()))
        self._unsent.add(ring.fd)

    def _announce_structure(self, structure: int) -> None:
        data = self.known_structures[structure]
        self._announced[structure] = data
        forget_oldest(self._announced)
        for message in structure_frames(structure, data):
            self._unsent.add(message)

    def _refuse(self, sock: socket.socket, why: str) -> None:
        _log.warning("a connection to read batches was refused: %s", why)
        error = records_pb2.ErrorDetail(name=ProtocolError.__name__, message=why)
        try:
            sock.send(framed(Frame(ERROR, rest=error.SerializeToString()).encode()))
        except OSError:
            pass
        sock.close()

    def _catch_up(self, hello: lane_pb2.Hello) -> None:
        """Take over the higher number of abandoned epochs from a consumer's Hello.

        Usually the lane broke before an ack with `abandon_epoch` arrived: all kept frames belong to an abandoned epoch
        or a later one begun already, and are dropped. The other case is the first consumer of a new runner that began
        after the newest abandoned epoch. The loop needs its frames: correct their number."""
        left = hello.abandon_epoch - 1
        fresh = not self._met and all(kept.epoch > left for kept in self._kept)
        self.abandons = hello.abandons
        if left >= 0:
            self.abandoned.append(left)
        if not fresh:
            self._drop_kept()
            return
        for kept in self._kept:
            frame = read_frame(memoryview(kept.message), HEAD.size, len(kept.message))
            kept.message = framed(frame._replace(abandons=self.abandons).encode())
            kept.number = self._log_frame(kept.message)

    def _apply(self, ack: Ack) -> None:
        if ack.delivered > self.delivered:
            self._deliver(ack.delivered)
        released = ack.released
        for index in range(0, len(released) - 1, 2):
            self._release(released[index], released[index + 1])
        if ack.labelled:
            put_label(self.labels, ack.labelled - 1, ack.label)
        if ack.open_epochs > self.open_epochs:
            self.open_epochs = ack.open_epochs
        if ack.abandon_epoch:
            if self.abandons >= MOST_ABANDONS or len(self.abandoned) >= MOST_ABANDONED:
                raise malformed(f"at most {MOST_ABANDONED} epochs may be abandoned before the runner has seen it")
            self.abandons += 1
            self._drop_kept()
            self.abandoned.append(ack.abandon_epoch - 1)
        wanted = ack.wanted
        if wanted:
            for total in [total for total in self.wanted if total <= self.delivered]:
                del self.wanted[total]  # a loader whose states come from elsewhere answers none
            under_way = sum(map(len, self.wanted.values())) + len(wanted) // 2
            if under_way > MOST_WANTED:
                raise malformed(f"a consumer may request at most {MOST_WANTED} snapshots at a time, got {under_way}")
        for index in range(0, len(wanted) - 1, 2):
            steps = self.wanted.setdefault(wanted[index + 1], [])
            if wanted[index] not in steps:
                steps.append(wanted[index])
        if ack.close:
            self.closed = True

    def _deliver(self, total: int) -> None:
        """Drop the frames of delivered batches, up to batch `total`. The loop releases their entries later."""
        self.delivered = max(self.delivered, total)
        kept = self._kept
        while kept and kept[0].total <= self.delivered:
            if kept[0].reserved is None and kept[0].total == self.delivered:
                return  # an END or ERROR right after the last delivered batch
            kept.popleft()

    def _drop_kept(self) -> None:
        dropped, self._kept = self._kept, deque(kept for kept in self._kept if kept.last)
        for kept in dropped:
            if kept.reserved is not None:
                self._give_back(kept.reserved.ring_id, kept.reserved.entry)

    def _release(self, ring_id: int, entry: int) -> None:
        total = self._lent.get(ring_id, {}).get(entry)
        if total is None:
            return  # repeated, or of a ring that this producer does not have (any more)
        if total > self.delivered:
            raise malformed(f"only delivered batches may be released, at most batch {self.delivered}, got {total}")
        self._give_back(ring_id, entry)

    def _give_back(self, ring_id: int, entry: int) -> None:
        del self._lent[ring_id][entry]
        if ring_id == self._current:
            self._free.append(entry)
        else:
            self._retire(ring_id)

    def _retire(self, ring_id: int) -> None:
        """Drop a ring that a larger ring has replaced, once none of its entries is in use."""
        if ring_id in self.rings and ring_id != self._current and not self._lent[ring_id]:
            self.rings.pop(ring_id).close_fd()
            del self._lent[ring_id]
            self.rings_changed = True
