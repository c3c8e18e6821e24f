"""Placement of slots on workers. Each operation changes the entities, their rows in the journal and the versions that
long polls compare together.

A box gets workers for all its slots at once, or for none, and the first box of a run only if there is room for them all
(slot_budgets.py). Slots of a box that has had workers are then moved one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set

from penstock.appliance.core import launch_restarts, quarantine, slot_budgets
from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Attempt, Box, MigrationTarget, Slot, SlotLoss, Worker, lane_protocol_of
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.rpc.wire_errors import detail_of, error_of
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

SLOTS_AT_ONCE = 1024
"""Slots that are placed, lost or failed before other calls are served: some 20 ms."""
LOSSES = 3
LOSS_WINDOW_S = 60.0
"""Seconds in which a slot may lose its runner at most LOSSES times without a batch delivered: a reboot or a preempted
node causes fewer losses, a poison batch more."""
UNREACHABLE_S = 600.0
"""Seconds for which a box's slots avoid a worker that it could not reach, as long as others have capacity."""
UNREACHABLE_AGAIN_S = 10.0
"""Seconds after which such a worker is tried again, if the box reaches no other: the network may have recovered."""


class Placement:
    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.migrating: dict[SlotKey, Slot] = {}
        """Slots that have a migration target."""
        self.waiting: dict[SlotKey, Slot] = {}
        """Slots that wait for a worker, in the order in which they began to wait."""
        self._to_place: deque[SlotKey] = deque()
        """Slots still to try in this round of `place_waiting`; a round tries all `waiting` ones, in several calls."""
        self._new: deque[SlotKey] = deque()
        """Slots that wait since the last round began. Only they are tried if there is no more room than it had."""
        self._room = (-1, -1)
        """Counters of what makes room, when the last round began."""
        self._stuck: dict[tuple[object, ...], int] = {}
        """input_fn and lane protocol, or credential, and whether the run has no workers yet -> fewest slots at once for
        which this round found no free capacity, or no budget."""

    def find_worker(self, slot: Slot, *barred: Set[str]) -> Worker | None:
        """Return the best worker; sets of `barred` names are tried in turn until one leaves free capacity."""
        opening = self._cluster.box_of(slot)[1].opening
        for names in barred:
            worker = self._cluster.free_capacity.choose(slot, opening, names)
            if worker is not None:
                return worker
        return None

    def enqueue(self, slot: Slot) -> None:
        """Let the slot wait for a worker."""
        self.waiting[slot.key] = slot
        self._new.append(slot.key)

    def place_waiting(self) -> None:
        """Give waiting slots to workers in order, SLOTS_AT_ONCE in a call: 16,384 would delay other calls."""
        begun = False  # whether this call has begun a round
        for _ in range(SLOTS_AT_ONCE):
            if self._cluster.free_capacity.is_full:
                self._to_place.clear()
                self._new.clear()
            elif not self._to_place and not begun:
                begun = True
                room = self._cluster.free_capacity.grown, self._cluster.budgets_freed
                if room != self._room:
                    self._room = room
                    # What runs have lost comes first: else runs that have not started would take it.
                    self._to_place.extend(key for key, slot in self.waiting.items() if slot.restarts)
                    self._to_place.extend(self.waiting)
                    self._stuck.clear()
                else:
                    self._to_place.extend(self._new)
                self._new.clear()
            if not self._to_place:
                return
            slot = self.waiting.get(self._to_place.popleft())
            if slot is None:  # its attempt has ended meanwhile
                continue
            attempt, box = self._cluster.box_of(slot)
            starts = not attempt.working
            kind = box.opening.loader.input_fn, lane_protocol_of(box.opening), starts
            count = 1 if box.working else slot_budgets.at_once(attempt)
            if count >= self._stuck.get(kind, count + 1):
                continue
            if not box.working:
                holder = box.credential, starts
                if count >= self._stuck.get(holder, count + 1):
                    continue
                if slot_budgets.exceeded(self._cluster, attempt, box):
                    self._stuck[holder] = count
                    continue
                if not slot_budgets.has_room(self._cluster, attempt, box):
                    self._stuck[kind] = count
                    continue
            whole = [slot] if box.working else [slot for slot in box.slots if slot.key in self.waiting]
            workers = self._find_workers(box, whole)
            if not workers:
                self._stuck[kind] = count
                continue
            for slot, worker in zip(whole, workers, strict=True):
                self._place(slot, worker)
            if not box.working:
                self._cluster.set_working(attempt, box, working=True)
                self._cluster.save_holder(attempt, box)
            self._cluster.bump_box(attempt, box)

    def _find_workers(self, box: Box, slots: Sequence[Slot]) -> list[Worker]:
        """Return a worker for each slot, which then has it; none if there is not one for each."""
        cluster, now = self._cluster, self._cluster.clock()
        far = (box.unreachable_since(now - UNREACHABLE_S), box.unreachable_since(now - UNREACHABLE_AGAIN_S))
        workers: list[Worker] = []
        grown = cluster.free_capacity.grown
        for slot in slots:
            worker = self.find_worker(slot, *far, frozenset())
            if worker is None:
                break
            worker.slots[slot.key] = box.assignment_size
            cluster.free_capacity.offer(worker)
            workers.append(worker)
        if len(workers) == len(slots):
            return workers
        for slot, worker in zip(slots, workers, strict=False):
            del worker.slots[slot.key]
            cluster.free_capacity.offer(worker)
        cluster.free_capacity.grown = grown
        return []

    def _place(self, slot: Slot, worker: Worker) -> None:
        del self.waiting[slot.key]
        slot.phase, slot.worker, slot.session = pb.STARTING, worker.name, worker.session
        # A slot that was ready once, or that has a durable snapshot, must be recovered. Another one just starts.
        slot.recovery = slot.restarts > 0 and (
            slot.ever_ready or bool(self._cluster.snapshot_index.snapshots(slot.key))
        )
        self._cluster.placed += 1
        self._cluster.save_slot(slot)
        self._cluster.bump_worker(worker.name)

    def take(self, slot: Slot) -> str:
        """Take the slot from its worker and return its name. The caller must raise the worker's version."""
        name = slot.worker
        worker = self._cluster.workers.get(name)
        if worker is not None:
            worker.slots.pop(slot.key, None)
        slot.worker = slot.session = ""
        self._cluster.placed -= 1
        return name

    def _detach(self, slot: Slot) -> bool:
        """Take the slot from its worker, and raise the worker's version; False if it has none."""
        if not slot.worker:
            return False
        self._cluster.bump_worker(self.take(slot))
        return True

    def move(
        self, slot: Slot, note: str, loss_at: float | None, making: records_pb2.Skip | None = None, stack: str = ""
    ) -> None:
        """Take the slot from its worker. Unless it has failed, its generation rises, and it goes to its migration
        target or waits for a worker. A slot that is lost too often fails or skips a batch (`_give_up`). `loss_at`:
        monotonic time of a death, None for a planned move; `making`: position of the batch that the runner was
        making; `stack`: its Python stack then (that of a stall is kept)."""
        attempt, box = self._cluster.box_of(slot)
        loser = slot.worker
        self._detach(slot)
        if slot.phase == pb.FAILED:  # its error is final; only its lane, with its last batches, is lost
            self._cluster.save_slot(slot)
            self._cluster.bump_box(attempt, box)
            return
        slot.generation = slot.next_generation
        slot.stack = stack or (slot.stack if slot.doing and loss_at is not None else "")
        slot.phase, slot.note, slot.doing, slot.migrated = pb.WAITING, note, "", False
        slot.start_queue_position, slot.start_stage = (0, 0), pb.START_STAGE_UNSPECIFIED
        slot.restarts += 1
        if loss_at is not None:
            loss = SlotLoss(loss_at, loser, note, box.total(slot.key.slot), making)
            horizon = loss_at - LOSS_WINDOW_S
            slot.losses = [*quarantine.relevant_losses(slot.losses, loss, horizon), loss]
        self._cluster.add_slot_event("slot moved" if loss_at is None else "slot lost", note, slot, loser)
        if len(slot.losses) > LOSSES:
            self._give_up(box, slot)
        restarts = slot.phase == pb.WAITING and launch_restarts.is_due(attempt, box, slot)
        slot.gauge.restart(self._cluster.clock())
        if slot.phase == pb.WAITING and slot.target is not None:
            self._give_to_target(slot)
        elif slot.phase == pb.WAITING:
            self.enqueue(slot)
        else:
            self.cancel_migration(slot)
        self._cluster.save_slot(slot)
        self._cluster.bump_box(attempt, box)
        if restarts:
            self.restart_all(attempt, f"{slot} would replay for {slot.worked_s:.0f} s alone ({note})")

    def _give_up(self, box: Box, slot: Slot) -> None:
        """Fail a slot that lost its runner too often, or skip the batch that killed it each time, if the run says."""
        position = quarantine.common_position(slot.losses)
        if position is None or not box.opening.loader.options.skip_poison:
            error = quarantine.loss_error(box, slot, position, LOSS_WINDOW_S)
            slot.phase, slot.error = pb.FAILED, detail_of(error)
            self._cluster.add_slot_event("slot failed", error.message, slot, "")
            return
        count, name = len(slot.losses), quarantine.name_of(box, slot, position)
        quarantine.skip_batch(slot, position)
        self._cluster.save_skip(slot, position.epoch, position.total)
        slot.note = f"{name} is quarantined and skipped: it killed its runner {count} times: {slot.note}"
        self._cluster.add_slot_event("batch quarantined", slot.note, slot, "")

    def restart_all(self, attempt: Attempt, why: str) -> None:
        """Let all slots of the run start anew from the newest saved state (launch_restarts.py)."""
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
        self._cluster.events.add("run restarted", note, run=attempt.run, attempt=attempt.number)
        for box in attempt.boxes.values():
            position = Position.from_proto(box.launch_start)
            box.history = deque([position, *(known for known in box.history if known.step > position.step)])
            self._cluster.save_box(attempt, box)
            for slot in box.slots:
                self._cluster.snapshot_index.drop_beyond(slot.key, -1)
                slot.worked_s = 0.0
                self.cancel_migration(slot)
                if slot.worker and slot.phase != pb.FAILED:
                    self.move(slot, note, None)
                    slot.migrated = True  # a planned move, of which the training job need not be warned
                slot.remade = [(slot.generation, -1)]  # no snapshot of an older generation is valid
            self._cluster.bump_box(attempt, box)

    def fail(self, slot: Slot, error: records_pb2.ErrorDetail) -> None:
        """Mark the slot as failed for good. It stays on its worker, whose ring has the batches before the error."""
        attempt, box = self._cluster.box_of(slot)
        self.cancel_migration(slot)
        # shortened, because every view of the slot contains it
        slot.phase, slot.error = pb.FAILED, detail_of(error_of(error))
        self._cluster.add_slot_event("slot failed", f"{slot}: {slot.error.message}", slot, slot.worker)
        self._cluster.save_slot(slot)
        self._cluster.bump_box(attempt, box)

    def vacate(self, slot: Slot, note: str) -> None:
        """Take the slot from its worker, because its box is lost or closed and needs no other one."""
        self.waiting.pop(slot.key, None)
        self.cancel_migration(slot)
        if self._detach(slot):
            slot.generation = slot.next_generation
            if slot.phase != pb.FAILED:
                slot.phase, slot.note, slot.doing, slot.stack = pb.WAITING, note, "", ""
                slot.start_queue_position, slot.start_stage = (0, 0), pb.START_STAGE_UNSPECIFIED
                slot.gauge.restart(0.0)
                slot.restarts += 1
        self._cluster.save_slot(slot)

    def drop_worker(self, worker: Worker, note: str, loss_at: float | None, kept: int = 0) -> None:
        """Take all slots but the first `kept` ones from the worker, as `move` does. A caller that lost it removes it
        from `workers`."""
        for slot in self._cluster.slots_of(worker)[kept:]:
            if slot.worker == worker.name:
                self.move(slot, note, loss_at)
            else:
                self.cancel_migration(slot)

    def start_migration(self, slot: Slot, worker: Worker, why: str, now: float) -> None:
        """Set a worker as the slot's migration target (migration.py)."""
        attempt, box = self._cluster.box_of(slot)
        slot.reserved = slot.next_generation
        attempt.note_generation(slot.reserved)
        slot.target = MigrationTarget(worker.name, worker.session, slot.reserved, why, now)
        self.migrating[slot.key] = slot
        self._cluster.journal.put("reserved", slot.key._asdict() | {"generation": slot.reserved})
        worker.slots[slot.key] = box.assignment_size
        self._cluster.placed += 1
        self._cluster.bump_worker(worker.name)
        self._cluster.bump_box(attempt, box)

    def cancel_migration(self, slot: Slot) -> None:
        target, slot.target = slot.target, None
        if target is None:
            return
        del self.migrating[slot.key]
        self._cluster.placed -= 1
        worker = self._cluster.workers.get(target.worker)
        if worker is not None and target.worker != slot.worker:
            worker.slots.pop(slot.key, None)
        self._cluster.bump_worker(target.worker)
        self._cluster.bump_worker(slot.worker)

    def complete_migration(self, slot: Slot, note: str, now: float) -> None:
        self._detach(slot)
        self._give_to_target(slot)
        slot.note, slot.doing, slot.moved_at, slot.migrated = note, "", now, True
        slot.gauge.restart(0.0)
        text = f"{slot} migrated to worker {slot.worker}: {note}"
        self._cluster.add_slot_event("slot migrated", text, slot, slot.worker)
        self._cluster.save_slot(slot)
        self._cluster.bump_box(*self._cluster.box_of(slot))

    def _give_to_target(self, slot: Slot) -> None:
        """Give the slot, already taken from its worker, to its migration target."""
        target, slot.target = slot.target, None
        assert target is not None
        del self.migrating[slot.key]
        slot.generation, slot.worker, slot.session = target.generation, target.worker, target.session
        slot.phase = pb.READY if target.ready_at else pb.STARTING
        slot.recovery, slot.batch_s = True, 0.0
        slot.moved_at = target.ready_at or target.since
        slot.capabilities = target.capabilities or slot.capabilities
        self._cluster.bump_worker(target.worker)
