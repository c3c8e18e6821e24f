"""Ordered reader: reads frames (messages) from the lanes of a box, one for each worker slot, and returns batches in the
order of the box's position. Each batch passes through this code, in the training thread.

Without a frame of the batch that is due, `next` waits for its lane or the coordinator's news. A batch is acknowledged
in a later call, because the loop gets it only when `next` returns. Acks are sent for groups of batches; a long wait
sends all, because a producer whose ring is full waits for them.

A batch that is not exactly the next one of its slot is an error, except that one repeated after a reconnect is released
unread. Content is checked too (lane_reader.py): a damaged batch is fetched again, and is an error only if it stays
damaged."""

from __future__ import annotations

import logging
import os
import select
import time
from typing import Any, Literal, NoReturn

from penstock.client.stream import open_streams
from penstock.client.stream.checkpoint_schedule import CheckpointSchedule, requests_of
from penstock.client.stream.lane_reader import CORRUPT_TRIES, SlotLane
from penstock.client.stream.open_run import AWAY_S, OpenRun
from penstock.client.stream.streams import EPOCH_ENDED, NO_WORKER, Reader, placed, queued, recovered
from penstock.client.stream.wait_notice import STAGES, WaitNotice
from penstock.proto.errors import (
    BatchCorruptError,
    DeadlineError,
    ForkedProcessError,
    LaneLostError,
    PenstockError,
    ProtocolError,
    malformed,
)
from penstock.proto.lane.frames import BATCH, CLOSE, END, ERROR, MAX_UNUSED, Frame, counts_of
from penstock.proto.lane.ring import MAX_ENTRIES
from penstock.proto.lane.tcp import USER_TIMEOUT_S
from penstock.proto.rpc.wire_errors import error_of
from penstock.proto.state.epoch_labels import put_label, to_messages
from penstock.proto.state.position import Position, advance
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.tracebacks import stack_in_a_line, warn_user
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import lane_pb2, records_pb2

OUTRUN = 2 * (MAX_ENTRIES + 8)
"""A slot's next batches among which checkpoint steps are announced: more than twice a ring, because the next
announcement comes at the middle one, and a worker may be a whole ring ahead of the loop."""
FAILED_GRACE_S = 2.0
"""Seconds for a failed slot's last batches and error to arrive on its lane."""
RETRY_FLUSH_S = 0.02
LAZY_S = 0.002
"""Seconds of waiting after which incomplete groups are acked. At once, a loop faster than its workers would cost a
system call and a wake-up of the producer for each batch."""

_log = logging.getLogger("penstock.client")


class OrderedReader(Reader):
    run: OpenRun

    def __init__(self, run: OpenRun, position: Position, label: str, timeout_s: float) -> None:
        super().__init__(run, position, label, timeout_s)
        self._version = -1
        self._poll = select.poll()  # a poll for slots whose lane is not connected
        self._poll.register(run.wake_fd, select.POLLIN)
        self._lanes = [self._first_lane(slot) for slot in range(run.num_slots)]
        for lane, chain in zip(self._lanes, position.slot_chains, strict=False):
            lane.chained_epoch, lane.chain = position.epoch, chain
        self._restarts = [0] * run.num_slots
        self._slow = [""] * run.num_slots
        self._start_queue = [0] * run.num_slots
        self._queue_moved = 0.0
        """Monotonic time at which the awaited runner last moved up in its worker's queue."""
        self._notice = run.notice
        self._notice.pause()
        self._later_notice: WaitNotice | None = None
        """For a wait after the first batch, for a slot without a worker or for the coordinator."""
        self._open_epochs = position.epoch
        self._waiting_since, self._moving = 0.0, False
        self._is_first = True
        """No batch has been taken yet."""
        self._away_before_s = 0.0
        """The coordinator's absence in all (OpenRun.away_s) when the present wait began."""
        self._ending = False
        """In `end_epoch`: no further batch is wanted from this epoch."""
        self._abandoned: list[tuple[int, int]] = []
        run.progress.position = self.copy_position
        run.progress.unreachable = self._unreachable
        open_streams.readers.add(self)

    # ---- the hot path

    def next(self) -> Any:
        """Wait for the next batch, or EPOCH_ENDED. Raises DeadlineError, and a failed input's error once all batches
        before it were delivered."""
        self._catch_up()
        position, total = self.position, self.position.total
        self.wait_s = 0.0
        self._waiting_since = 0.0  # waits that ended with an epoch or an error do not count for this batch
        while True:
            slot = position.live[position.cursor]
            lane = self._lanes[slot]
            if lane.unacked >= lane.group:
                lane.ack(total[slot])
            consumer = lane.consumer
            frame = None
            if consumer is not None:
                try:
                    frame = consumer.receive()
                except LaneLostError as error:
                    lane.lose(time.monotonic(), error.message)
                except ProtocolError as error:
                    lane.lose(time.monotonic(), error.message)
                    raise
            if frame is None:
                self._wait(lane)
                continue
            # a CLOSE may have been sent before the producer received the message of an abandoned epoch
            if lane.unsettled and frame.kind != CLOSE:
                lane.settle()
            if frame.kind != BATCH or frame.epoch != position.epoch or frame.total != total[slot] + 1:
                if self._other(lane, frame):
                    return EPOCH_ENDED
                continue
            if self._ending:
                self.abandon_epoch()
                return None
            digest = frame.digest
            try:
                batch, counts = lane.take(frame), counts_of(frame)
            except BatchCorruptError as error:
                self._corrupt(lane, error.message)
                continue
            except BaseException as error:
                # The batch is not delivered. If the caller tries again, the producer sends it again.
                lane.lose(time.monotonic(), str(error))
                raise
            self._count(lane, digest, counts)
            return batch

    def _catch_up(self) -> None:
        """Wait at a StepFence, and apply news of the slots, before a batch is taken: its lane may be an old one."""
        run = self.run
        run.fence.taken = step = self.position.step + 1
        if step >= run.fence.step:
            self.flush()
            run.hold(step, self._timeout_s)
        if self._version != run.version:
            self._refresh()

    def _count(self, lane: SlotLane, digest: int, counts: bytes) -> None:
        if self._waiting_since:
            self._waiting_since = 0.0
        if self._is_first:
            self._is_first, self.run.progress.first_digest = False, digest
        lane.link(self.position.epoch, digest)
        if counts:
            self.counts.take(lane.slot, counts)
        self.layout = lane.layout
        lane.unacked += 1
        lane.unused = lane.corrupt = 0
        self._moving = True
        self.position.deliver(digest)
        self._moving = False

    def _corrupt(self, lane: SlotLane, what: str) -> None:
        """Drop the connection, to get the batch again. Raises BatchCorruptError after CORRUPT_TRIES in a row."""
        lane.corrupt += 1
        self.stats.corrupt += 1
        lane.lose(time.monotonic(), what)
        if lane.corrupt >= CORRUPT_TRIES:
            slot = lane.slot
            lane.corrupt = 0  # if the caller tries again, the tries are counted from 0
            raise self._placed(
                BatchCorruptError(
                    f"{self.label}: batch {self.position.total[slot] + 1} of the worker slot arrived damaged "
                    f"{CORRUPT_TRIES} times in a row: check memory and network of both machines. Last cause: {what}"
                ),
                slot,
            )
        _log.warning("%s: damaged data arrived and is fetched again: %s", self.label, what)

    def _other(self, lane: SlotLane, frame: Frame) -> bool:
        """Handle a frame that is not the due batch. Return True if the box's epoch has ended."""
        position, kind, slot = self.position, frame.kind, lane.slot
        if kind == ERROR:
            if frame.error.name == BatchCorruptError.__name__:
                self._corrupt(lane, frame.error.message)
                return False
            error = self._placed(error_of(frame.error), slot)
            self.run.error = error  # no frame comes after an ERROR
            raise error
        if kind == END:
            return self._slot_ended(lane, frame)
        if kind == BATCH:
            if frame.total <= position.total[slot]:
                lane.skip(frame)
                self._pass_over(lane)
                return False
            raise self._confused(lane, f"batch {frame.total} of epoch {frame.epoch}")
        if frame.rest:
            self._cut_off(lane, frame.error)
        else:
            lane.lose(time.monotonic(), "the worker closed the lane")
        return False

    def _slot_ended(self, lane: SlotLane, frame: Frame) -> bool:
        position, slot = self.position, lane.slot
        if frame.epoch < position.epoch:
            self._pass_over(lane)
            return False  # sent again after a reconnect; this END was handled before
        if frame.epoch != position.epoch or frame.total != position.total[slot]:
            raise self._confused(lane, f"the end of epoch {frame.epoch} after batch {frame.total}")
        if by_own_methods(self.run.views[slot].capabilities):
            position.carry()
        self._moving = True
        try:
            epoch_over = position.exhaust()
        finally:
            self._moving = False
        if epoch_over:
            self.run.progress.epoch_starts.add(position)
        return epoch_over

    def _cut_off(self, lane: SlotLane, error: records_pb2.ErrorDetail) -> None:
        """Handle the receiver's message that a worker cannot be reached. Report at once: the reply shows that this
        host's network works, and a later report requests another worker."""
        silent_s = USER_TIMEOUT_S if error.name == DeadlineError.__name__ else 0.0
        first = not lane.cut_off_at
        if lane.cut_off(time.monotonic(), silent_s, error.message) or first:
            self.run.report_soon()

    def _unreachable(self) -> list[tuple[int, int, str]]:
        """Return (slot, generation, reason) for all slots of workers that one lane has found unreachable."""
        views, lanes = self.run.views, list(self._lanes)
        why = {views[lane.slot].worker: lane.unreachable for lane in lanes if lane.unreachable}
        return [
            (lane.slot, lane.generation, why[views[lane.slot].worker])
            for lane in lanes
            if views[lane.slot].worker in why and views[lane.slot].generation == lane.generation
        ]

    def _pass_over(self, lane: SlotLane) -> None:
        """Count a frame that is not needed, of which at most MAX_UNUSED may come in a row."""
        lane.unused += 1
        if lane.unused > MAX_UNUSED:
            raise self._confused(lane, f"{lane.unused} batches and messages that are not needed")

    def _confused(self, lane: SlotLane, what: str) -> ProtocolError:
        position, slot = self.position, lane.slot
        lane.lose(time.monotonic(), "out of order")
        due = position.total[slot] + 1
        return malformed(f"{lane.name}: the worker sent {what}, but batch {due} of epoch {position.epoch} was due")

    # ---- waiting

    def _wait(self, lane: SlotLane) -> None:
        """Wait until a frame for `lane` may have arrived. After LAZY_S all lanes' acks are sent."""
        run = self.run
        version = run.version
        if self._version != version:
            self._refresh()
            return
        self._check_open()
        now = time.monotonic()
        if not self._waiting_since:
            self._waiting_since, self._away_before_s = now, run.away_s(now)
            self._notice.resume()
            self._later_notice = None
        view = run.views[lane.slot]
        if lane.consumer is None and self._connect(lane, view, now):
            return
        # A runner in its worker's queue of starts is not late while the queue moves, because each start has its own
        # deadline. Without a coordinator no slot can get another worker.
        away_s = run.away_s(now) - self._away_before_s
        until = max(self._waiting_since, self._queue_moved) + self._timeout_s + min(AWAY_S, away_s)
        if now >= until:
            self.flush()
            lost = lane.last_failure if lane.consumer is None else ""
            raise self.late(view, now - self._waiting_since, f"step {self.position.step + 1}", away_s, lost)
        if view.phase == pb.FAILED:
            until = min(until, self._failed(lane, view, now))
        if lane.consumer is None and view.phase in (pb.READY, pb.FAILED):
            until = min(until, max(lane.retry_at, now + 0.001))
        if (notice := self._notice_of(view)) is not None:
            notice.tell(*self._waiting_for(lane, view))
            until = min(until, notice.due)
        lazy_until = self._waiting_since + LAZY_S
        if now < lazy_until:
            until = min(until, lazy_until)
        elif not self.flush():
            until = min(until, now + RETRY_FLUSH_S)
        poll = self._poll if lane.consumer is None else lane.poll
        progress, worker = run.progress, view.worker
        progress.waiting_since = now
        progress.waiting_for = lane.slot + 1
        try:
            for fd, _ in poll.poll(max(0.0, until - now) * 1000 + 0.5):
                if fd == run.wake_fd:
                    os.eventfd_read(fd)
        finally:
            progress.waiting_for = 0
            self._waited(lane.slot, worker, time.monotonic() - now)

    def _notice_of(self, view: pb.SlotView) -> WaitNotice | None:
        if self.position.step == self.began_at:
            return self._notice
        away = self.run.away_since is not None
        if (away or view.phase in NO_WORKER) and self._later_notice is None:
            self._later_notice = WaitNotice()
        return self._later_notice

    def _waiting_for(self, lane: SlotLane, view: pb.SlotView) -> tuple[str, str]:
        which = "first" if self.position.step == self.began_at else "next"
        slots = f" from worker slot {lane.slot}" if self.run.num_slots > 1 else ""
        why = f"no connection to its worker: {lane.last_failure}" if lane.last_failure else "its runner is making it"
        if (since := self.run.away_since) is not None:
            why = f"the coordinator has not answered for {time.monotonic() - since:.0f} s"
        elif view.phase in NO_WORKER:
            why = self.run.unplaced_because or "no worker has free slots"
        elif view.phase == pb.STARTING:
            why = STAGES.get(view.start_stage, "start of its runner")
            if view.start_queue_position:
                why = queued(view)
        return f"the {which} batch of {self.label}{slots}", why

    def _failed(self, lane: SlotLane, view: pb.SlotView, now: float) -> float:
        """Raise a failed slot's error once nothing more can arrive on its lane, else return the time of the next
        check."""
        if lane.consumer is None:
            if lane.tried_failed:
                self.raise_failed(view)
            return now
        if not lane.failed_since:
            lane.failed_since = now
        if now - lane.failed_since > FAILED_GRACE_S:
            self.raise_failed(view)
        return lane.failed_since + FAILED_GRACE_S

    def raise_failed(self, view: pb.SlotView) -> NoReturn:
        self.run.error = self._placed(error_of(view.error), view.slot)
        raise self.run.error

    def _placed(self, error: PenstockError, slot: int) -> PenstockError:
        run = self.run
        return placed(error, run.views[slot].worker, run.box, slot, self.position.step + 1)

    # ---- slots and their lanes

    def _first_lane(self, slot: int) -> SlotLane:
        return SlotLane(slot, 0, self._lane_name(slot, ""))

    def _lane_name(self, slot: int, worker: str) -> str:
        return f"box {self.run.box}, slot {slot}, worker {worker or 'unknown'}"

    def _refresh(self) -> None:
        """Apply new views: give each slot with another runner a new lane, and connect the lanes of ready slots."""
        run = self.run
        if isinstance(run.error, ForkedProcessError):
            raise run.error  # even if unprocessed frames remain, because they belong to the parent
        self._version = run.version
        notes = list[str]()
        now = time.monotonic()
        for view in run.views:
            slot = view.slot
            lane = self._lane_of(view)
            notes += self._notes_of(view)
            if self._start_queue[slot] > view.start_queue_position:
                self._queue_moved = now
            self._start_queue[slot] = view.start_queue_position
            if lane.consumer is None and view.phase == pb.READY:
                self._connect(lane, view, now)
        self._tell_of_loaders()
        why = next((view.capabilities.not_used for view in run.views if view.capabilities.not_used), "")
        if why and self.once("not used"):  # saves and recoveries are slower
            _log.warning("%s: %s", self.label, why)
        if any(view.capabilities.keeps_place for view in run.views) and self.once("keeps place"):
            _log.warning(
                "%s: the loader has state methods and no set_epoch: each epoch begins with what input_fn left",
                self.label,
            )
        self.stats.skipped = sum(view.skipped for view in run.views)
        for note in notes:
            warn_user(f"{self.label}: {note}")

    def _lane_of(self, view: pb.SlotView) -> SlotLane:
        slot, lane = view.slot, self._lanes[view.slot]
        if view.generation > lane.generation:
            moved = lane.generation > 0
            lane.close()
            lane = self._lanes[slot] = lane.next_generation(view.generation, self._lane_name(slot, view.worker))
            if moved:
                self.stats.recoveries += 1
            if moved and view.migrated:
                what = f"worker slot {slot} of box {self.run.box} was moved to worker {view.worker}: {view.note}"
                _log.info("%s: %s", self.label, what)
        return lane

    def _notes_of(self, view: pb.SlotView) -> list[str]:
        """Return the warnings that a slot's view gives reason for: its runner was restarted, or is slow."""
        notes, slot, box = [], view.slot, self.run.box
        again, self._restarts[slot] = view.restarts > self._restarts[slot], view.restarts
        if again and not view.migrated:
            frames = "" if view.doing else stack_in_a_line(view.stack)
            why = view.note or f"moved to worker {view.worker}"
            notes.append(recovered(box, slot, why) + (f". The runner died in {frames}" if frames else ""))
        if view.doing and view.doing != self._slow[slot]:
            notes.append(f"slow worker: slot {slot} of box {box} on worker {view.worker} is {view.doing}")
        self._slow[slot] = view.doing
        return notes

    def _connect(self, lane: SlotLane, view: pb.SlotView, now: float) -> bool:
        if view.generation != lane.generation or now < lane.retry_at:
            return False
        if view.phase == pb.FAILED and not lane.tried_failed and (view.local_address or view.tcp_address):
            lane.tried_failed = True  # batches that the runner produced before it failed may still arrive
        elif view.phase != pb.READY:
            lane.tried_failed = lane.tried_failed or view.phase == pb.FAILED
            return False
        position, run = self.position, self.run
        total = position.total[lane.slot]
        began = total - position.delivered[lane.slot]
        hello = lane_pb2.Hello(next_total=total + 1, epoch=position.epoch, began=began)
        hello.delivered = total
        hello.open_epochs = self._open_epochs
        hello.labels.extend(to_messages(position.labels))
        lane.hello(hello)
        lane.begin_try(run.replied_at)
        try:
            sock = run.dial(view, hello)
        except (OSError, PenstockError) as error:
            lane.lose(now, str(error))
            return False
        lane.attach(sock, run.wake_fd)
        return True

    # ---- between batches

    def flush(self) -> bool:
        total = self.position.total
        done = True
        for lane in self._lanes:
            done = lane.ack(total[lane.slot]) and done
        return done

    def open_epochs(self, limit: int, label: int | None = None) -> None:
        position = self.position
        if position.epoch <= self._open_epochs or label == position.label:
            label = None
        if label is not None:
            self._moving = True
            put_label(position.labels, position.epoch, label)
            self._moving = False
            self.run.report()  # a state that another box requests must have it
        if limit > self._open_epochs:
            self._open_epochs = limit
            for lane in self._lanes:
                if lane.consumer is not None:
                    if label is not None:
                        lane.consumer.label_epoch(position.epoch, label)
                    lane.consumer.open_epochs(limit)

    def announce(self, schedule: CheckpointSchedule, last: int | None) -> int | None:
        position = self.position
        pairs: list[list[int]] = [[] for _ in self._lanes]
        future = position.copy()
        for step in schedule.ahead(position.step, last, OUTRUN * len(self._lanes)):
            if step - future.step <= len(self._lanes):
                while future.step < step:
                    future.deliver()  # takes a tenth of the time of `advance`, which matters if every step is announced
            else:
                future = advance(future, step, {})
            for lane in self._lanes:
                if future.total[lane.slot] > position.total[lane.slot]:
                    pairs[lane.slot] += (step, future.total[lane.slot])
        pairs = [requests_of(slot_pairs) for slot_pairs in pairs]
        for lane in self._lanes:
            new = pairs[lane.slot]
            if new != lane.wanted and new and lane.consumer is not None:
                lane.consumer.want(new)
            lane.wanted = new
        return min((steps[(len(steps) // 2 - 1) // 2 * 2] for steps in pairs if steps), default=None)

    def abandon_epoch(self) -> None:
        position = self.position
        if not any(position.delivered):
            return  # no batch of the epoch was taken
        epoch = position.epoch
        self._abandoned.append((epoch, position.step))
        self.run.progress.abandoned = tuple(self._abandoned)
        for lane in self._lanes:
            lane.abandons += 1
            lane.abandoned_epoch = epoch
            lane.abandoned.append((epoch, position.total[lane.slot]))
            lane.unsettled = True
            lane.ack(position.total[lane.slot])
            if lane.consumer is not None:
                lane.consumer.abandon(epoch, position.total[lane.slot])
        self._moving = True
        position.abandon_epoch()
        self._moving = False
        self.run.progress.epoch_starts.add(position)
        # Report now: if another box requests a state before this box's next report, the state would lack the abandoned
        # epoch.
        self.run.report()

    def end_epoch(self) -> bool:
        # If a further batch comes before the epoch's end, the producer takes it back.
        self._ending = True
        try:
            return OrderedReader.next(self) is EPOCH_ENDED
        finally:
            self._ending = False

    @property
    def copies(self) -> int:
        return sum(lane.copies for lane in self._lanes)

    def open_lanes(self) -> list[Literal["local", "tcp"]]:
        views = self.run.views
        lanes = [lane for lane in list(self._lanes) if lane.consumer is not None]
        return ["tcp" if self.run.is_remote(views[lane.slot]) else "local" for lane in lanes]

    @property
    def held(self) -> int:
        return sum(len(ring.held) for lane in list(self._lanes) for ring in list(lane.rings.values()))

    def copy_position(self) -> records_pb2.BoxPosition | None:
        """Return the position, for the watch thread; None if it changes during each attempt to read it."""
        position = self.position
        for _ in range(1000):
            before = (position.step, position.epoch, len(position.live))
            if not self._moving:
                copied = position.to_proto()
                if not self._moving and before == (position.step, position.epoch, len(position.live)):
                    return copied
            time.sleep(0)  # the training thread is between two assignments
        return None

    def close(self) -> None:
        last = self.copy_position()
        self.run.progress.position = lambda: last  # the run's last report still needs the position
        self.run.progress.unreachable = list
        for lane in self._lanes:
            lane.close()
