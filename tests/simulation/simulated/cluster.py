"""The promises that can be read from the coordinator's cluster state alone, checked after every event, and those that
compare them with its disk, checked whenever nothing more waits to be written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from simulated.disk import Disk

from penstock.appliance.core.entities import Attempt, BoxPresence, Slot, Worker
from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.core.workers import HUNG_UP_S
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.appliance.limits import Limits
from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["Before", "check_cluster", "check_disk", "check_moves"]

Fail = Callable[[str, str], None]
"""Told the promise that is broken, and how."""

SETTLES_S = 4.0
"""Slots are released and placed in slices, one with each call or tick."""
_JOURNAL = "the cluster state agrees with the journal"
_WAITS = "nothing waits unnamed"


@dataclass
class Before:
    """The cluster state as they were after the last commit, and when the coordinator last heard of whom.

    Times are those at which the coordinator was awake: what it sleeps through is nobody's silence.
    """

    slots: dict[SlotKey, tuple[int, str, str, bool]] = field(default_factory=dict)
    """-> generation, worker, session, whether its box was live."""
    targets: dict[SlotKey, tuple[str, int]] = field(default_factory=dict)
    """-> worker, generation."""
    workers: dict[str, str] = field(default_factory=dict)
    live: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """(run, attempt, box) -> client, of boxes with a live client."""
    heard: dict[str, float] = field(default_factory=dict)
    hung_up: set[str] = field(default_factory=set)
    """Workers whose last connection ended under a heartbeat: they have less time to be heard again."""
    heard_box: dict[tuple[str, int, str], float] = field(default_factory=dict)
    asleep: float = 0.0
    booted: float = 0.0
    busy_from: float = math.inf
    """Time since which there have been slots to release or to place."""
    blurred: bool = False
    """A commit has failed since: more than one thing has happened."""

    def awake(self, now: float) -> float:
        return now - self.asleep

    def settled(self, state_machine: StateMachine, now: float) -> bool:
        """Whether the coordinator has been awake for SETTLES_S with slots to release or to place."""
        if not _could_have_worker(state_machine):
            self.busy_from = math.inf
            return False
        self.busy_from = min(self.busy_from, self.awake(now))
        return self.awake(now) - self.busy_from > SETTLES_S

    def boot(self, now: float) -> None:
        self.booted, self.blurred = self.awake(now), False
        self.busy_from = math.inf
        self.workers.clear()
        self.live.clear()
        self.slots.clear()
        self.targets.clear()


def _could_have_worker(state_machine: StateMachine) -> Slot | None:
    """A slot that waits although there is room for it; for its whole box if that has had no workers; for its whole run,
    and for what other runs lack, if none of its boxes has."""
    cluster = state_machine.cluster
    free = sum(max(0, worker.free) for worker in cluster.workers.values())
    lacking = {attempt.run: _lacks(attempt) for attempt in cluster.open_attempts()}
    begun = {attempt.run for attempt in cluster.open_attempts() if any(box.working for box in attempt.boxes.values())}
    for slot in state_machine.placement.waiting.values():
        attempt, box = cluster.box_of(slot)
        needs = 1 if box.working else attempt.num_workers
        if attempt.run not in begun:
            needs = lacking[attempt.run] + sum(lacking[run] for run in begun)
        if free >= needs:
            return slot
    return None


def _lacks(attempt: Attempt) -> int:
    """Slots of boxes that may still open, or wait for workers."""
    done = sum(box.working or box.presence is BoxPresence.CLOSED for box in attempt.boxes.values())
    return attempt.num_workers * (attempt.num_boxes - done)


def check_cluster(fail: Fail, state_machine: StateMachine, settled: bool) -> None:
    """The cluster state in themselves. `settled`: whether what is done in slices must be done by now."""
    cluster, placement = state_machine.cluster, state_machine.placement
    held: dict[SlotKey, set[str]] = {}
    in_use: Counter[str] = Counter()
    for name, worker in cluster.workers.items():
        if worker.registered and len(worker.slots) > worker.capacity:
            fail("nobody holds more than it has room for", f"{name} holds {len(worker.slots)} of {worker.capacity}")
        for key in worker.slots:
            held.setdefault(key, set()).add(name)
            if cluster.slot(key) is None:
                fail("who is superseded owns nothing", f"{name} holds {key}")
    for attempt in cluster.open_attempts():
        if attempt.number != cluster.runs[attempt.run].attempt:
            fail("who is superseded owns nothing", f"attempt {attempt.number} of {attempt.run} is open")
        for box in attempt.boxes.values():
            has = any(slot.worker for slot in box.slots)
            if box.working < has or (box.working and box.presence is BoxPresence.GONE):
                fail("a budget has what is in use", f"box {box.number} counts: {box.working}, and has workers: {has}")
            in_use[box.credential] += attempt.num_workers * box.working
            for slot in box.slots:
                target = slot.target
                named = {slot.worker, target.worker if target is not None else ""} - {""}
                if held.get(slot.key, set()) != named:
                    fail("one owner per slot and generation", f"{slot.key}: {named}, {held.get(slot.key)}")
                if target is not None and (slot.phase != pb.READY or target.worker == slot.worker):
                    fail("one owner per slot and generation", f"{slot} has {target}, and is with {slot.worker}")
                if (slot.key in placement.migrating) != (target is not None):
                    fail(_WAITS, f"{slot} has the successor {target}, which nobody waits for")
                if slot.phase in (pb.STARTING, pb.READY) and not slot.worker:
                    fail(_WAITS, f"{slot.key} is {pb.SlotPhase.Name(slot.phase)} with nobody")
                if box.lingers_until > 0:
                    continue
                live, waiting = box.presence is BoxPresence.LIVE, slot.key in placement.waiting
                if waiting != (live and slot.phase == pb.WAITING):
                    fail(_WAITS, f"{slot.key} is {pb.SlotPhase.Name(slot.phase)}, and waits in line: {waiting}")
                if not live and slot.worker:
                    fail("who is superseded owns nothing", f"{slot.key} of a box that is gone is with {slot.worker}")
    if any(jobs.total() != in_use[credential] for credential, jobs in cluster.in_use.items()):
        fail("a budget has what is in use", f"{dict(cluster.in_use)}, but the boxes have {dict(in_use)}")
    if settled and (able := _could_have_worker(state_machine)):
        fail(_WAITS, f"{able.key} waits although workers have room")


def check_disk(fail: Fail, state_machine: StateMachine, disk: Disk) -> None:
    """The cluster state against the disk, when all has been written."""
    cluster, slots = state_machine.cluster, 0
    for attempt in cluster.open_attempts():
        for box in attempt.boxes.values():
            row = disk.tables["boxes"].get((attempt.run, attempt.number, box.number), {})
            if row.get("client_id") != box.client or row.get("place") != box.presence.value:
                fail(_JOURNAL, f"box {box.number} is {box.presence.value} for {box.client}, on disk {row}")
            row = disk.tables["holders"].get((attempt.run, attempt.number, box.number), {})
            if row != {**row, "credential": box.credential, "working": box.working}:
                fail(_JOURNAL, f"box {box.number} is of {box.credential!r}, works: {box.working}, on disk {row}")
            slots += len(box.slots)
            for slot in box.slots:
                _check_slot(fail, slot, disk)
    if len(disk.tables["slots"]) != slots:
        fail(_JOURNAL, f"{len(disk.tables['slots'])} slots on disk, {slots} in the cluster state")
    for run in cluster.runs.values():
        row = disk.tables["runs"].get((run.name,), {})
        if (row.get("attempt"), row.get("generation")) != (run.attempt, run.generation):
            fail(_JOURNAL, f"{run.name} is at {run.attempt}, {run.generation}, on disk {row}")


def _check_slot(fail: Fail, slot: Slot, disk: Disk) -> None:
    row = disk.tables["slots"].get(tuple(slot.key), {})
    on_disk = tuple(row.get(name) for name in ("generation", "phase", "worker", "session", "recovery", "restarts"))
    here = (slot.generation, slot.phase, slot.worker, slot.session, slot.recovery, slot.restarts)
    if on_disk != here:
        fail(_JOURNAL, f"{slot.key} is {here}, on disk {on_disk}")
    reserved = disk.tables["reserved"].get(tuple(slot.key), {}).get("generation", 0)
    if reserved != slot.reserved:
        fail(_JOURNAL, f"{slot.key} has reserved {slot.reserved}, on disk {reserved}")


def check_moves(
    fail: Fail,
    state_machine: StateMachine,
    before: Before,
    lost: Set[tuple[str, int, int, int, int]],
    limits: Limits,
    now_s: float,
) -> None:
    """Check that each change since the last commit had a cause, and keep the cluster state for the next check."""
    cluster = state_machine.cluster
    awake = before.awake(now_s)
    slots: dict[SlotKey, tuple[int, str, str, bool]] = {}
    live: dict[tuple[str, int, int], str] = {}
    for attempt in cluster.open_attempts():
        for box in attempt.boxes.values():
            if box.presence is BoxPresence.LIVE:
                live[attempt.run, attempt.number, box.number] = box.client
            for slot in box.slots:
                is_live = box.presence is BoxPresence.LIVE
                slots[slot.key] = now = (slot.generation, slot.worker, slot.session, is_live)
                was = before.slots.get(slot.key, now)
                if was == now:
                    continue
                if now[0] < was[0]:
                    fail("generations and attempts only rise", f"{slot.key} from {was} to {now}")
                if now[0] == was[0] and was[1] not in ("", now[1]):
                    fail("one owner per slot and generation", f"{slot.key} went from {was} to {now}")
                moved = now[0] > was[0] and was[3] and is_live and not before.blurred
                succeeded = before.targets.get(slot.key) == (slot.worker, slot.generation)
                kept = _keeps(cluster.workers.get(was[1]), was[2])
                remade = any(first > was[0] for first, _ in slot.remade)  # the mixture was changed
                if moved and not succeeded and not remade and (*slot.key, was[0]) not in lost and kept:
                    fail("a slot moves only for a cause", f"{slot.key} from {was} to {now}")
    for name, session in before.workers.items():
        if name not in cluster.workers:
            silent = awake - max(before.heard.get(name, 0.0), before.booted)
            whole = HUNG_UP_S if name in before.hung_up else limits.worker_lease_s
            if silent < whole - 1e-6:
                fail("a lease is whole", f"worker {name} ({session}) was given up after {silent:.3f} s")
    for (run, number, box_number), client in before.live.items():
        current = cluster.runs[run].current
        if current is not None and current.number == number and current.boxes[box_number].presence is BoxPresence.GONE:
            silent = awake - max(before.heard_box.get((run, box_number, client), 0.0), before.booted)
            if silent < limits.client_lease_s - 1e-6:
                fail("a lease is whole", f"box {box_number} of {run} was given up after {silent:.3f} s")
    before.blurred = False
    before.slots, before.live = slots, live
    heirs = [(slot.key, slot.target) for slot in state_machine.placement.migrating.values()]
    before.targets = {key: (heir.worker, heir.generation) for key, heir in heirs if heir is not None}
    before.workers = {worker.name: worker.session for worker in cluster.workers.values()}


def _keeps(worker: Worker | None, session: str) -> bool:
    """The worker lives on as it was, so that a slot that it had was taken from it."""
    return worker is not None and worker.session == session and worker.registered and not worker.draining
