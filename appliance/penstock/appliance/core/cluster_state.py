"""Cluster state: all runs and workers, and the operations that change them. Each operation changes four things
together: the objects, the journal's rows, the versions that long polls compare, and the list of slots that wait for a
worker. entities.py explains run, attempt, box and slot.

The operations are small: `move` takes a slot from its worker, `end` ends an attempt, and so on. state_machine.py
decides which call may make which change, and when.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from penstock.appliance.core import box_history, launch_restarts
from penstock.appliance.model.entities import (
    Attempt,
    AttemptState,
    Box,
    BoxPresence,
    ClosedAttempt,
    MigrationTarget,
    Run,
    Slot,
    SlotKey,
    SlotLoss,
    Worker,
    attempt_over,
    known_run,
)
from penstock.appliance.model.limits import Limits
from penstock.appliance.model.recent_events import RecentEvents
from penstock.appliance.policies import quarantine
from penstock.appliance.policies.lease_policy import LeasePolicy, SnapshotShare, of_boxes, of_workers, share
from penstock.appliance.policies.placement import FreeCapacity
from penstock.appliance.storage import journal_rows
from penstock.appliance.storage.journal import TABLES, Journal
from penstock.appliance.storage.snapshot_index import SnapshotIndex
from penstock.proto.errors import SupersededError, UnknownRunError
from penstock.proto.rpc.channel import detail_of, error_of
from penstock.proto.rpc.credentials.tickets import lane_key, make_ticket
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

BOX_COST = 4
"""Fixed time for releasing a box, in multiples of the time for one slot: added to the box's number of slots."""
FREE_AFTER_S = 5.0
"""Fewest seconds from an attempt's end until its boxes' memory is freed, when the journal has written them."""
Topic = tuple[str | int, ...]
"""Name of a thing whose change wakes waiting calls, such as ("worker", name) or ("box", run, attempt, box)."""


class ClusterState:
    """All runs and workers of a coordinator. `changed`: called with the topic of each change."""

    def __init__(
        self,
        journal: Journal,
        snapshot_index: SnapshotIndex,
        limits: Limits,
        changed: Callable[[Topic], None],
        events: RecentEvents,
    ) -> None:
        self.journal = journal
        self.snapshot_index = snapshot_index
        self.limits = limits
        self.changed = changed
        self.events = events
        self.runs: dict[str, Run] = {}
        self.workers: dict[str, Worker] = {}
        self.free_capacity = FreeCapacity(self.workers)
        self.fleet, self.fleet_at = 0, 0.0
        """Number of workers that the lease policy assumes, and the time when it was set: see `count_fleet`."""
        self.load_factor = 1.0
        """Divisor of the calls per second that peers may make; 1 = not overloaded: lease_policy.updated_load_factor."""
        self.live_boxes = 0
        self.slots_held: Counter[str] = Counter()
        """Digest of a credential token -> number of slots of the boxes that it opened, in open attempts."""
        self.placed = 0
        """Number of slots that workers hold. A slot with a migration target counts twice."""
        self.migrating: dict[SlotKey, Slot] = {}
        """Slots that have a migration target."""
        self.waiting: dict[SlotKey, Slot] = {}
        """Slots that wait for a worker, in the order in which they began to wait."""
        self._to_place: deque[SlotKey] = deque()
        """Slots still to try in this round of `place_waiting`. A round tries all `waiting` slots, in several calls."""
        self._is_round_unfinished = False
        """True if the last call of `place_waiting` ended before it had tried every waiting slot."""
        self._stuck: set[str] = set()
        """Values of input_fn ("module:function") for which this round found no worker with free capacity."""
        self._ended: deque[tuple[Attempt, list[Box]]] = deque()
        """Attempts that are over, each with the boxes whose slots are still to be taken from their workers. The last
        box of a list is handled first."""
        self._discarded: deque[Box] = deque()
        """Boxes of attempts that are over, whose memory `free_discarded` frees in pieces."""
        self._free_at = 0.0
        """Monotonic time from which `_discarded` may be freed; inf from the end of an attempt until the next tick, when
        `free_discarded` sets the time."""
        self.touched: set[tuple[str, int, int]] = set()
        """Keys (run, attempt, box) of boxes that changed since the state queries were last planned."""
        self.tickets_expire = 0
        """Time when tickets made from now on expire, in seconds since the Unix epoch: see credentials/tickets.py."""
        self._version = journal.boots << 32

    # ------------------------------------------------------------------------------------- versions, leases, tickets

    def next_version(self) -> int:
        """Return a version number higher than every earlier one of any object, including those before a restart."""
        self._version += 1
        return self._version

    def bump_worker(self, worker: Worker) -> None:
        self.free_capacity.offer(worker)
        worker.version = self.next_version()
        self.changed(("worker", worker.name))

    def bump_box(self, attempt: Attempt, box: Box) -> None:
        box.version = self.next_version()
        self.touch(attempt, box)
        self.changed(("box", attempt.run, attempt.number, box.number))

    def worker_lease_policy(self) -> LeasePolicy:
        return of_workers(max(self.fleet, len(self.workers)), self.load_factor, self.limits)

    def count_fleet(self, now: float) -> None:
        """Set the number of workers from which the lease policy is computed. A larger fleet counts at once, a smaller
        one only after `limits.shrinks_after_s`. Otherwise an overloaded coordinator that lost workers would ask the
        remaining ones for more frequent heartbeats, and lose them too."""
        if len(self.workers) >= self.fleet or now - self.fleet_at > self.limits.shrinks_after_s:
            self.fleet, self.fleet_at = len(self.workers), now

    def box_lease_policy(self) -> LeasePolicy:
        return of_boxes(self.live_boxes, self.load_factor, self.limits)

    def snapshot_share(self) -> SnapshotShare:
        """Return the quota of durable snapshots of one slot, for the present fleet."""
        calls_per_s = (
            len(self.workers) / self.worker_lease_policy().heartbeat_s
            + self.live_boxes / self.box_lease_policy().heartbeat_s
        )
        return share(self.placed, calls_per_s, self.limits)

    def touch(self, attempt: Attempt, box: Box) -> None:
        self.touched.add((attempt.run, attempt.number, box.number))

    def lane_key(self, key: SlotKey, generation: int) -> bytes:
        """Return the key by which a worker verifies the tickets of clients that open the slot's lane. The key is
        derived from the journal's secret, so it is the same after a restart without being stored."""
        return lane_key(self.journal.secret, *key, generation)

    def ticket(self, key: SlotKey, generation: int) -> str:
        """Return the ticket that a client must present when it opens the slot's lane."""
        return make_ticket(self.lane_key(key, generation), self.tickets_expire)

    # ----------------------------------------------------------------------------------------------------- finding

    def attempt(self, run_name: str, number: int) -> Attempt:
        """Return the open attempt of the run, if its number is `number`. Raises UnknownRunError for an unknown run or
        attempt, SupersededError if attempt `number` is over."""
        run = known_run(self.runs, run_name)
        if run.current is not None and run.current.number == number:
            return run.current
        past = run.past.get(number)
        if past is not None:
            raise attempt_over(past)
        if number < run.attempt:
            raise SupersededError(
                f"attempt (launch) {number} of run {run_name} is over, the newest is {run.attempt}: end this process"
            )
        raise UnknownRunError(
            f"run {run_name} has no attempt (launch) {number}; the newest one is {run.attempt}: start the job again"
        )

    def slot(self, key: SlotKey) -> Slot | None:
        run = self.runs.get(key.run)
        if run is None or run.current is None or run.current.number != key.attempt:
            return None
        box = run.current.boxes.get(key.box)
        return box.slots[key.slot] if box is not None and key.slot < len(box.slots) else None

    def open_attempts(self) -> list[Attempt]:
        return [run.current for run in self.runs.values() if run.current is not None]

    @property
    def is_between_slices(self) -> bool:
        """True if `release_ended` or `place_waiting` stopped before the last slot, and must be called again."""
        return bool(self._ended) or self._is_round_unfinished

    def is_open(self, slot: Slot) -> bool:
        """Return whether the slot's attempt is open."""
        return self.slot(slot.key) is slot

    def box_of(self, slot: Slot) -> tuple[Attempt, Box]:
        attempt = self.runs[slot.key.run].current
        assert attempt is not None
        return attempt, attempt.boxes[slot.key.box]

    # ------------------------------------------------------------------------------------------------ the journal

    def save_run(self, run: Run) -> None:
        self.journal.put("runs", journal_rows.run_row(run))

    def save_attempt(self, attempt: Attempt) -> None:
        self.journal.put("attempts", journal_rows.attempt_row(attempt))

    def save_box(self, attempt: Attempt, box: Box) -> None:
        self.journal.put("boxes", journal_rows.box_row(attempt, box))

    def save_slot(self, slot: Slot) -> None:
        attempt, _ = self.box_of(slot)
        attempt.note_generation(slot.generation)
        self.journal.put("slots", journal_rows.slot_row(slot))

    def _save_skip(self, slot: Slot, epoch: int, total: int) -> None:
        self.journal.put("skips", journal_rows.skip_row(slot, epoch, total))

    def save_abandoned(self, attempt: Attempt, box: Box, epoch: int) -> None:
        self.journal.put("abandoned", journal_rows.abandoned_row(attempt, box, epoch))

    def save_history(self, attempt: Attempt, box: Box) -> None:
        """Save the box's history in the journal, for `penstock replay` after the attempt's end."""
        self.journal.put("tracks", _history_row(attempt, box))

    def history(self, run_name: str, box_number: int) -> box_history.BoxHistory | None:
        """Return the box's history in the run's open attempt; None if the run is not open or the box not in it."""
        run = self.runs.get(run_name)
        attempt = run.current if run is not None else None
        box = attempt.boxes.get(box_number) if attempt is not None else None
        return None if attempt is None or box is None else box_history.with_snapshots(attempt, box, self.snapshot_index)

    def forget(self, run: Run) -> None:
        """Remove from memory and from the journal a run that will not be opened again."""
        for table in TABLES:
            self.journal.drop(table, run=run.name)
        del self.runs[run.name]

    # ---------------------------------------------------------------------------------------------------- attempts

    def add_box(
        self,
        attempt: Attempt,
        client: str,
        request: pb.OpenRunRequest,
        start: Position,
        now: float,
        credential: str = "",
    ) -> Box:
        run = self.runs[attempt.run]
        self.live_boxes += 1
        lease = now + self.box_lease_policy().lease_s
        box = Box(
            request.box, client, request, start, BoxPresence.LIVE, lease, 0, credential=credential, reported_at=now
        )
        self.slots_held[credential] += attempt.num_workers
        box.history.append(start)
        attempt.add_box(box)
        for number in range(attempt.num_workers):
            slot = Slot(SlotKey(attempt.run, attempt.number, box.number, number), run.generation + 1)
            box.slots.append(slot)
            self.waiting[slot.key] = slot
            self.save_slot(slot)
        self.save_box(attempt, box)
        self.bump_box(attempt, box)
        text = (
            f"box {box.number} of {attempt.topology} is in attempt {attempt.number}, from host {request.host_id or '?'}"
        )
        self.events.add("box opened", text, run=attempt.run, attempt=attempt.number, box=box.number)
        return box

    def end(self, attempt: Attempt, state: AttemptState, why: str) -> None:
        """End the attempt. From now on its calls are refused with the reason `why`. Its slots stay on their workers
        until `release_ended` takes them; after a restart of the coordinator they are on no worker. No box is visited,
        because a run may have 16,384 boxes and other calls would wait meanwhile."""
        run = self.runs[attempt.run]
        attempt.state, attempt.why = state, why
        self.events.add(f"attempt {state.value}", why, run=attempt.run, attempt=attempt.number)
        run.current = None
        boxes = attempt.boxes.values()
        for credential, count in attempt.credentials.items():
            self.slots_held[credential] -= count * attempt.num_workers
        if boxes:
            self._ended.append((attempt, list(reversed(boxes))))
            self._discarded.extend(boxes)
            self._free_at = math.inf
        # the box's number does not matter: `settle` looks at the attempt only
        self.touched.add((attempt.run, attempt.number, next(iter(attempt.boxes), 0)))
        run.generation = max(run.generation, attempt.generation)
        run.past[attempt.number] = ClosedAttempt(attempt.number, attempt.key, state, why, attempt.clients)
        which: dict[str, str | int] = {"run": attempt.run, "attempt": attempt.number}
        self.journal.put_all("boxes", lambda: (journal_rows.box_row(attempt, box) for box in boxes), **which)
        self.journal.put_all("tracks", lambda: (_history_row(attempt, box) for box in boxes), **which)
        for table in ("slots", "skips", "abandoned", "reserved"):
            self.journal.drop(table, **which)
        self.save_attempt(attempt)
        self.save_run(run)
        while len(run.past) > self.limits.past_attempts:
            oldest = min(run.past)
            del run.past[oldest]
            self.journal.drop("attempts", run=run.name, attempt=oldest)
            self.journal.drop("boxes", run=run.name, attempt=oldest)
            self.journal.drop("tracks", run=run.name, attempt=oldest)
        self.snapshot_index.drop_attempt(attempt.run, attempt.number)

    def release_ended(self) -> bool:
        """Take slots of ended attempts from their workers, about `limits.slots_at_once` in one call, and wake calls of
        their boxes. Return whether all are taken. Until then no slot is placed: the capacity is not free yet."""
        left: set[str] = set()
        taken = 0
        while self._ended and taken < self.limits.slots_at_once:
            attempt, boxes = self._ended[0]
            box = boxes.pop()
            if not boxes:
                self._ended.popleft()
            taken += len(box.slots)
            for slot in box.slots:
                self.cancel_migration(slot)
                if slot.worker:
                    left.add(self._take(slot))
                self.waiting.pop(slot.key, None)
            box.version = self.next_version()
            self.changed(("box", attempt.run, attempt.number, box.number))
        for name in sorted(left):
            if name in self.workers:
                self.bump_worker(self.workers[name])
        return not self._ended

    def free_discarded(self, now: float) -> None:
        """Free the memory of boxes of ended attempts, of about `limits.slots_at_once` slots in one call. Python would
        free an attempt with all its boxes at once, some 10 us for each: 0.2 s for 16,384 boxes. So a list keeps the
        boxes until FREE_AFTER_S seconds after an attempt ended, when the journal's thread has written them."""
        if self._free_at == math.inf:
            self._free_at = now + FREE_AFTER_S
        freed = 0
        while self._discarded and now >= self._free_at and freed < self.limits.slots_at_once:
            freed += BOX_COST + len(self._discarded.popleft().slots)

    def vacate(self, attempt: Attempt, box: Box, presence: BoxPresence, note: str) -> None:
        """Take all slots of the box from their workers, because its client is lost or has closed it. `note`: reason."""
        attempt.set_presence(box, presence)
        kind = "box lost" if presence is BoxPresence.GONE else "box closed"
        self.events.add(kind, note, run=attempt.run, attempt=attempt.number, box=box.number)
        if box.reported:
            self.save_history(attempt, box)
        for slot in box.slots:
            self.waiting.pop(slot.key, None)
            self.cancel_migration(slot)
            if self._detach(slot):
                slot.generation = slot.next_generation
                if slot.phase != pb.FAILED:
                    slot.phase, slot.note, slot.doing, slot.stack = pb.WAITING, note, "", ""
                    slot.start_queue_position, slot.start_stage = (0, 0), pb.START_STAGE_UNSPECIFIED
                    slot.gauge.restart(0.0)
                    slot.restarts += 1
            self.save_slot(slot)
        self.save_box(attempt, box)
        self.bump_box(attempt, box)

    def revive(self, attempt: Attempt, box: Box, now: float) -> None:
        """Mark the box's client as live again, because it has reported after its lease had ended."""
        attempt.set_presence(box, BoxPresence.LIVE)
        text = f"the training job of box {box.number} reported again"
        self.events.add("box back", text, run=attempt.run, attempt=attempt.number, box=box.number)
        box.lease_until = now + self.box_lease_policy().lease_s
        for slot in box.slots:
            if slot.phase == pb.WAITING:
                self.waiting[slot.key] = slot
        self.save_box(attempt, box)
        self.bump_box(attempt, box)

    # ------------------------------------------------------------------------------------------------------- slots

    def _add_slot_event(self, kind: str, text: str, slot: Slot, worker: str) -> None:
        numbers = {name: value for name, value in slot.key._asdict().items() if name != "run"}
        self.events.add(kind, text, run=slot.key.run, worker=worker, generation=slot.generation, **numbers)

    def _take(self, slot: Slot) -> str:
        """Take the slot from its worker and return the worker's name. The caller must then raise the version of the
        worker, so that the worker's long poll is answered."""
        name = slot.worker
        worker = self.workers.get(name)
        if worker is not None:
            worker.slots.discard(slot.key)
        slot.worker = slot.session = ""
        self.placed -= 1
        return name

    def _detach(self, slot: Slot) -> bool:
        """Take the slot from its worker, and raise the worker's version. Return False if the slot has no worker."""
        if not slot.worker:
            return False
        worker = self.workers.get(self._take(slot))
        if worker is not None:
            self.bump_worker(worker)
        return True

    def move(
        self, slot: Slot, note: str, loss_at: float | None, making: records_pb2.Skip | None = None, stack: str = ""
    ) -> None:
        """Take the slot from its worker. Unless it has failed, its generation rises, and it goes to its migration
        target, if it has one, or else waits for a worker. A slot that is lost too often fails or skips a batch:
        `_give_up`. `note`: reason. `loss_at`: monotonic time of the death if a runner, worker or client died; None for
        a planned move, which is no loss. `making`: position of the batch that the runner was making when it died.
        `stack`: its Python stack then, "" if not known; that of a stall, if it was stalled, is kept.
        """
        attempt, box = self.box_of(slot)
        loser = slot.worker
        self._detach(slot)
        if slot.phase == pb.FAILED:  # its error is final; only its lane, with its last batches, is lost
            self.save_slot(slot)
            self.bump_box(attempt, box)
            return
        slot.generation = slot.next_generation
        slot.stack = stack or (slot.stack if slot.doing and loss_at is not None else "")
        slot.phase, slot.note, slot.doing, slot.migrated = pb.WAITING, note, "", False
        slot.start_queue_position, slot.start_stage = (0, 0), pb.START_STAGE_UNSPECIFIED
        slot.restarts += 1
        if loss_at is not None:
            loss = SlotLoss(loss_at, loser, note, box.total(slot.key.slot), making)
            horizon = loss_at - self.limits.loss_window_s
            slot.losses = [*quarantine.relevant_losses(slot.losses, loss, horizon), loss]
        self._add_slot_event("slot moved" if loss_at is None else "slot lost", note, slot, loser)
        if len(slot.losses) > self.limits.losses:
            self._give_up(box, slot)
        restarts = slot.phase == pb.WAITING and launch_restarts.is_due(attempt, box, slot)
        slot.gauge.restart(self.events.now)
        if slot.phase == pb.WAITING and slot.target is not None:
            self._give_to_target(slot)
        elif slot.phase == pb.WAITING:
            self.waiting[slot.key] = slot
        else:
            self.cancel_migration(slot)
        self.save_slot(slot)
        self.bump_box(attempt, box)
        if restarts:
            self.restart_all(attempt, f"{slot} would replay for {slot.worked_s:.0f} s alone ({note})")

    def _give_up(self, box: Box, slot: Slot) -> None:
        """Fail a slot that lost its runner too often. If the same batch killed the runner each time, and the run says
        that such batches are skipped, skip the batch instead."""
        position = quarantine.common_position(slot.losses)
        if position is None or not box.opening.loader.options.skip_poison:
            error = quarantine.loss_error(box, slot, position, self.limits.loss_window_s)
            slot.phase, slot.error = pb.FAILED, detail_of(error)
            self._add_slot_event("slot failed", error.message, slot, "")
            return
        count, name = len(slot.losses), quarantine.name_of(box, slot, position)
        quarantine.skip_batch(slot, position)
        self._save_skip(slot, position.epoch, position.total)
        slot.note = f"{name} is quarantined and skipped: it killed its runner {count} times: {slot.note}"
        self._add_slot_event("batch quarantined", slot.note, slot, "")

    def restart_all(self, attempt: Attempt, why: str) -> None:
        """Let all slots of the run start anew from the newest saved state: see launch_restarts.py."""
        offered, attempt.offered = attempt.offered, []
        for number, box in attempt.boxes.items():
            box.opening.restart.CopyFrom(offered[number])
        step = offered[0].start.step
        self._begin_again(attempt, f"all slots of the run restart from its state of step {step}: {why}")

    def take_back_restart(self, attempt: Attempt, why: str) -> None:
        """Let all slots of the run start anew where the launch began, and restart it no more."""
        step = next(iter(attempt.boxes.values())).launch_step
        attempt.restarts_refuted, attempt.offered = True, []
        for box in attempt.boxes.values():
            box.opening.ClearField("restart")
        note = f"the loader does not continue exactly from its state of step {step}, so all slots of the run replay"
        self._begin_again(attempt, f"{note} from where the launch began: {why}")

    def _begin_again(self, attempt: Attempt, note: str) -> None:
        attempt.restarts += 1
        attempt.name_blobs()
        self.events.add("run restarted", note, run=attempt.run, attempt=attempt.number)
        for box in attempt.boxes.values():
            position = Position.from_proto(box.launch_start)
            box.history = deque([position, *(known for known in box.history if known.step > position.step)])
            self.save_box(attempt, box)
            for slot in box.slots:
                self.snapshot_index.drop_beyond(slot.key, -1)
                slot.worked_s = 0.0
                self.cancel_migration(slot)
                if slot.worker and slot.phase != pb.FAILED:
                    self.move(slot, note, None)
                    slot.migrated = True  # a planned move, of which the training job need not be warned
                slot.remade = [(slot.generation, -1)]  # no snapshot of an older generation is valid
            self.bump_box(attempt, box)

    def fail(self, slot: Slot, error: records_pb2.ErrorDetail) -> None:
        """Mark the slot as failed for good. A slot that has a worker stays there, because the batches made before the
        error are still delivered from the worker's ring."""
        attempt, box = self.box_of(slot)
        self.cancel_migration(slot)
        # shortened, because every view of the slot contains it
        slot.phase, slot.error = pb.FAILED, detail_of(error_of(error))
        self._add_slot_event("slot failed", f"{slot}: {slot.error.message}", slot, slot.worker)
        self.save_slot(slot)
        self.bump_box(attempt, box)

    def note_rate(self, slot: Slot, report: pb.SlotReport, now: float) -> None:
        """Record the speed of the slot's runner, and how many batches it is ahead of the loop, from a worker's report.
        While the runner starts, record its stage, and its place among the runners that wait to start on the worker."""
        slot.batches_per_s, slot.batch_s = report.batches_per_s, report.batch_s
        slot.worked_s = max(slot.worked_s, report.worked_s)  # a runner may die in its replay
        slot.batch_cpu_s, slot.batch_delay_s = report.batch_cpu_s, report.batch_delay_s
        _, box = self.box_of(slot)
        start_queue_position = report.start_queue_position, report.start_queue_length
        if (start_queue_position, report.start_stage) != (slot.start_queue_position, slot.start_stage):
            slot.start_queue_position, slot.start_stage = start_queue_position, report.start_stage
            # The position is sent with the next reply, at most one heartbeat later. It does not wake the boxes' calls:
            # each start changes the positions of all queued slots, so n slots would cause n * n calls.
            box.version = self.next_version()
        slot.gauge.report(now, report.produced, max(report.delivered, box.total(slot.key.slot)))
        if slot.gauge.lost_at and not slot.gauge.behind:
            lost_at, slot.gauge.lost_at = slot.gauge.lost_at, 0.0
            text = f"{slot} continues on worker {slot.worker}, {now - lost_at:.1f} s after it lost its runner"
            self._add_slot_event("slot recovered", text, slot, slot.worker)

    def place_waiting(self) -> None:
        """Give waiting slots to workers with free capacity, in the order in which they began to wait. One call tries
        `limits.slots_at_once` of them, because placing 16,384 at once would delay other calls; the next continues."""
        self._is_round_unfinished = True
        begun = False  # whether this call has begun a round
        for _ in range(self.limits.slots_at_once):
            if self.free_capacity.is_full:
                self._to_place.clear()
            elif not self._to_place and not begun:
                begun = True
                self._to_place.extend(self.waiting)
                self._stuck.clear()
            if not self._to_place:
                self._is_round_unfinished = False
                return
            slot = self.waiting.get(self._to_place.popleft())
            if slot is None:  # its attempt has ended meanwhile
                continue
            attempt, box = self.box_of(slot)
            opened, input_fn = box.opening, box.opening.loader.input_fn
            if input_fn in self._stuck:
                continue
            far = box.unreachable_since(self.events.now - self.limits.unreachable_s) if box.unreachable else set()
            worker = self.free_capacity.choose(slot, opened.host_id, input_fn, far)
            if worker is None and far:
                far = box.unreachable_since(self.events.now - self.limits.unreachable_again_s)
                worker = self.free_capacity.choose(slot, opened.host_id, input_fn, far)
                worker = worker or self.free_capacity.choose(slot, opened.host_id, input_fn)
            if worker is None:
                self._stuck.add(input_fn)
                continue
            del self.waiting[slot.key]
            slot.phase, slot.worker, slot.session = pb.STARTING, worker.name, worker.session
            # A slot that was ready once, or that has a durable snapshot, must be recovered. Another one just starts.
            slot.recovery = slot.restarts > 0 and (slot.ever_ready or bool(self.snapshot_index.snapshots(slot.key)))
            worker.slots.add(slot.key, box.assignment_size)
            self.placed += 1
            self.save_slot(slot)
            self.bump_worker(worker)
            self.bump_box(attempt, box)

    def drop_silent(self, now: float, patience_s: float = 0.0) -> None:
        """Drop workers whose leases ended more than `patience_s` seconds ago. After `limits.slots_at_once` slots the
        method stops, and the next call continues."""
        moved = 0
        for worker in [worker for worker in self.workers.values() if worker.lease_until + patience_s <= now]:
            if moved >= self.limits.slots_at_once:
                break
            moved += len(worker.slots)
            del self.workers[worker.name]
            note = f"worker {worker.name} has not reported for {now - worker.seen_at:.1f} s"
            if not worker.left:
                self.events.add("worker lost", note, worker=worker.name)
            self.drop_worker(worker, note, now)

    def drop_worker(self, worker: Worker, note: str, loss_at: float | None) -> None:
        """Take all slots from the worker, as `move` does. A caller that lost the worker removes it from `workers`."""
        for key in sorted(worker.slots):
            slot = self.slot(key)
            if slot is not None and slot.worker == worker.name:
                self.move(slot, note, loss_at)
            elif slot is not None:
                self.cancel_migration(slot)
        worker.slots.clear()

    # ------------------------------------------------------------------------------------------- migration targets

    def start_migration(self, slot: Slot, worker: Worker, why: str, now: float) -> None:
        """Set a worker as the slot's migration target: see migration.py. `why`: reason, for people."""
        attempt, box = self.box_of(slot)
        slot.reserved = slot.next_generation
        attempt.note_generation(slot.reserved)
        slot.target = MigrationTarget(worker.name, worker.session, slot.reserved, why, now)
        self.migrating[slot.key] = slot
        self.journal.put("reserved", slot.key._asdict() | {"generation": slot.reserved})
        worker.slots.add(slot.key, self.box_of(slot)[1].assignment_size)
        self.placed += 1
        self.bump_worker(worker)
        self.bump_box(attempt, box)

    def cancel_migration(self, slot: Slot) -> None:
        """Remove the slot's migration target, if the slot has one. The slot stays on its present worker."""
        target, slot.target = slot.target, None
        if target is None:
            return
        del self.migrating[slot.key]
        self.placed -= 1
        for name in (target.worker, slot.worker):
            worker = self.workers.get(name)
            if worker is not None:
                if name != slot.worker:
                    worker.slots.discard(slot.key)
                self.bump_worker(worker)

    def complete_migration(self, slot: Slot, note: str, now: float) -> None:
        """Move the slot from its present worker to its migration target. `note`: reason, for people."""
        self._detach(slot)
        self._give_to_target(slot)
        slot.note, slot.doing, slot.moved_at, slot.migrated = note, "", now, True
        slot.gauge.restart(0.0)
        text = f"{slot} migrated to worker {slot.worker}: {note}"
        self._add_slot_event("slot migrated", text, slot, slot.worker)
        self.save_slot(slot)
        self.bump_box(*self.box_of(slot))

    def _give_to_target(self, slot: Slot) -> None:
        """Give the slot to its migration target. The slot must have been taken from its worker before."""
        target, slot.target = slot.target, None
        assert target is not None
        del self.migrating[slot.key]
        slot.generation, slot.worker, slot.session = target.generation, target.worker, target.session
        slot.phase = pb.READY if target.ready_at else pb.STARTING
        slot.recovery, slot.batch_s = True, 0.0
        slot.moved_at = target.ready_at or target.since
        slot.capabilities = target.capabilities or slot.capabilities
        worker = self.workers.get(target.worker)
        if worker is not None:
            self.bump_worker(worker)


def _history_row(attempt: Attempt, box: Box) -> journal_rows.Row:
    return journal_rows.history_row(attempt, box, box_history.history_of(attempt, box).thinned().serialised)
