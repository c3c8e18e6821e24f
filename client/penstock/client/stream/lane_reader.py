"""Lane (connection for batches) of one worker slot in the training loop: the consumer, the rings that the consumer
maps, and the ring entries that views still use.

A `SlotLane` belongs to one generation of a slot; a slot begins a new generation when it gets another runner. A lane
survives a broken connection: the Hello of the next connection contains the lane's state. A new generation has a new
lane. Freed views of the old lane then release nothing, because their tokens go to a deque that is not read any more.

Tokens are ints, ring << 16 | entry. Finalizers of views only append them to a deque, because a finalizer may do nothing
else (see penstock.proto.batch.assemble).

**A delivered batch equals the one that the runner made.** Before delivery the batch's bytes are compared with the
digest that the runner computed when it wrote these bytes: all bytes of a batch of up to 64 KiB, a sample of a larger
one, or all bytes with `Appliance(digest="full")`. A difference is a BatchCorruptError. The reader then closes the
connection and fetches the batch again, because the ring at the other end still has it. Only a batch that arrives
damaged CORRUPT_TRIES times in a row is an error in the training loop.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from typing import Any

from penstock.proto.batch.digest import DigestCover, Layouts, region_digest, rows_digest
from penstock.proto.batch.flatten import Assembler, wrap_buffer
from penstock.proto.batch.structure import Structure
from penstock.proto.errors import BatchCorruptError, malformed
from penstock.proto.lane.endpoints import Consumer, dims_of
from penstock.proto.lane.frames import COUNTED, COVER, Frame
from penstock.proto.lane.ring import Ring
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.runtime.process import forks

__all__ = ["CORRUPT_TRIES", "RingView", "SlotLane"]

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
CUT_OFF_S = 2.0
"""Seconds for which a worker's host must be unreachable before the client requests another worker. If only the daemon
is dead, the coordinator reports that within 1.5 s, with a better message."""
CHECK_S = 0.1
"""Seconds between the first failed attempt to reach a worker's host and the second: time for the coordinator to reply,
which shows whether this host's own network works."""
CORRUPT_TRIES = 8
"""Number of times in a row that a batch must arrive damaged to be an error. On a link that damages every second batch,
this happens once in 256 batches, and so ends the run within a second."""
ABANDONED_KEPT = 256
"""Largest number of abandoned epochs listed in a Hello. A runner restarts from a restart point a few seconds old, and a
loop does not abandon more epochs in that time."""


class RingView:
    """Ring of a lane (shared memory that the worker fills with batches), with values that each batch needs, computed
    once."""

    __slots__ = ("buffer", "entry_bytes", "group", "held", "limit", "ring")

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.buffer = wrap_buffer(ring.map)
        self.entry_bytes = ring.entry_bytes
        self.held: set[int] = set()
        """Entries with views that the loop still has."""
        self.limit = min(max(2, ring.entries // 2), ring.entries - 1)
        """Number of entries in use above which batches are delivered as copies, so that a loop that keeps its batches
        does not stop the producer."""
        self.group = max(1, ring.entries // 4)
        """Number of batches delivered between two acks."""


class SlotLane:
    """Lane (connection for batches) of a worker slot in the training process, used only by the training thread. See the
    module's docstring."""

    __slots__ = (
        "abandoned",
        "abandoned_epoch",
        "abandons",
        "backoff_s",
        "consumer",
        "copies",
        "corrupt",
        "current_ring",
        "cut_off_at",
        "cut_off_since",
        "failed_since",
        "freed",
        "generation",
        "group",
        "last_digest",
        "last_failure",
        "layout",
        "name",
        "network_works",
        "poll",
        "release",
        "retry_at",
        "rings",
        "slot",
        "tried_failed",
        "unacked",
        "unreachable",
        "unsettled",
        "unused",
        "wanted",
    )

    def __init__(self, slot: int, generation: int, name: str) -> None:
        self.slot = slot
        self.generation = generation
        self.name = name
        """Worker, box and slot, for messages."""
        self.consumer: Consumer | None = None
        self.poll = select.poll()
        """Poll object of the connection, created once, because the creation takes longer than waiting for a fast
        worker."""
        self.rings: dict[int, RingView] = {}
        self.current_ring = 0
        self.release: deque[int] = deque()
        self.freed: list[int] = []
        """Released entries to report in the next ack: ring, entry, ring, entry ..."""
        self.unacked = 0
        """Number of batches delivered since the last ack."""
        self.group = 1
        self.abandons = 0
        """Number of epochs abandoned so far, counted over all generations of the slot."""
        self.abandoned_epoch = -1
        """Number of the epoch that was abandoned last; -1 if none was."""
        self.abandoned: deque[tuple[int, int]] = deque(maxlen=ABANDONED_KEPT)
        """Pairs (epoch, the slot's last batch in it) of the abandoned epochs."""
        self.unsettled = False
        """True if no frame has arrived since the lane was opened or since an epoch was abandoned."""
        self.unused = 0
        """Number of unneeded frames since the last needed batch, or since the connection was made."""
        self.last_digest = 0
        """Digest of the slot's last delivered batch."""
        self.layout: tuple[Structure, list[int]] | None = None
        """Structure and dims of the last checked batch."""
        self.wanted: list[int] = []
        """Announced checkpoint steps at which no snapshot has been taken yet: step, number of the slot's batches up to
        it, step, number ..."""
        self.retry_at = 0.0
        self.backoff_s = FIRST_BACKOFF_S
        self.last_failure = ""
        """Reason why the last attempt to open the lane failed."""
        self.cut_off_since = self.cut_off_at = 0.0
        """Monotonic time since which the worker's host has been unreachable, and time at which this client noticed it;
        both 0 if the host is reachable."""
        self.network_works = False
        """True if the coordinator replied between `cut_off_at` and the last attempt to open the lane. Such a reply
        shows that this host's network works."""
        self.unreachable = ""
        """Reason for requesting another worker; "" if none is requested."""
        self.failed_since = 0.0
        self.tried_failed = False
        self.copies = 0
        self.corrupt = 0
        """Number of times in a row that the due batch arrived damaged."""

    def next_generation(self, generation: int, name: str) -> SlotLane:
        """Return a lane for the slot's next generation, with the same number of abandoned epochs and the same last
        digest."""
        after = self._another(generation, name)
        after.abandons, after.abandoned_epoch, after.unsettled = self.abandons, self.abandoned_epoch, self.unsettled
        after.abandoned = self.abandoned
        after.last_digest, after.wanted, after.copies = self.last_digest, self.wanted, self.copies
        return after

    def _another(self, generation: int, name: str) -> SlotLane:
        """Return a new lane of the same kind for this slot."""
        return SlotLane(self.slot, generation, name)

    # ---- connections

    def hello(self, hello: lane_pb2.Hello) -> None:
        """Add the lane's state to a Hello. Numbers of rings are left out, because each producer numbers its own
        rings."""
        self.drain()
        self.freed.clear()
        for ring_id, ring in self.rings.items():
            hello.held.extend(lane_pb2.RingEntry(ring=ring_id, entry=entry) for entry in ring.held)
        hello.abandons = self.abandons
        hello.last_digest = self.last_digest
        hello.abandoned.extend(records_pb2.EpochEnd(epoch=epoch, total=total) for epoch, total in self.abandoned)
        hello.wanted.extend(self.wanted)
        if self.abandons and self.unsettled and self.abandoned and hello.next_total - 1 <= self.abandoned[-1][1]:
            # The producer may not have received the last abandoned epochs. A producer that has received them detects
            # the repetition by the count. The condition excludes producers that sent a later batch, because these have
            # received them.
            hello.abandon_epoch = self.abandoned_epoch + 1
            hello.epoch = self.abandoned_epoch

    def attach(self, sock: socket.socket, wake_fd: int) -> None:
        """Attach a connection to the lane. From now on `poll` waits for the connection and for `wake_fd`."""
        consumer = self._consumer(sock)
        forks.keep(consumer)
        consumer.abandons = self.abandons
        self.consumer = consumer
        self.unacked = 0
        self.unused = 0
        self.poll = select.poll()
        self.poll.register(consumer.fileno(), select.POLLIN)
        self.poll.register(wake_fd, select.POLLIN)
        self.unsettled = True
        self.last_failure = ""

    def _consumer(self, sock: socket.socket) -> Consumer:
        """Return the consumer that reads a connection."""
        return Consumer(sock, self.name)

    def settle(self) -> None:
        """Record that a frame has arrived, which shows that the worker works and knows all abandoned epochs."""
        self.unsettled = False
        self.backoff_s = FIRST_BACKOFF_S
        self.cut_off_since = self.cut_off_at = 0.0
        self.unreachable = ""

    def begin_try(self, replied_at: float) -> None:
        """Record the start of an attempt to open the lane. replied_at: monotonic time of the coordinator's last
        reply."""
        self.network_works = replied_at > self.cut_off_at > 0.0

    def cut_off(self, now: float, silent_s: float, why: str) -> bool:
        """Record that the worker's host could not be reached, or did not answer for `silent_s`. Return True if another
        worker must be requested: the host has been unreachable for CUT_OFF_S, and this host's network works. Without
        the second condition, a box with a network fault of its own would take its slots from healthy workers."""
        self.lose(now, why)
        if not self.cut_off_at:
            self.cut_off_since, self.cut_off_at = now - silent_s, now
            self.retry_at = max(self.retry_at, now + CHECK_S)
        elif self.network_works and now - self.cut_off_since >= CUT_OFF_S:
            self.unreachable = why
        return bool(self.unreachable)

    def lose(self, now: float, why: str) -> None:
        """Drop a lost connection, and set the time of the next attempt, with exponential backoff."""
        if self.consumer is not None:
            self.consumer.close(say_so=False)
            self.consumer = None
        self.last_failure = why
        self.retry_at = now + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, MAX_BACKOFF_S)

    def close(self) -> None:
        """Close the lane at the end of the stream, or when the slot gets a new generation."""
        if self.consumer is not None:
            self.consumer.close()
            self.consumer = None

    # ---- batches

    def take(self, frame: Frame) -> Any:
        """Return the batch of a BATCH frame. The batch's tensors are views of the frame's ring entry, or copies if the
        training loop already holds views of half of the ring (`RingView.limit`).

        Raises BatchCorruptError if the batch differs from the runner's batch.
        """
        ring_id, entry = frame.ring, frame.entry
        ring, assembler, shapes = self.checked(frame)
        if self.release:
            self.drain()
        held = ring.held
        copy = len(held) >= ring.limit
        if copy:
            self.copies += 1
        batch = assembler.assemble(
            shapes, ring.buffer, entry * ring.entry_bytes, frame.nbytes, self.release, ring_id << 16 | entry, copy
        )
        held.add(entry)
        return batch

    def checked(self, frame: Frame) -> tuple[RingView, Assembler, list[int]]:
        """Compare the digest of a frame's batch, and return the ring, assembler and shapes to assemble the batch
        from."""
        ring = self.rings.get(frame.ring)
        if ring is None:
            ring = self._map(frame.ring)
        consumer = self.consumer
        assert consumer is not None
        assembler, layouts = consumer.compiled.get(frame.structure) or self._compile(frame.structure)
        nbytes = frame.nbytes
        dims = frame.rest if not (frame.size or frame.flags & COUNTED) else dims_of(frame, ring.ring)
        if len(dims) & 7:
            raise malformed(
                f"{self.name}: the encoded shapes of a batch must have a multiple of 8 bytes, got {len(dims)}"
            )
        shapes, seed = layouts.find(nbytes, dims)
        view, offset, cover = ring.ring.view, frame.entry * ring.entry_bytes, frame.flags & COVER
        if cover == DigestCover.ROWS:
            try:
                digest = rows_digest(assembler.structure, shapes, view, offset, nbytes)
            except ValueError as error:
                raise malformed(f"{self.name}: {error}") from None
        else:
            digest = region_digest(seed, view, offset, nbytes, cover == DigestCover.FULL)
        if digest != frame.digest:
            raise BatchCorruptError(
                f"{self.name}: the digest of batch {frame.total} of the slot differs from the digest that its runner "
                "computed"
            )
        self.layout = assembler.structure, shapes
        return ring, assembler, shapes

    def skip(self, frame: Frame) -> None:
        """Release the ring entry of an unneeded batch."""
        self.freed += (frame.ring, frame.entry)

    def drain(self) -> None:
        """Take the tokens of freed views, and count the entries of these tokens as released."""
        release, rings, freed = self.release, self.rings, self.freed
        while release:
            token = release.popleft()
            ring_id, entry = token >> 16, token & 0xFFFF
            ring = rings.get(ring_id)
            if ring is not None:
                ring.held.discard(entry)
                if ring_id != self.current_ring and not ring.held:
                    del rings[ring_id]
            freed += (ring_id, entry)

    def ack(self, total: int) -> bool:
        """Send an ack of deliveries and released entries. Return False while the socket's buffer is full."""
        consumer = self.consumer
        if consumer is None:
            return True
        if self.release:
            self.drain()
        if self.freed:
            consumer.release(self.freed)
            self.freed.clear()
        if self.unacked:
            consumer.delivered(total)
            self.unacked = 0
        return consumer.flush()

    def _map(self, ring_id: int) -> RingView:
        assert self.consumer is not None
        ring = self.consumer.rings[ring_id]
        # A producer never returns to a ring that it has outgrown: free the ring's memory with its last view.
        self.rings = {known: view for known, view in self.rings.items() if view.held}
        self.current_ring = ring_id
        view = self.rings[ring_id] = RingView(ring)
        self.group = view.group
        return view

    def _compile(self, structure: int) -> tuple[Assembler, Layouts]:
        assert self.consumer is not None
        found = Structure.from_bytes(self.consumer.structures[structure])
        compiled = self.consumer.compiled[structure] = Assembler(found), Layouts(found.key)
        return compiled
