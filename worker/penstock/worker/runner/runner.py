"""The program of a runner: runs one slot's loader, in the main thread of its own process.

    next(loader) -> flatten into a ring entry -> digest -> snapshot, if due -> progress page -> frame to the consumer

The process has no thread of Penstock and no gRPC, because user code may fork there. While it streams, the runner polls
its two sockets, the lane's and the daemon's, only between two batches, and only if the ring is half full, the batch was
slow, or the last poll was long ago. It also polls after each replayed batch, and whenever it waits for something.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from penstock.proto.batch.digest import DigestCover, cover_of, region_digest, rows_digest, rows_in, seed_and_dims
from penstock.proto.batch.flatten import FlatBatch, Flattener, Structure
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import (
    LaneLostError,
    ReplayMismatchError,
    StateMismatchError,
    UnsupportedStateError,
)
from penstock.proto.lane.endpoints import FreeEntry, Producer
from penstock.proto.lane.frames import KNOWN_STRUCTURES, LONG_SHAPES
from penstock.proto.lane.ring import ring_bytes
from penstock.proto.state import assignment as assignments
from penstock.proto.state.codec import decode_state
from penstock.proto.state.snapshot_cadence import SnapshotCadence
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.runtime.process import forks
from penstock.worker.batch.building import lend
from penstock.worker.batch.entry_lease import EntryLease
from penstock.worker.batch.stacking import Builder
from penstock.worker.loader.restart_plan import BEGINNING, Leg, Target, first_fit, plan_recovery
from penstock.worker.loader.restart_points import END, UNFIT, RestartPoint
from penstock.worker.loader.restorable_loader import RestorableLoader
from penstock.worker.loader.start import start
from penstock.worker.loader.travel import begin, catch_up, recover, replay, restore, travel
from penstock.worker.processes.control_channel import (
    ControlChannel,
    ControlMessage,
    DescriptorsClosedError,
    begin_slot,
    payload_of,
    plain_detail,
)
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.runner.local_restart_points import EncodedPoint, LocalRestartPoints, Return

__all__ = ["run_slot"]

_log = logging.getLogger("penstock.worker")

SLOW_BATCH_S = 0.001
"""Seconds after which a batch counts as slow. After a slow batch the sockets are polled at once, which takes 2 us."""
POLL_EVERY_S = 0.1
"""Largest number of seconds between two polls of the sockets while batches are fast."""
KEPT_ABANDONED = 64
"""Number of newest abandoned epochs that a runner remembers."""


class _StopError(Exception):
    """Exception that ends a slot's work in this process: the daemon has asked for it, or the slot has failed."""


def run_slot(channel: ControlChannel, progress_page: ProgressPage) -> None:
    """Run a slot (a logical worker with its loader) in this process, from its assignment to its end."""
    message = cast(ControlMessage, channel.receive())
    assignment = begin_slot(message, "runner")
    runner = _Runner(assignment, channel, progress_page)
    forks.host_user_code()
    for own in (channel, progress_page, runner.producer):
        forks.keep(own)
    try:
        runner.prepare()
        runner.stream()
    except (_StopError, LaneLostError):
        pass
    finally:
        with contextlib.suppress(OSError):  # user code may have closed its descriptors
            runner.producer.close()


@dataclass
class _Start:
    """Data that the daemon sends after the assignment, before the slot starts."""

    resume: dict[str, Any] | None
    points: list[RestartPoint]
    begins: bool = False
    """True if the restart point at the launch's start is not in `points`, so that the runner must make it again."""


class _Runner:
    def __init__(
        self, assignment: records_pb2.WorkerAssignment, channel: ControlChannel, progress_page: ProgressPage
    ) -> None:
        options = assignment.loader.options
        self.assignment = assignment
        self.producer = Producer(options.max_batch_bytes, ring_bytes(assignment.num_workers_per_box))
        self.source = RestorableLoader(assignment, self._doing, progress_page.here)
        self._channel = channel
        self._progress_page = progress_page
        self._flattener = Flattener(strict=options.strict_structure)
        self._cover = cover_of(assignment.loader.options)
        self._lease = EntryLease(self.producer, self._wait_in_user_code)
        self._interrupt: Exception | None = None  # error raised while user code waited for a ring entry
        lend(Builder(self._lease))
        self._numbers: OrderedDict[int, tuple[int, Structure]] = OrderedDict()
        self._structures = 0
        self._cadence = SnapshotCadence()
        self._own = LocalRestartPoints()
        self._start_data = b""
        """Encoded restart point from which this runner's stream starts."""
        self._counts = False
        """True if the loader's own states lead to wrong batches. Restart points are then saved as numbers of batches
        after the stream's start."""
        self._abandoned: dict[int, int] = {}
        """Abandoned epochs: number of the epoch -> number of the slot's last batch in it, counted over all epochs."""
        self._hello: lane_pb2.Hello | None = None
        self._points: list[RestartPoint] = []
        """Restart points of the slot's previous runner that arrived after this runner had been started."""
        self._looked = False
        self._begun = False
        self._generators_at = 0
        """Number of the first batch after the newest restart point. After this batch a hash of the random generators is
        sent to the daemon, for the verification of the restart point."""
        self._last_look = 0.0
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._polled = (-1, 0)  # the consumer's socket and its polled events
        point = assignment.start
        turns = list(point.live) or list(range(assignment.num_workers_per_box))
        ahead = (turns.index(assignment.slot) - point.cursor) % len(turns) if assignment.slot in turns else 0
        own = point.slots[assignment.slot].total if len(point.slots) > assignment.slot else 0
        self._first_total, self._first_step, self._stride = own, point.step + ahead + 1, len(turns)

    # ---- starting

    def prepare(self) -> None:
        """Make the loader and bring it to the slot's start position. A failure is reported and ends the slot."""
        source = self.source
        self._doing("starting")
        try:
            sent = self._receive_start()
            source.build()
            if sent.begins or not self.assignment.recovery:
                start(source, sent.resume, partial(self._keep, begins=True), self._seek)
            self._send_ready()
            if self.assignment.recovery:
                if self.assignment.resume.blob and source.by_own_methods and not sent.begins:
                    source.learn_resume(self._await_resume())
                own = [RestartPoint.decode(self._start_data)] if sent.begins else []
                self._recover(own + sent.points)
        except (_StopError, LaneLostError, DescriptorsClosedError):
            raise
        except Exception as error:
            self._channel.send("failed", error=plain_detail(error))
            raise _StopError from error
        if assignments.looked_at():
            self._progress_page.note_assignment_read()
        self._progress_page.set_position(source.position.total, source.position.epoch, source.position.samples)

    def _receive_start(self) -> _Start:
        sent = _Start(None, [])
        while (message := cast(ControlMessage, self._channel.receive())).kind != "go":
            if message.kind == "resume":
                sent.resume = cast(dict[str, Any], decode_state(payload_of(message)))
            elif message.kind == "point":
                sent.points.append(RestartPoint.decode(message.payload))
            elif message.kind == "crossing":
                self.source.learn_crossing(message.fields["crossing"])
            elif message.kind == "misleads":
                self._counts = True
            elif message.kind == "begins":
                sent.begins = True
            elif message.kind == "stop":
                raise _StopError
        return sent

    def _recover(self, points: list[RestartPoint]) -> None:
        """Bring the loader to the position after the last batch that the slot's previous runner delivered. Replayed
        batches are compared with the delivered ones."""
        self._doing("waiting")
        while self._hello is None:
            self._serve(None)
        hello, source = self._hello, self.source
        self._abandoned = {abandoned_epoch.epoch: abandoned_epoch.total for abandoned_epoch in hello.abandoned}
        target = Target(hello.epoch, hello.next_total - 1, self._abandoned, hello.last_digest)
        plan = plan_recovery(points + self._points, target, counted=self._counts)
        if plan is None:
            why = f"cannot continue with batch {hello.next_total}, because no earlier state of the loader is kept"
            raise ReplayMismatchError(f"{source.name}: {why}. Start the job again from a saved state")
        point = recover(source, plan, target, self._seek)
        self._keep(point, epoch_start=point.rng_before is not None, start=True)
        catch_up(source, hello.epoch)

    def _await_resume(self) -> dict[str, Any]:
        """Request and return the state from which the launch resumed, which the daemon sends only on request."""
        self._channel.send("wants_resume")
        while (message := cast(ControlMessage, self._channel.receive())).kind != "resume":
            self._handle(message)
        return cast(dict[str, Any], decode_state(payload_of(message)))

    def _open_epoch(self) -> None:
        """Open the loader's next epoch, and keep the epoch's start as a restart point."""
        source = self.source
        self._keep(source.open_epoch(step=self._step_of(source.position.total)))

    def _seek(self, leg: Leg) -> None:
        source, replay_digest = self.source, ReplayDigest(self._flattener, cover=self._cover)

        def seen(batch: Any) -> None:
            source.digest, samples = replay_digest.take(batch)
            position = source.position
            position.samples += samples
            known = self._progress_page.entry(position.total) if self._begun else None
            if known is not None and known.epoch == position.epoch and known.digest != source.digest:
                raise ReplayMismatchError(
                    f"{source.name}: replayed batch {position.total} of epoch {position.epoch} differs from the one "
                    "that was made before. The loader is not deterministic: run penstock doctor"
                )
            self._progress_page.note(position.total, position.epoch, source.digest, position.samples)
            self._progress_page.replayed()
            self._poll_now()

        replay(source, leg, seen, self._open_epoch)

    def _send_ready(self) -> None:
        self._channel.send("ready", self.source.capabilities.SerializeToString())

    # ---- streaming

    def stream(self) -> None:
        """Stream one epoch after the other, as soon as the training job allows each, until the daemon ends the slot."""
        source = self.source
        try:
            while True:
                if self.producer.abandoned:
                    self._go_back()
                if not source.is_open:
                    self._await_epoch()
                    self._open_epoch()
                self._stream_epoch()
        except (_StopError, LaneLostError, DescriptorsClosedError):
            raise
        except Exception as error:
            self.producer.fail(
                source.position.epoch, source.position.total, records_pb2.ErrorDetail(**plain_detail(error))
            )
            self._channel.send("broken", error=plain_detail(error))
        self._doing("waiting")
        while True:
            self._serve(None)

    def _await_epoch(self) -> None:
        while self.producer.abandoned:  # epochs that had already ended here
            self._go_back()
        while self.producer.open_epochs < self.source.position.epoch:
            self._doing("waiting")
            self._serve(None)
            while self.producer.abandoned:
                self._go_back()

    def _stream_epoch(self) -> None:
        source, producer, progress_page, flatten = (
            self.source,
            self.producer,
            self._progress_page,
            self._flattener.flatten,
        )
        position = source.position
        clock, cover = time.monotonic, self._cover
        self._doing("next")
        progress_page.here(position.epoch, 0)
        while True:
            started = clock()
            batch = self._next()
            # the loop abandoned the epoch while user code waited for an entry: nothing more of the epoch may be sent
            if producer.abandoned:
                del batch
                self._go_back()
                return
            if batch is END:
                self._lease.release()
                ended = position.epoch - 1
                producer.end(ended, position.total)
                progress_page.end(ended, position.total)
                return
            flat = flatten(batch)
            del batch
            entry = self._reserve(flat)
            if entry is None:
                del flat
                self._go_back()
                return
            ring, offset = entry.ring, entry.offset
            flat.write_to(ring.address + offset)
            structure, nbytes, shapes = flat.structure, flat.nbytes, flat.shapes
            seed, dims = seed_and_dims(structure.key, nbytes, shapes)
            if cover == DigestCover.ROWS:
                digest = source.digest = rows_digest(structure, shapes, ring.view, offset, nbytes)
            else:
                digest = source.digest = region_digest(seed, ring.view, offset, nbytes, cover == DigestCover.FULL)
            position.samples += rows_in(structure, shapes)
            known = self._numbers.get(id(structure))
            number = self._learn(structure) if known is None else known[0]
            del flat
            total = position.total
            now = clock()
            if total == self._generators_at:
                self._channel.send("generators", total=total, hash=source.rng_hash())
            if total in producer.wanted or position.delivered == 1 or self._cadence.due(now):
                self._snapshot()
                self._doing("next")
            if not self._looked and assignments.looked_at():
                self._looked = True
                progress_page.note_assignment_read()
            progress_page.record(total, position.epoch, digest, position.samples, producer.delivered)
            counts = source.changed_counts()
            producer.publish(entry, total, position.epoch, number, nbytes, dims, digest, cover=cover, counts=counts)
            if not self._begun:
                self._begun = True
                self._channel.send("begun")
            if (
                (producer.free_entries * 2 <= producer.ring_entries and not producer.blocked)
                or now - started > SLOW_BATCH_S
                or now - self._last_look > POLL_EVERY_S
            ):
                self._last_look = now
                self._poll_now()
                if producer.abandoned:
                    self._go_back()
                    return

    def _next(self) -> Any:
        """Return the loader's next batch, or END. User code may build the batch in a ring entry."""
        self._lease.offered = True
        try:
            return self.source.next()
        finally:
            self._lease.offered = False
            if self._interrupt is not None:
                raise self._interrupt

    def _learn(self, structure: Structure) -> int:
        """Give a new batch structure a number, announce it to the training job, and return the number. The structure is
        kept alive, because it is found by its id()."""
        self._structures += 1
        self._numbers[id(structure)] = self._structures, structure
        if len(self._numbers) > KNOWN_STRUCTURES:
            self._numbers.popitem(last=False)
        self.producer.know_structure(self._structures, structure.to_bytes())
        return self._structures

    def _reserve(self, flat: FlatBatch) -> FreeEntry | None:
        """Wait for a free ring entry, and return it; None if the training loop abandons the epoch during the wait."""
        producer = self.producer
        need = flat.nbytes + (8 * len(flat.shapes) if len(flat.shapes) > LONG_SHAPES else 0)
        entry = self._lease.take(flat, need) or producer.reserve(need)
        if entry is not None:
            return entry
        self._doing("sending")
        while entry is None:
            self._serve(None)
            if producer.abandoned:
                return None
            entry = producer.reserve(need)
        self._doing("next")
        return entry

    def _wait_in_user_code(self) -> bool:
        """Wait for a free ring entry while user code builds a batch. Return False if the training loop has abandoned
        the epoch, or after an error. The error is raised later, when user code has returned, because user code could
        catch an exception."""
        if self._interrupt is None and not self.producer.abandoned:
            self._doing("sending")
            try:
                self._serve(None)
            except Exception as error:
                self._interrupt = error
            self._doing("next")
        return self._interrupt is None and not self.producer.abandoned

    # ---- snapshots

    def _snapshot(self) -> None:
        """Take a snapshot of the loader at its present position, and send the snapshot to the daemon. If that fails,
        report the error and take no more snapshots; the stream continues, and the next save raises the error."""
        source, producer = self.source, self.producer
        total = source.position.total
        steps = producer.wanted.pop(total, None)
        if not source.saves_state or self._cadence.stopped:
            self._cadence.stopped = True
            return
        with self._cadence.timed():
            for step in steps or [self._step_of(total)]:
                try:
                    point = source.snapshot(step)
                    data = point.encode()
                except Exception as error:
                    self._cadence.stopped = True
                    self._channel.send("unsaved", error=plain_detail(error))
                    return
                self._send_restart_point(
                    point, data, epoch_start=False, start=self._is_counted(point), wanted=steps is not None
                )
                if not point.step:
                    break  # state_dict() did not read the step, so the state is the same for all requested steps
        for stale in [known for known in producer.wanted if known <= producer.delivered]:
            del producer.wanted[stale]

    def _is_counted(self, point: RestartPoint) -> bool:
        """Return True if the position of the restart point is reached by a replay from the start of the stream or of
        the launch, and not by the loader's own state there. Such a point needs no verification."""
        return self._counts and point.replayed_from is not None

    def _step_of(self, total: int) -> int:
        """Return the training step of the slot's batch `total`, provided that all slots of the box have batches."""
        return self._first_step + (total - self._first_total - 1) * self._stride

    def _keep(
        self, point: RestartPoint, start: bool = False, *, epoch_start: bool = True, begins: bool = False
    ) -> None:
        """Encode and keep a restart point, and send it to the daemon.

        start: True if this runner's stream starts there, so that no verification is needed. begins: True if this launch
        of the job begins there too.
        """
        error = self.source.unsaved
        if error is None:
            try:
                data = self.source.marked(point, whole_history=start).encode()
                if start:
                    self._start_data = data
                    self.source.counts_from = RestartPoint.decode(data) if self._counts else None
                self._send_restart_point(
                    point,
                    data,
                    epoch_start=epoch_start,
                    start=start or self._is_counted(point),
                    begins=begins and start,
                )
                return
            except UnsupportedStateError as refused:
                error = refused
        self._cadence.stopped = True
        self._channel.send("unsaved", error=plain_detail(error))

    def _send_restart_point(self, point: RestartPoint, data: bytes, *, epoch_start: bool, **given: bool) -> None:
        """Keep a restart point and send it to the daemon. given: more attributes of StoredSnapshot (snapshots.py)."""
        position, flags = (
            point.position,
            cast(dict[str, Any], {"start": False, "wanted": False, "begins": False} | given),
        )
        self._own.add(EncodedPoint(position.epoch, position.total, data), epoch_start=epoch_start)
        self._generators_at = position.total + 1
        self._channel.send(
            "point",
            data,
            epoch=position.epoch,
            delivered=position.delivered,
            total=position.total,
            samples=position.samples,
            epoch_start=epoch_start,
            step=point.step,
            **flags,
        )

    def _go_back(self) -> None:
        """Return to the batch after which the training loop abandoned an epoch, and close the epoch there. The loader
        and its random generators have run ahead by chance, and later batches must not depend on how far."""
        source, producer = self.source, self.producer
        epoch, delivered = producer.abandoned.popleft(), producer.delivered
        position = source.position
        if epoch > position.epoch:
            return
        if not source.saves_state:
            self._leave_unsaved(epoch, delivered)
        else:
            if (position.epoch, position.total) != (epoch, delivered) or source.is_ahead:
                self._return_to(epoch, delivered)
            catch_up(source, epoch)
            if not source.is_open:  # the loop abandoned this epoch before this runner opened it
                self._open_epoch()
        source.abandon_epoch(delivered)
        self._abandoned[epoch] = delivered
        if len(self._abandoned) > KEPT_ABANDONED:
            del self._abandoned[min(self._abandoned)]
        self._lease.release()
        self._own.forget_after(epoch)
        self._progress_page.cut(epoch, delivered)
        self._progress_page.set_position(delivered, epoch, source.position.samples)
        self._channel.send("left", epoch=epoch, total=delivered)

    def _return_to(self, epoch: int, total: int) -> None:
        """Restore the loader to an earlier position: after the slot's batch `total` in epoch `epoch`."""
        source, history, page = self.source, self.source.history, self._progress_page
        delivered, ahead = page.entry(total), page.entry(total + 1)
        # With worker processes of the loader's own there is no test, because each try would start these again.
        known = ahead is not None and ahead.epoch == epoch and not source.capabilities.own_workers
        target = Target(epoch, total, self._abandoned, delivered.digest if delivered is not None else 0)
        following = ahead.digest if ahead is not None and known else 0
        plan = self._own.plan_return(target, exact=source.capabilities.exact_states, following=following)

        def take(point: EncodedPoint | None) -> None:
            if point is not None:
                restore(source, RestartPoint.decode(point.data), target, self._seek)
                return
            begin(source, history)
            travel(source, target.with_abandoned(history.abandoned), self._seek)

        ways: list[EncodedPoint | None] = [*plan.ways(epoch_start_failed=self._epoch_start_fails(plan))]
        if history.complete:
            ways.append(BEGINNING)
        if not ways:
            raise StateMismatchError(
                f"{source.name}: the loader cannot return to where the loop left epoch {epoch} by `break`, because no "
                "earlier state of the loader is kept. Start the job again from a saved state"
            )
        try:
            first_fit(ways, take, UNFIT, lambda mismatch, instead: None)
        except UNFIT as mismatch:
            if history.complete:
                raise
            raise StateMismatchError(mismatch.message) from mismatch

    def _epoch_start_fails(self, plan: Return) -> bool:
        """Return True if the plan's epoch start fails its test: from there, the loader does not yield the batch that it
        had yielded before."""
        if plan.probe is None or plan.epoch_start is None:
            return False
        try:
            restore(self.source, RestartPoint.decode(plan.epoch_start.data), plan.probe, self._seek)
        except UNFIT:
            return True
        return False

    def _leave_unsaved(self, epoch: int, total: int) -> None:
        """Abandon an epoch with a loader that has no state methods. The loader cannot be restored to an earlier
        position: data that was read ahead, for example from a queue, is lost. Seed the random generators by the
        position."""
        source, delivered = self.source, self._progress_page.entry(total)
        source.reseed("left", epoch, total)
        source.position.epoch, source.position.total = epoch, total
        if delivered is not None:
            source.position.samples = delivered.samples

    # ---- the two sockets

    def _serve(self, timeout_s: float | None) -> None:
        """Wait for a message of the daemon or the training job, at most `timeout_s` seconds (None = without limit), and
        handle all messages that have arrived."""
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
            if fd == self._channel.fileno():
                self._listen()
            else:
                producer.flush()
                producer.take_acks()

    def _poll_now(self) -> None:
        self._serve(0)

    def _listen(self) -> None:
        while (message := self._channel.receive(wait=False)) is not None:
            self._handle(message)

    def _handle(self, message: ControlMessage) -> None:
        if message.kind == "stop":
            raise _StopError
        if message.kind == "crossing":
            self.source.learn_crossing(message.fields["crossing"])
        elif message.kind == "misleads":
            self._counts, self.source.counts_from = True, RestartPoint.decode(self._start_data)
        elif message.kind == "point":
            self._points.append(RestartPoint.decode(message.payload))
        elif message.kind == "attach":
            hello = lane_pb2.Hello.FromString(message.payload)
            self._hello = hello
            self.producer.attach(socket.socket(fileno=message.fds[0]), hello)

    def _doing(self, activity: str) -> None:
        self._progress_page.doing(activity, self.producer.delivered)
