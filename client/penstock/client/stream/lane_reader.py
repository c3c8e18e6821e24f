"""Lane of one worker slot, the training process's end: reads frames (messages), and maps the rings: shared memory with
one batch in each entry. The producer at the other end is the slot's runner, or the receiver for one on another host.

A `SlotLane` belongs to one generation of a slot: a new runner begins a new one. It survives a broken connection: the
Hello, the first message on the next one, contains its state. Views of an old lane's rings release nothing, because
their tokens go to a deque that is not read any more.

A token is an int, ring << 16 | entry. When the loop drops a view, its finalizer appends the token to a deque; it may do
nothing else (see penstock.proto.batch.assemble), so `drain` does the rest.

**A delivered batch equals the one that the runner made**: its bytes are compared with the runner's digest
(penstock.proto.batch.digest). After a difference the batch is fetched again, because the ring at the other end still
has it. Only after CORRUPT_TRIES in a row does the training loop get an error."""

from __future__ import annotations

import select
import socket
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.proto.batch.digest import DigestCover, ShapesCache, region_digest, rows_digests
from penstock.proto.batch.flatten import Assembler, wrap_buffer
from penstock.proto.batch.structure import Structure
from penstock.proto.errors import BatchCorruptError, malformed
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import COUNTED, COVER, Frame, dims_of
from penstock.proto.lane.ring import Ring
from penstock.proto.state.position import linked
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.runtime.process import forks

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
CUT_OFF_S = 2.0
"""Seconds for which a host must be unreachable before another worker is requested. Of a dead daemon alone the
coordinator reports within 1.5 s, with a better message."""
CHECK_S = 0.1
"""Seconds until the second attempt, so that the coordinator's reply can show that this host's network works."""
CORRUPT_TRIES = 8
"""On a link that damages every second batch, this happens once in 256, so the loop gets the error within a second."""
ABANDONED_KEPT = 256
"""Abandoned epochs that a Hello lists: a replacement runner needs those since its restart point, seconds ago."""


class RingView:
    __slots__ = ("buffer", "entry_bytes", "group", "held", "limit", "ring")

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.buffer = wrap_buffer(ring.map)
        self.entry_bytes = ring.entry_bytes
        self.held: set[int] = set()
        """Entries of which the loop still has views."""
        self.limit = min(max(2, ring.entries // 2), ring.entries - 1)
        """Most entries with views; then batches are copies, so that a loop that keeps them leaves entries free."""
        self.group = max(1, ring.entries // 4)
        """Delivered batches for which one ack is sent."""


@dataclass(slots=True, eq=False)
class SlotLane:
    """Lane of a worker slot, used only by the training thread."""

    slot: int
    generation: int
    name: str
    """Worker, box and slot, for messages."""
    consumer: Consumer | None = None
    poll: select.poll = field(default_factory=select.poll)
    """Created once, because that takes longer than the wait for a fast worker."""
    rings: dict[int, RingView] = field(default_factory=dict)
    current_ring: int = 0
    release: deque[int] = field(default_factory=deque)
    freed: list[int] = field(default_factory=list)
    """For the next ack, as a flat list: ring, entry, ring, entry ..."""
    unacked: int = 0
    group: int = 1
    abandons: int = 0
    """Abandoned epochs so far, over all generations of the slot."""
    abandoned_epoch: int = -1
    abandoned: deque[tuple[int, int]] = field(default_factory=partial(deque, maxlen=ABANDONED_KEPT))
    """Newest ones, as pairs (epoch, number of the slot's last batch delivered in it)."""
    unsettled: bool = False
    """From a connection or an abandoned epoch to the next frame: the producer may not know of that epoch yet."""
    unused: int = 0
    """Frames in a row that were not needed, such as batches that were sent again."""
    chain: int = 0
    """Hash over the slot's delivered batches of epoch `chained_epoch`."""
    chained_epoch: int = 0
    content: int = 0
    """What the chain links for the batch checked last: its digest, or with DigestCover.ROWS one of all values."""
    last_digest: int = 0
    layout: tuple[Structure, list[int]] | None = None
    """Structure and shapes of the last batch whose digest was right."""
    wanted: list[int] = field(default_factory=list)
    """Announced checkpoint steps as a flat list: step, number of the slot's batches up to it, step ..."""
    retry_at: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    last_failure: str = ""
    """Why the last connection was lost or could not be made; "" once connected."""
    cut_off_since: float = 0.0
    cut_off_at: float = 0.0
    """Times of time.monotonic(): when the host became unreachable, and when that was noticed. 0: it can be reached."""
    network_works: bool = False
    """The coordinator has replied between `cut_off_at` and the last attempt to connect."""
    unreachable: str = ""
    """Why the coordinator must give the slot to another worker; "": it need not."""
    failed_since: float = 0.0
    tried_failed: bool = False
    copies: int = 0
    corrupt: int = 0
    """Times in a row that the slot's next batch has arrived damaged."""

    def next_generation(self, generation: int, name: str) -> SlotLane:
        """Return a lane for the slot's next generation, which keeps what does not belong to a runner."""
        after = self._another(generation, name)
        after.abandons, after.abandoned_epoch, after.unsettled = self.abandons, self.abandoned_epoch, self.unsettled
        after.abandoned = self.abandoned
        after.chain, after.chained_epoch = self.chain, self.chained_epoch
        after.last_digest, after.wanted, after.copies = self.last_digest, self.wanted, self.copies
        return after

    def _another(self, generation: int, name: str) -> SlotLane:
        return SlotLane(self.slot, generation, name)

    # ---- connections

    def hello(self, hello: lane_pb2.Hello) -> None:
        self.drain()
        self.freed.clear()
        for ring_id, ring in self.rings.items():
            hello.held.extend(lane_pb2.RingEntry(ring=ring_id, entry=entry) for entry in ring.held)
        hello.abandons = self.abandons
        hello.last_digest = self.last_digest
        hello.chain = self.chain if hello.epoch == self.chained_epoch else 0
        hello.abandoned.extend(records_pb2.EpochEnd(epoch=epoch, total=total) for epoch, total in self.abandoned)
        hello.wanted.extend(self.wanted)
        if self.abandons and self.unsettled and self.abandoned and hello.next_total - 1 <= self.abandoned[-1][1]:
            # The producer may not have received the last abandoned epochs. A producer that has received them detects
            # the repetition by the count. The condition excludes producers that sent a later batch, because these have
            # received them.
            hello.abandon_epoch = self.abandoned_epoch + 1
            hello.epoch = self.abandoned_epoch

    def attach(self, sock: socket.socket, wake_fd: int) -> None:
        """Use the connection `sock`. `poll` also waits for `wake_fd`, by which the watch thread announces news."""
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
        return Consumer(sock, self.name)

    def link(self, epoch: int, digest: int) -> None:
        """Add the batch that was checked last, which is delivered, to the chain of its epoch."""
        if epoch != self.chained_epoch:
            self.chained_epoch, self.chain = epoch, 0
        self.chain = linked(self.chain, self.content)
        self.last_digest = digest

    def settle(self) -> None:
        """Record a frame on this connection: the worker can be reached and knows of all abandoned epochs."""
        self.unsettled = False
        self.backoff_s = FIRST_BACKOFF_S
        self.cut_off_since = self.cut_off_at = 0.0
        self.unreachable = ""

    def begin_try(self, replied_at: float) -> None:
        """Record an attempt to connect. `replied_at`: time of the coordinator's last reply."""
        self.network_works = replied_at > self.cut_off_at > 0.0

    def cut_off(self, now: float, silent_s: float, why: str) -> bool:
        """Record an unreachable host. Return True to request another worker, after CUT_OFF_S and if this host's network
        works: otherwise a box with a network fault of its own would take its slots from healthy workers."""
        self.lose(now, why)
        if not self.cut_off_at:
            self.cut_off_since, self.cut_off_at = now - silent_s, now
            self.retry_at = max(self.retry_at, now + CHECK_S)
        elif self.network_works and now - self.cut_off_since >= CUT_OFF_S:
            self.unreachable = why
        return bool(self.unreachable)

    def lose(self, now: float, why: str) -> None:
        """Drop a lost or bad connection. The next attempt follows with exponential backoff."""
        if self.consumer is not None:
            self.consumer.close(say_so=False)
            self.consumer = None
        self.last_failure = why
        self.retry_at = now + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, MAX_BACKOFF_S)

    def close(self) -> None:
        if self.consumer is not None:
            self.consumer.close()
            self.consumer = None

    # ---- batches

    def take(self, frame: Frame) -> Any:
        """Return the announced batch, as views of its ring entry, or as copies beyond `RingView.limit`."""
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
        """Check a batch against its digest; return ring, Assembler, shapes. Raises BatchCorruptError, ProtocolError."""
        ring = self.rings.get(frame.ring)
        if ring is None:
            ring = self._map(frame.ring)
        consumer = self.consumer
        assert consumer is not None
        assembler, layouts = consumer.compiled.get(frame.structure) or self._compile(frame.structure)
        nbytes = frame.nbytes
        dims = frame.rest if not (frame.size or frame.flags & COUNTED) else dims_of(frame, ring.ring)
        if len(dims) & 7:
            raise malformed(f"{self.name}: the shapes of a batch must have a multiple of 8 bytes, got {len(dims)}")
        shapes, seed, sampling = layouts.find(nbytes, dims)
        view, offset, cover = ring.ring.view, frame.entry * ring.entry_bytes, frame.flags & COVER
        if cover == DigestCover.ROWS:
            try:
                digest, content = rows_digests(seed, assembler.structure, shapes, view, offset, nbytes)
            except ValueError as error:
                raise malformed(f"{self.name}: {error}") from None
        else:
            digest = content = region_digest(
                seed, view, offset, nbytes, None if cover == DigestCover.FULL else sampling
            )
        if digest != frame.digest:
            raise BatchCorruptError(
                f"{self.name}: batch {frame.total} of the slot arrived damaged: its digest differs from its runner's"
            )
        self.layout, self.content = (assembler.structure, shapes), content
        return ring, assembler, shapes

    def skip(self, frame: Frame) -> None:
        """Release the ring entry of a batch that is not needed. The next ack tells the producer."""
        self.freed += (frame.ring, frame.entry)

    def drain(self) -> None:
        """Note the ring entries whose views were freed for the next ack."""
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
        """Send the slot's number of delivered batches and the released entries. False: the socket is full."""
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

    def _compile(self, structure: int) -> tuple[Assembler, ShapesCache]:
        assert self.consumer is not None
        described = Structure.from_bytes(self.consumer.structures[structure])
        compiled = self.consumer.compiled[structure] = Assembler(described), ShapesCache(described)
        return compiled
