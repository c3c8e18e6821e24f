"""Streaming of a slot's batches: what a runner does whatever the kind of its loader.

    next(loader) -> flatten into a ring entry -> digest -> snapshot, if due -> progress page -> frame to the consumer

The two sockets (lane's, daemon's) are polled between batches, if the ring is half full, the batch was slow, or the last
poll was long ago; also after each replayed batch, and in waits.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.proto.batch.digest import DigestCover, cover_of, plan_digest, region_digest, rows_digests, rows_in
from penstock.proto.batch.flatten import FlatBatch, Flattener, Structure
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import ReplayMismatchError, UnsupportedStateError
from penstock.proto.lane.frames import KNOWN_STRUCTURES, LONG_SHAPES, unread_break
from penstock.proto.lane.producer import FreeEntry, Producer
from penstock.proto.lane.ring import ring_bytes
from penstock.proto.state import assignment as assignments
from penstock.proto.state.codec import decode_state
from penstock.proto.state.position import linked
from penstock.proto.state.snapshot_cadence import SnapshotCadence
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.runtime.process import forks
from penstock.worker.batch.building import lend
from penstock.worker.batch.entry_lease import EntryLease
from penstock.worker.batch.stacking import Builder
from penstock.worker.loader.restart_plan import Leg
from penstock.worker.loader.restart_points import END, RestartPoint, StreamPosition
from penstock.worker.loader.slot_loader import CHANGED, SlotLoader
from penstock.worker.loader.travel import replay
from penstock.worker.processes.control_channel import (
    MAX_FDS,
    ControlChannel,
    ControlMessage,
    counts,
    payload_of,
    plain_detail,
)
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.runner.user_errors import told

_log = logging.getLogger("penstock.worker")

SLOW_BATCH_S = 0.001
"""Seconds from which a batch is slow: then the sockets are polled at once, in 2 us."""
POLL_EVERY_S = 0.1
"""Seconds between two polls while batches are fast."""
COMING_S = 0.005


class StopError(Exception):
    """The daemon ends the slot's work here, or the slot has failed."""


@dataclass
class StartData:
    """What the daemon sends after the assignment."""

    resume: dict[str, Any] | None = None
    """Decoded state to resume from; None: there is none, or it comes later."""
    points: list[RestartPoint] = field(default_factory=list)
    firsts: list[list[int]] = field(default_factory=list)
    """First batches of epochs by previous runners: epoch, the slot's batches before it, digest."""
    begins: bool = False
    """True if the launch's start is not in `points`, so that the runner must make it again."""


def receive_start(channel: ControlChannel) -> StartData:
    sent = StartData()
    while (message := cast(ControlMessage, channel.receive())).kind != "go":
        if message.kind == "resume":
            sent.resume = cast(dict[str, Any], decode_state(payload_of(message)))
        elif message.kind == "point":
            sent.points.append(RestartPoint.decode(message.payload))
        elif message.kind == "firsts":
            sent.firsts = message.fields["firsts"]
        elif message.kind == "begins":
            sent.begins = True
        elif message.kind == "stop":
            raise StopError
    return sent


class SlotStream:
    """Loader, two sockets, ring and progress page, in the process that runs the loader."""

    def __init__(
        self, assignment: records_pb2.WorkerAssignment, channel: ControlChannel, progress_page: ProgressPage
    ) -> None:
        options = assignment.loader.options
        self.assignment = assignment
        self.producer = Producer(
            options.max_batch_bytes, ring_bytes(assignment.num_workers_per_box), log=progress_page.frame_log
        )
        self.source = SlotLoader(assignment, self.doing, progress_page.here)
        self.channel = channel
        self.page = progress_page
        self.hello: lane_pb2.Hello | None = None
        self.points: list[RestartPoint] = []
        self.on_point: Callable[[StreamPosition, bytes], None] = lambda position, data: None
        """Called with each restart point sent to the daemon."""
        self.on_lane: Callable[[int], None] = lambda fd: None
        self.on_prepare: Callable[[int, bool], None] = lambda total, loop_waits: self.prepared(0)
        """Called in a migration's target once all that it starts from has arrived, with the batches that the loop has
        taken, and whether it waits for each."""
        self._flattener = Flattener(strict=options.strict_structure)
        self._cover = cover_of(assignment.loader.options)
        self._lease = EntryLease(self.producer, self._wait_in_user_code)
        self._interrupt: Exception | None = None  # error raised while user code waited for a ring entry
        self._numbers: OrderedDict[int, tuple[int, Structure]] = OrderedDict()
        self._cadence = SnapshotCadence()
        self._answers = True
        """True if a snapshot is taken at each announced checkpoint step."""
        self._begun = False
        self._last_look = 0.0
        self._taken = 0
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._polled = (-1, 0)  # the consumer's socket and its polled events
        point = assignment.start
        turns = list(point.live) or list(range(assignment.num_workers_per_box))
        ahead = (turns.index(assignment.slot) - point.cursor) % len(turns) if assignment.slot in turns else 0
        first_total = point.slots[assignment.slot].total if len(point.slots) > assignment.slot else 0
        self._first_total, self._first_step, self._stride = first_total, point.step + ahead + 1, len(turns)

    def space_snapshots(self, every_s: float) -> None:
        """Take snapshots at this interval or more rarely. A pure loader needs none at announced steps, unless
        aggregated."""
        self._cadence = SnapshotCadence(every_s)
        self._answers = self.source.capabilities.state_methods == 4

    def host_user_code(self) -> None:
        """Prepare for user code until the end: disconnect children that it forks, and let it build batches in the
        ring."""
        forks.host_user_code()
        for own in (self.channel, self.page, self.producer):
            forks.keep(own)
        lend(Builder(self._lease))

    # ---- streaming

    def stream_epoch(self) -> None:
        source, producer, progress_page = self.source, self.producer, self.page
        flatten = self._flattener.flatten
        position = source.position
        clock, cover, log = time.monotonic, self._cover, progress_page.frame_log
        self.doing("next")
        progress_page.here(position.epoch, 0)
        while True:
            started = clock()
            batch = self._next()
            # the loop abandoned the epoch while user code waited for an entry: nothing more of the epoch may be sent
            if producer.abandoned:
                return
            if batch is END:
                self.release_lease()
                ended = position.epoch - 1
                progress_page.end(ended, position.total)  # first: a state that the loop requests then has the end
                producer.end(ended, position.total)
                return
            flat = flatten(batch)
            del batch
            entry = self._reserve(flat)
            if entry is None:
                return
            ring, offset = entry.ring, entry.offset
            flat.write_to(ring.address + offset)
            structure, nbytes, shapes = flat.structure, flat.nbytes, flat.shapes
            seed, dims, sampling = plan_digest(structure, nbytes, shapes)
            if cover == DigestCover.ROWS:
                digest, link = rows_digests(seed, structure, shapes, ring.view, offset, nbytes)
            else:
                sampling = None if cover == DigestCover.FULL else sampling
                digest = link = region_digest(seed, ring.view, offset, nbytes, sampling)
            source.digest = digest
            position.samples += rows_in(structure, shapes)
            known = self._numbers.get(id(structure))
            number = self._learn(structure) if known is None else known[0]
            del flat
            total = position.total
            now = clock()
            source.spent_s += now - started
            chain = source.chain = linked(source.chain, link)
            if (total in producer.wanted and self._answers) or self._cadence.due(now):
                self._snapshot()
                self.doing("next")
            progress_page.record(
                total, position.epoch, digest, position.samples, producer.delivered, source.spent_s, chain
            )
            counts = source.changed_counts()
            if producer.rings_changed:
                self._send_rings()
            producer.publish(entry, total, position.epoch, number, nbytes, dims, digest, cover=cover, counts=counts)
            if not self._begun:
                self._begun = True
                progress_page.note_reads(looked=assignments.looked_at(), answer=assignments.reads().answer)
                self.channel.send("begun")
            if (
                (producer.free_entries * 2 <= producer.ring_entries and not producer.blocked)
                or now - started > SLOW_BATCH_S
                or now - self._last_look > POLL_EVERY_S
                or log.announced != self._taken
            ):
                self._last_look = now
                self._take_consumer()
                self.serve(0)
                if producer.abandoned:
                    return

    def _take_consumer(self) -> None:
        """Wait for an announced consumer: it may have read the log before its last frames."""
        log, taken = self.page.frame_log, self.page.frame_log.announced
        while log.passed_on < taken:
            self.serve(COMING_S)
        self._taken = taken

    def _next(self) -> Any:
        self._lease.offered = True
        try:
            return self.source.next()
        finally:
            self._lease.offered = False
            if self._interrupt is not None:
                raise self._interrupt

    def _learn(self, structure: Structure) -> int:
        """Number and announce a new structure, kept alive because it is found by its id()."""
        data = structure.to_bytes()
        known = [number for number, other in self.producer.known_structures.items() if other == data]
        if not known:
            self.producer.numbered += 1
            self.channel.send("structure", data, number=self.producer.numbered)
        number = known[0] if known else self.producer.numbered
        self._numbers[id(structure)] = number, structure
        if len(self._numbers) > KNOWN_STRUCTURES:
            self._numbers.popitem(last=False)
        self.producer.know_structure(number, data)
        return number

    def _send_rings(self) -> None:
        """Send the rings to the daemon, which serves connections while this process is in user code."""
        self.producer.rings_changed = False
        rings = list(self.producer.rings.items())[-MAX_FDS:]
        numbers = [[ring_id, ring.entry_bytes, ring.entries] for ring_id, ring in rings]
        self.channel.send("rings", fds=[ring.fd for _, ring in rings], rings=numbers)

    def _reserve(self, flat: FlatBatch) -> FreeEntry | None:
        """Wait for a free entry; None if the loop abandons the epoch meanwhile."""
        producer = self.producer
        need = flat.nbytes + (8 * len(flat.shapes) if len(flat.shapes) > LONG_SHAPES else 0)
        entry = self._lease.take(flat, need) or producer.reserve(need)
        if entry is not None:
            return entry
        self.doing("sending")
        while entry is None:
            self.serve(None)
            if producer.abandoned:
                return None
            entry = producer.reserve(need)
        self.doing("next")
        return entry

    def _wait_in_user_code(self) -> bool:
        """Wait for a free entry in user code. Return False if the epoch is abandoned, or after an error, which is
        raised later, because user code could catch it."""
        if self._interrupt is None and not self.producer.abandoned:
            self.doing("sending")
            try:
                self.serve(None)
            except Exception as error:
                self._interrupt = error
            self.doing("next")
        return self._interrupt is None and not self.producer.abandoned

    def seek(self, leg: Leg) -> None:
        """Replay a leg, and compare each batch that this runner has made before."""
        replay(self.source, leg, self._compared(), self.open_epoch)

    def follow(self, is_enough: Callable[[], bool]) -> bool:
        """Replay as `seek` until `is_enough`. Return False if the epoch ends first."""
        seen = self._compared()
        self.doing("replay")
        while not is_enough():
            batch = self.source.next()
            if batch is END:
                return False
            seen(batch)
        return True

    def _compared(self) -> Callable[[Any], None]:
        source, replay_digest = self.source, ReplayDigest(self._flattener, cover=self._cover)
        started = time.monotonic()

        def seen(batch: Any) -> None:
            nonlocal started
            source.count_replayed(batch, replay_digest)
            source.spent_s += time.monotonic() - started
            position = source.position
            known = self.page.entry(position.total) if self._begun else None
            if known is not None and known.epoch == position.epoch and known.digest != source.digest:
                raise ReplayMismatchError(
                    f"{source.name}: replayed batch {position.total} differs from the one made before. {CHANGED}"
                )
            self.page.note(
                position.total, position.epoch, source.digest, position.samples, source.spent_s, source.chain
            )
            self.page.replayed()
            self.serve(0)
            started = time.monotonic()

        return seen

    def open_epoch(self) -> None:
        source = self.source
        self.keep(source.open_epoch(step=self.step_of(source.position.total)))

    def release_lease(self) -> None:
        self._lease.release()

    # ---- snapshots

    def _snapshot(self) -> None:
        """Send a snapshot. If that fails, take no more; the stream continues, and the next save raises the error."""
        source, producer = self.source, self.producer
        total = source.position.total
        steps = producer.wanted.pop(total, None)
        if not source.saves_state or self._cadence.stopped:
            self._cadence.stopped = True
            return
        with self._cadence.timed():
            for step in steps or [self.step_of(total)]:
                try:
                    point = source.snapshot(step)
                    data = point.encode()
                except Exception as error:
                    self._cadence.stopped = True
                    self.channel.send("unsaved", error=told(error))
                    return
                self._send_restart_point(point, data, epoch_start=False)
                if not point.step:
                    break  # state_dict() did not read the step, so the state is the same for all requested steps

    def step_of(self, total: int) -> int:
        return self._first_step + (total - self._first_total - 1) * self._stride

    def keep(self, point: RestartPoint, start: bool = False, *, epoch_start: bool = True, begins: bool = False) -> None:
        """Send a restart point. start: this runner's stream starts there. begins: this launch too."""
        error = self.source.unsaved
        if error is None:
            try:
                data = self.source.marked(point, whole_history=start).encode()
                self._send_restart_point(point, data, epoch_start=epoch_start, begins=begins and start)
                return
            except UnsupportedStateError as refused:
                error = refused
        self._cadence.stopped = True
        self.channel.send("unsaved", error=plain_detail(error))

    def _send_restart_point(self, point: RestartPoint, data: bytes, *, epoch_start: bool, begins: bool = False) -> None:
        position = point.position
        self.on_point(position, data)
        self.channel.send(
            "point",
            data,
            epoch=position.epoch,
            delivered=position.delivered,
            total=position.total,
            samples=position.samples,
            epoch_start=epoch_start,
            spent_s=point.spent_s,
            step=point.step,
            begins=begins,
        )

    # ---- the two sockets

    def serve(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` (None = no limit) for a message, and handle all that have arrived."""
        producer, poll = self.producer, self._poll
        producer.flush()
        consumer = producer.fileno(), select.POLLIN | (select.POLLOUT if producer.blocked else 0)
        if consumer != self._polled:
            if self._polled[0] >= 0:
                poll.unregister(self._polled[0])
            if consumer[0] >= 0:
                poll.register(*consumer)
            self._polled = consumer
        for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000):
            if fd == self.channel.fileno():
                self._listen()
            else:
                producer.flush()
                producer.take_acks()

    def _listen(self) -> None:
        while (message := self.channel.receive(wait=False)) is not None:
            self.handle(message)

    def handle(self, message: ControlMessage) -> None:
        if message.kind == "stop":
            raise StopError
        if message.kind == "point":
            self.points.append(RestartPoint.decode(message.payload))
        elif message.kind == "firsts":
            self.source.learn_firsts(message.fields["firsts"])
        elif message.kind == "snapshot":
            self._cadence.hasten()
        elif message.kind == "prepare":
            (total,) = counts(message, "total")
            self.source.learn_labels({int(epoch): label for epoch, label in message.fields["labels"].items()})
            self.on_prepare(total, bool(message.fields["loop_waits"]))
        elif message.kind == "attach":
            hello = lane_pb2.Hello.FromString(message.payload)
            self.hello = hello
            fields = message.fields
            self.producer.attach(socket.socket(fileno=message.fds[0]), hello, fields["served"], fields["rings"])
            if self.producer.attached:
                self.on_lane(self.producer.fileno())

    def prepared(self, total: int) -> None:
        self.channel.send("prepared", total=total)

    def has_unread_break(self, epoch: int | None = None) -> bool:
        """Return whether the process with the lane has not read (or not even received) that the loop has abandoned an
        epoch, or is not in `epoch`."""
        is_unread = False
        for message in self.channel.peek():
            if message.kind == "attach" and message.fds:
                hello = lane_pb2.Hello.FromString(message.payload)
                with socket.socket(fileno=message.fds.pop()) as lane:
                    left = hello.abandon_epoch > 0 and hello.abandons > self.producer.abandons
                    is_unread = is_unread or left or epoch not in (None, hello.epoch) or unread_break(lane)
            for fd in message.fds:
                os.close(fd)
        return is_unread or self.producer.has_unread_break()

    def begin_anew(self) -> None:
        """Continue without a process killed in an abandoned epoch. The job connects again: its connection has seen
        structures unknown here."""
        self.producer.begin_anew(self.page.total)
        self._listen()
        self.producer.take_acks()
        self.producer.detach()

    def left(self, epoch: int, total: int, samples: int) -> None:
        """Record and report that the loop has abandoned an epoch after batch `total`."""
        self.release_lease()
        self.page.cut(epoch, total, samples)
        self.channel.send("left", epoch=epoch, total=total)

    def fail(self, error: Exception) -> None:
        """Send the error to job and daemon. Then only serve the sockets, until StopError."""
        fields = told(error)
        position = self.source.position
        self.producer.fail(position.epoch, position.total, records_pb2.ErrorDetail(**fields))
        self.channel.send("broken", error=fields)
        self.doing("waiting")
        while True:
            self.serve(None)

    def doing(self, activity: str) -> None:
        self.page.doing(activity, self.producer.delivered)
