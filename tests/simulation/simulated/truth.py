"""Truth that no process of the system can know, and the promises that are checked against it.

Every actor reports here what it did and heard; the coordinator's disk reports each commit, and its edge each reply. A
promise is checked at the moment at which it could first be seen to be broken, by its name in PROMISES: the name is what
a failing seed prints, and what the table of mutations speaks of.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from simulated.cluster import Before, check_cluster, check_disk, check_moves
from simulated.disk import Disk
from simulated.reference import Batch, BoxPlan, RunPlan
from simulated.virtual import World

from penstock.appliance.core.entities import client_of
from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.appliance.limits import Limits
from penstock.proto.errors import (
    DeadlineError,
    PenstockError,
    StateUnavailableError,
    SupersededError,
    UnknownRunError,
    WorkerLostError,
)
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = ["PROMISES", "Base", "Owner", "Truth"]

PROMISES = (
    "one owner per slot and generation",
    "generations and attempts only rise",
    "what is said is on disk",
    "the cluster state agrees with the journal",
    "who is superseded owns nothing",
    "a slot moves only for a cause",
    "a slot is ready when its runner is",
    "nobody holds more than it has room for",
    "nothing waits unnamed",
    "a budget has what is in use",
    "a lease is whole",
    "a durable snapshot can be had",
    "the budget has what is kept",
    "a saved state is what was delivered",
    "a state that cannot be had is named",
    "batches come once and in order",
    "a change of the mixture is exact",
    "a ticket opens its lane",
    "a new launch gets its place",
    "no exception is left over",
    "every run ends",
)

Owner = tuple[str, str]
"""A worker's name and session."""
Key = tuple[str, int, int, int, int]
"""(run, attempt, box, slot, generation)."""


@dataclass(frozen=True, order=True)
class Base:
    """A snapshot, or the opening of an epoch."""

    epoch: int
    total: int
    delivered: int
    """Number in its epoch."""


@dataclass
class Truth:
    world: World
    disk: Disk
    limits: Limits
    plans: dict[str, RunPlan]
    healed_at: float = 0.0
    """No fault has happened since, and none is under way; 0 while they do."""
    state_machine: StateMachine | None = None
    before: Before = field(default_factory=Before)
    stirred: bool = False
    """Something that somebody looks at has changed since the last commit."""
    saves: int = 0
    deliveries: int = 0
    _owners: dict[Key, Owner] = field(default_factory=dict)
    _ready: set[Key] = field(default_factory=set)
    _lost: set[Key] = field(default_factory=set)
    _failed: set[Key] = field(default_factory=set)
    _acknowledged: dict[SlotKey, set[Base]] = field(default_factory=lambda: defaultdict(set))
    _attempts: dict[str, int] = field(default_factory=dict)
    """Run -> the highest attempt that anybody was told."""
    _generations: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """(run, box, slot) -> the highest generation that anybody was told."""
    mixed_from: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Run -> steps from which on its mixture changes -> attempt in which the change was made."""
    _served: dict[tuple[str, int, int, int], int] = field(default_factory=dict)
    _steps: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """(run, attempt, box) -> the last step that its loop was handed."""
    _reported: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """... that the coordinator was told."""
    _came: dict[Owner, float] = field(default_factory=dict)
    """Time when a registration came. Its lease begins then; whether it succeeded is known when its reply leaves."""
    _snapshots_checked: tuple[int, ...] = ()
    """Bytes in the snapshot index, and the step of each box, when its snapshots were last checked."""

    def _must(self, holds: bool, promise: str, what: str) -> None:
        if not holds:
            self.world.violated(promise, what)

    def plan(self, run: str, box: int) -> BoxPlan:
        return self.plans[run].boxes[box]

    # ---- the coordinator

    def booted(self, state_machine: StateMachine) -> None:
        self.state_machine = state_machine
        now, limits, cluster = self.world.now, self.limits, state_machine.cluster
        self.before.boot(now)
        for worker in cluster.workers.values():
            whole = worker.lease_until >= now + limits.worker_lease_s
            self._must(whole, "a lease is whole", f"worker {worker.name} has less than one after a restart")
        for attempt in cluster.open_attempts():
            for box in attempt.boxes.values():
                whole = box.lease_until >= now + limits.client_lease_s
                self._must(whole, "a lease is whole", f"box {box.number} has less than one after a restart")
        for name, number in self._attempts.items():
            run = cluster.runs.get(name)
            known = run is not None and run.attempt >= number
            self._must(known, "generations and attempts only rise", f"attempt {number} of {name} is forgotten")
        self._snapshots_checked = ()

    def changed(self, wrote: bool) -> None:
        """Check the promises after every event at the coordinator. `wrote`: rows are about to be written."""
        state_machine = self.state_machine
        if state_machine is None:
            return  # it is booting
        # A report may drop as many bytes as snapshots have brought: its step shows that there is something to check.
        boxes = [box for attempt in state_machine.cluster.open_attempts() for box in attempt.boxes.values()]
        snapshots = (state_machine.cluster.snapshot_index.used, *(box.step for box in boxes))
        if snapshots != self._snapshots_checked:
            self._snapshots_checked = snapshots
            self._check_snapshots(state_machine)
        if not wrote and not self.stirred:
            return
        self.stirred = False
        fail = self.world.violated
        check_cluster(fail, state_machine, self.before.settled(state_machine, self.world.now))
        check_moves(fail, state_machine, self.before, self._lost, self.limits, self.world.now)
        for attempt in state_machine.cluster.open_attempts():
            for box in attempt.boxes.values():
                for slot in box.slots:
                    if slot.phase == pb.READY and (*slot.key, slot.generation) not in self._ready:
                        fail("a slot is ready when its runner is", f"generation {slot.generation} of {slot.key} is not")
                    told = self._generations.get((slot.key.run, slot.key.box, slot.key.slot), 0)
                    if max(slot.generation, slot.reserved) < told:
                        fail("generations and attempts only rise", f"{slot.key}: {slot.generation} after {told}")

    def written(self) -> None:
        """All that was put is on disk."""
        if self.state_machine is not None:
            check_disk(self.world.violated, self.state_machine, self.disk)

    def _check_snapshots(self, state_machine: StateMachine) -> None:
        """Check that acknowledged snapshots, or equally good ones, serve every position that may be asked for."""
        snapshot_index = state_machine.cluster.snapshot_index
        kept_by_slot = [kept for slots in snapshot_index._snapshots.values() for kept in slots.values()]
        held = sum(one.size for kept in kept_by_slot for one in kept)
        held += sum(blob.size for blob in snapshot_index._blobs.values())
        counted = snapshot_index.used
        self._must(counted == held, "the budget has what is kept", f"{counted} bytes are counted, {held} are kept")
        for attempt in state_machine.cluster.open_attempts():
            for box in attempt.boxes.values():
                plan = self.plan(attempt.run, box.number)
                where = (attempt.run, attempt.number, box.number)
                self._reported[where] = max(box.step, self._reported.get(where, 0))
                oldest = plan.records[max(box.start.step, self._reported[where] - box.retention)]
                for slot in box.slots:
                    kept = snapshot_index.snapshots(slot.key)
                    for one in kept:
                        stored = self.disk.snapshots.get((slot.key, one.total, one.epoch))
                        if stored is None or len(stored[1]) != one.size:
                            self.world.violated("a durable snapshot can be had", f"{slot.key} {one} is not on disk")
                    acknowledged = self._acknowledged.get(slot.key)
                    if not acknowledged:
                        continue
                    k = slot.key.slot
                    place = (oldest.epoch, oldest.total[k])
                    had = {(start.epoch, start.total) for start in acknowledged}
                    best = self._best(plan, k, had, place)
                    now = self._best(plan, k, {(one.epoch, one.total) for one in kept}, place)
                    if best is not None and now is None:
                        what = f"{slot.key} can be asked for {place} (pass, batch), where {best} served; kept is {kept}"
                        self.world.violated("a durable snapshot can be had", what)

    def _best(
        self, plan: BoxPlan, slot: int, starts: set[tuple[int, int]], place: tuple[int, int]
    ) -> tuple[int, int] | None:
        usable = [start for start in starts if plan.usable(slot, start, place)]
        before = [start for start in usable if start[1] < place[1]] or usable
        return max(before, default=None)

    def arrived(self, method: str, request: Any) -> None:
        assert self.state_machine is not None
        if method == "Heartbeat":
            worker = self.state_machine.cluster.workers.get(request.worker)
            if worker is not None and worker.session == request.session and worker.registered:
                self.before.heard[request.worker] = self.before.awake(self.world.now)
                self.before.hung_up.discard(request.worker)
        elif method == "RegisterWorker":
            self._came[request.worker, request.session] = self.before.awake(self.world.now)
        elif method == "OpenRun":
            self._hears(f"{request.job}/{request.ordinal}", request)
        told = request if method == "WatchRun" else getattr(request, "progress", pb.WatchRunRequest())
        if told.run:
            self._hears(told.run, told)
        for claim in told.unreachable:
            self._lost.add((told.run, told.attempt, told.box, claim.slot, claim.generation))

    def _hears(self, run: str, told: pb.OpenRunRequest | pb.WatchRunRequest) -> None:
        self.before.heard_box[run, told.box, client_of(told.client_id)] = self.before.awake(self.world.now)

    def replies(self, method: str, request: Any, reply: Any) -> None:
        """Just before a reply leaves: what it says must be on disk."""
        if self.world.diary is not None:
            self.world.note("coordinator", f"answers {method} {_brief(request)} -> {_brief(reply)}")
        promise, must = "what is said is on disk", self._must
        tables = self.disk.tables
        if method == "OpenRun":
            row = tables["runs"].get((reply.run,))
            must(
                row is not None and row["attempt"] >= reply.attempt, promise, f"attempt {reply.attempt} of {reply.run}"
            )
            box = tables["boxes"].get((reply.run, reply.attempt, request.box))
            must(
                box is not None and box["client_id"] == client_of(request.client_id),
                promise,
                f"{request.client_id} in its place",
            )
            self._attempts[reply.run] = max(reply.attempt, self._attempts.get(reply.run, 0))
        elif method == "WatchRun":
            self._not_superseded(request.run, request.attempt, f"box {request.box} is answered")
            for view in reply.slots:
                key = SlotKey(request.run, request.attempt, request.box, view.slot)
                self._said(key, view.generation, view.phase, view.worker)
                self._told(request.run, request.box, view.slot, view.generation)
        elif method == "Heartbeat":
            for a in reply.assignments:
                self._not_superseded(a.run, a.attempt, f"worker {request.worker} is given work")
                key = SlotKey(a.run, a.attempt, a.box, a.slot)
                if a.is_target:
                    self._reserved(key, a.generation)
                else:
                    self._said(key, a.generation, pb.STARTING, request.worker)
                self._told(a.run, a.box, a.slot, a.generation)
        elif method == "RegisterWorker":
            self.before.heard[request.worker] = self._came[request.worker, request.session]
            self.before.hung_up.discard(request.worker)
        elif method == "ChangeMixture":
            rows = [row for row in tables["mixture_changes"].values() if row["run"] == reply.run]
            made = {records_pb2.MixtureChange.FromString(row["change"]).key: row["number"] for row in rows}
            once = len(made) == len(rows) and reply.change.key in made
            must(once, promise, f"change {reply.change.key} of {reply.run}")
            self.mixed(reply.run, made[reply.change.key], reply.change)
        elif method == "PutSnapshot" and not reply.refused:
            header = request[0].header
            key = SlotKey(header.run, header.attempt, header.box, header.slot)
            stored = (key, header.total, header.epoch) in self.disk.snapshots
            must(stored, promise, f"snapshot {header.epoch}.{header.total} of {key}")

    def _said(self, key: SlotKey, generation: int, phase: pb.SlotPhase.ValueType, worker: str) -> None:
        """Check a reply about a slot. A reply made when the write began may be older than its rows; a
        coordinator that starts from there continues from the reply's state, or from a later one."""
        row = self.disk.tables["slots"].get(tuple(key))
        if row is None:
            there = self.disk.tables["attempts"].get((key.run, key.attempt))
            holds = there is not None and there["state"] != "open"
        else:
            there = row
            later = row["generation"] > generation
            same = row["generation"] == generation and (not worker or row["worker"] in ("", worker))
            holds = later or (same and row["phase"] >= phase)
        if not holds:
            said = f"generation {generation}, {pb.SlotPhase.Name(phase)}, {worker!r}"
            self.world.violated("what is said is on disk", f"{key} as {said}; there is {there}")

    def _reserved(self, key: SlotKey, generation: int) -> None:
        """A generation was given to a successor: no other gets it, or the attempt is over by now."""
        row, there = self.disk.tables["reserved"].get(tuple(key)), self.disk.tables["attempts"]
        over = there.get((key.run, key.attempt), {}).get("state") not in (None, "open")
        on_disk = row is not None and row["generation"] >= generation
        self._must(on_disk or over, "what is said is on disk", f"{key} reserves {generation}; there is {row}")

    def _told(self, run: str, box: int, slot: int, generation: int) -> None:
        where = (run, box, slot)
        self._generations[where] = max(generation, self._generations.get(where, 0))

    def _not_superseded(self, run: str, attempt: int, what: str) -> None:
        newest = self._attempts.get(run, 0)
        self._must(attempt >= newest, "who is superseded owns nothing", f"{what} in attempt {attempt} after {newest}")

    # ---- workers

    def starts(self, key: Key, owner: Owner, assignment: records_pb2.WorkerAssignment) -> BoxPlan:
        """A runner is started; its plan."""
        if self.world.diary is not None:
            self.world.note(owner[0], f"starts {key} recovery={assignment.recovery}")
        # Once, even by the same worker: a second runner of one generation would begin again from its beginning.
        other = self._owners.setdefault(key, owner)
        self._must(other is owner, "one owner per slot and generation", f"{key} is started by {owner} after {other}")
        for number, change in enumerate(assignment.mixture_changes):
            self.mixed(key[0], number, change)
        return self.plan(key[0], key[2])

    def mixed(self, run: str, number: int, change: records_pb2.MixtureChange) -> None:
        """A change is told: no box has taken its step. Runners that know it start after they are told. It was tried on
        a loader with all changes before it."""
        known = f"change {number} of {run} was tried with {change.epoch} changes"
        self._must(change.epoch == number, "a change of the mixture is exact", known)
        if change.step in self.mixed_from[run]:
            return
        self.mixed_from[run][change.step] = change.attempt
        for (name, attempt, box), step in self._steps.items():
            early = (name, attempt) != (run, change.attempt) or step < change.step
            self._must(early, "a change of the mixture is exact", f"box {box} of {run} is at step {step}: {change}")

    def ready(self, key: Key) -> None:
        self._ready.add(key)

    def failed(self, key: Key, lost: bool) -> None:
        (self._lost if lost else self._failed).add(key)

    def content(self, key: Key, start: Base) -> bytes:
        """Return the content of a snapshot and of a state: a function of the position."""
        return f"{key[0]} {key[2]}.{key[3]} {start.epoch}.{start.delivered}.{start.total}".encode()

    def acknowledged(self, key: Key, start: Base) -> None:
        self._acknowledged[SlotKey(*key[:4])].add(start)
        if self.state_machine is not None:
            self._check_snapshots(self.state_machine)

    def loads(self, key: Key, start: Base, data: bytes) -> None:
        what = f"{key} at {start} holds {data!r}"
        self._must(data == self.content(key, start), "a durable snapshot can be had", what)

    def restarts(self, key: Key, plan: BoxPlan, start: Base | None, place: tuple[int, int]) -> None:
        """A recovering runner goes on at a place, from its base."""
        fits = start is not None and plan.usable(key[3], (start.epoch, start.total), place)
        had = sorted(self._acknowledged[SlotKey(*key[:4])])
        what = f"{key} goes on at (pass, batch) {place} from {start}; acknowledged were {had}"
        self._must(fits, "a durable snapshot can be had", what)

    def can_replay(self, key: Key, plan: BoxPlan, start: Base | None, place: tuple[int, int], produced: bool) -> bool:
        """Return whether the position's state can be made from this base. It must, if the loop or runner was there."""
        if start is not None and plan.usable(key[3], (start.epoch, start.total), place):
            return True
        attempt = key[:3]
        at = plan.records[self._steps.get(attempt, 0)] if attempt in self._steps else None
        if plan.on_path(key[3], *place) and (produced or (at is not None and place <= (at.epoch, at.total[key[3]]))):
            self.restarts(key, plan, start, place)
        return False

    # ---- training jobs

    def opened(self, run: str, attempt: int, box: int, client: str) -> None:
        step = self._steps.get((run, attempt, box))
        self._must(
            step is None, "one owner per slot and generation", f"{client} opens a place that {run} had given out"
        )

    def closed(self, run: str, attempt: int, box: int) -> None:
        assert self.state_machine is not None
        current = self.state_machine.cluster.runs[run].current
        if current is not None and current.number == attempt and box in current.boxes:
            place = current.boxes[box].presence.value
            self._must(place == "closed", "what is said is on disk", f"box {box} of {run} was closed, and is {place}")

    def viewed(self, run: str, attempt: int, box: int, views: Iterable[pb.SlotView]) -> None:
        for view in views:
            key = (run, attempt, box, view.slot, view.generation)
            if view.phase == pb.READY:
                self._must(key in self._ready, "a slot is ready when its runner is", f"a box was told {key} is")
                named = self._owners.get(key, ("nobody", ""))[0]
                what = f"{key} is said to be on {view.worker}, and is on {named}"
                self._must(named == view.worker, "one owner per slot and generation", what)

    def delivered(
        self, where: tuple[str, int, int, int], generation: int, plan: BoxPlan, step: int, batch: Batch | None
    ) -> None:
        promise = "batches come once and in order"
        before = self._served.get(where, 0)
        self._must(generation >= before, promise, f"{where} is served by generation {generation} after {before}")
        self._served[where] = generation
        if batch is None:
            return
        self.deliveries += 1
        self._must(
            batch == plan.batches[step - 1], promise, f"{where} step {step}: {batch} for {plan.batches[step - 1]}"
        )
        missing = [at for at in self.mixed_from[where[0]] if at <= step and at not in batch.mixed_from]
        what = f"{where} step {step} of generation {generation} knows only {batch.mixed_from} of the changes"
        self._must(not missing, "a change of the mixture is exact", what)
        last = self._steps.get(where[:3])
        self._must(last is None or step == last + 1, promise, f"{where} step {step} after {last}")
        self._steps[where[:3]] = step

    def saved(self, plan: RunPlan, step: int, state: FetchedState) -> None:
        self.saves += 1
        promise, must = "a saved state is what was delivered", self._must
        must(len(state.records) == plan.slots, promise, f"{len(state.records)} records for {plan.slots} slots")
        for number, box in enumerate(plan.boxes):
            at = box.records[min(step, box.steps)]
            told = Position.from_proto(state.positions[number])
            there = (told.step, told.epoch, told.live, told.cursor, told.delivered, told.total)
            true = (at.step, at.epoch, at.live, at.cursor, at.delivered, at.total)
            must(there == true, promise, f"box {number} of {plan.name} at step {step}: {there} for {true}")
        for index, (record, data) in enumerate(state.records):
            number, slot = divmod(index, plan.workers)
            at = plan.boxes[number].records[min(step, plan.boxes[number].steps)]
            start = Base(at.epoch, at.total[slot], at.delivered[slot])
            expected = self.content((plan.name, 0, number, slot, 0), start)
            must(data == expected, promise, f"box {number} slot {slot} at step {step}: {data!r} for {expected!r}")
            must(record.worker_step == at.total[slot], promise, f"box {number} slot {slot}: {record.worker_step}")

    def not_saved(self, plan: RunPlan, step: int, error: PenstockError, began: float, held_up: set[int]) -> None:
        """`held_up`: boxes that wait for a call of their own from before the last fault. It may be lost, and they take
        no step before its deadline."""
        what = f"{plan.name} at step {step}: {type(error).__name__} {error.message}"
        named = bool(error.message) and "waited for ." not in error.message
        self._must(named, "a state that cannot be had is named", what)
        # Boxes in a collective are at most a step ahead of the one that saves, whatever fails.
        kept = not plan.collective or "retention_steps=" not in error.message
        self._must(kept, "a state that cannot be had is named", f"{what}, although it is in the window")
        if self.healed_at and began > self.healed_at:
            fair = self._may_fail(plan, error, held_up)
            self._must(fair, "a state that cannot be had is named", f"{what}, although nothing was broken")

    def _may_fail(self, plan: RunPlan, error: PenstockError, held_up: set[int]) -> bool:
        """Return whether a state may be refused when no fault happens any more."""
        if self._is_unheard(plan.name, error.message):
            return True
        match error:
            case StateUnavailableError():
                window = plan.retention < max(box.steps for box in plan.boxes)
                return window or "has closed" in error.message
            case DeadlineError():
                slots = {int(number) for number in re.findall(r"box (\d+) slot \d+ on worker", error.message)}
                return self._all_through(plan, error.message) or (bool(slots) and slots <= held_up)
            case WorkerLostError():
                return "times within" in error.message
        return isinstance(error, SupersededError | UnknownRunError)

    def _is_unheard(self, run: str, refusal: str) -> bool:
        """Return whether the state lacks a box that the coordinator has not heard since the last fault: its process has
        ended, and the call that closed it was lost."""
        number = re.search(r"box (\d+) \(its training process has stopped reporting", refusal)
        attempt = None if self.state_machine is None else self.state_machine.cluster.runs[run].current
        if number is None or attempt is None:
            return False
        box = attempt.boxes[int(number[1])]
        return self.before.heard_box.get((run, box.number, box.client), 0.0) < self.before.awake(self.healed_at)

    def _all_through(self, plan: RunPlan, waited_for: str) -> bool:
        """Return whether it waited for boxes that never open the attempt: they were through in an earlier one,
        whose others were killed and came back when nobody was left in it."""
        absent = {int(number) for number in re.findall(r"box (\d+) \(has not opened the run\)", waited_for)}
        through = {
            box for (run, _, box), step in self._steps.items() if (run, step) == (plan.name, plan.boxes[box].steps)
        }
        return bool(absent) and absent <= through

    def heal(self) -> None:
        self.healed_at = self.world.now


def _brief(message: Any) -> str:
    if isinstance(message, list):
        return f"[{' | '.join(_brief(part) for part in message)}]"
    return " ".join(str(message).split())
