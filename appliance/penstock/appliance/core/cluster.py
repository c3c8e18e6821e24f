"""Cluster state: all runs and workers, with their versions, journal rows and leases (entities.py has the terms)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

from penstock.appliance.core import box_history, leases
from penstock.appliance.core.entities import Attempt, AttemptState, Box, Run, Slot, Worker, attempt_over, known_run
from penstock.appliance.core.free_capacity import FreeCapacity
from penstock.appliance.core.leases import LeasePolicy, SnapshotShare
from penstock.appliance.core.recent_events import RecentEvents
from penstock.appliance.core.run_end import REASONS, EndedBy, decide
from penstock.appliance.journal.journal import SLOT_FIELDS, Journal
from penstock.appliance.journal.snapshot_index import SlotKey, SnapshotIndex
from penstock.appliance.limits import Limits
from penstock.proto.errors import SupersededError, UnknownRunError
from penstock.proto.rpc.credentials.tickets import lane_key, make_ticket
from penstock.proto.v1 import coordinator_pb2 as pb

ENDS_MAX = 1024
"""Most ends of runs that wait to be taken; the oldest are dropped."""

Topic = tuple[str | int, ...]
"""Name of a thing whose change wakes waiting calls, such as ("worker", name) or ("box", run, attempt, box)."""


class ClusterState:
    """All runs and workers of a coordinator. `changed`: called with the topic of each change; `clock`: monotonic
    seconds; `wall`: seconds since the Unix epoch."""

    def __init__(
        self,
        journal: Journal,
        snapshot_index: SnapshotIndex,
        limits: Limits,
        changed: Callable[[Topic], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.journal, self.snapshot_index, self.limits = journal, snapshot_index, limits
        self.changed, self.clock, self.wall = changed, clock, wall
        self.events = RecentEvents(clock, wall)
        self.run_ends = Counter(dict.fromkeys(REASONS, 0))
        """Reason -> number of runs that have ended for it."""
        self.workers_lost = 0
        self.new_ends: deque[tuple[str, pb.RunEnd]] = deque(maxlen=ENDS_MAX)
        """Ends of runs, by name, that the service has not taken yet."""
        self.runs: dict[str, Run] = {}
        self.workers: dict[str, Worker] = {}
        self.free_capacity = FreeCapacity(self.workers)
        self.lane_protocols: Counter[int] = Counter()
        """Lane protocol -> workers that speak it and take slots, at the last tick."""
        self.fleet, self.fleet_at = 0, 0.0
        """Workers that the lease policy assumes, and the time when this was set: `count_fleet`."""
        self.load_factor = 1.0
        """Divisor of the calls per second that peers may make; 1 = not overloaded: leases.updated_load_factor."""
        self.live_boxes = 0
        self.slots_held: Counter[str] = Counter()
        """Name or digest of a credential token -> slots of the boxes that it opened, in open attempts."""
        self.in_use: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """The same -> job -> slots of its boxes that work."""
        self.lacking: dict[str, Attempt] = {}
        """Run -> its attempt, if some of its boxes work and others lack workers."""
        self.budgets_freed = 0
        """Number of boxes that have given their workers back, or need none any more."""
        self.placed = 0
        """Number of slots that workers hold; one with a migration target counts twice."""
        self.touched: set[tuple[str, int, int]] = set()
        """Keys (run, attempt, box) of boxes that changed since the state queries were last planned."""
        self.tickets_expire = 0
        """Expiry of tickets made from now on, in seconds since the Unix epoch (credentials/tickets.py)."""
        self._version = journal.boots << 32

    # ------------------------------------------------------------------------------------- versions, leases, tickets

    def next_version(self) -> int:
        """Return a version above every earlier one of any object, also from before a restart."""
        self._version += 1
        return self._version

    def bump_worker(self, name: str) -> None:
        """Let the worker, if there is one with this name, get a new view."""
        worker = self.workers.get(name)
        if worker is not None:
            self.free_capacity.offer(worker)
            worker.version = self.next_version()
            self.changed(("worker", name))

    def bump_box(self, attempt: Attempt, box: Box) -> None:
        box.version = self.next_version()
        self.touch(attempt, box)
        self.changed(("box", attempt.run, attempt.number, box.number))

    def worker_lease_policy(self) -> LeasePolicy:
        peers, calls_per_s = max(self.fleet, len(self.workers)), leases.HEARTBEATS_PER_S / self.load_factor
        return leases.lease_policy(self.limits.worker_lease_s, peers, calls_per_s, self.limits.idle_report_s)

    def count_fleet(self, now: float) -> None:
        """Set the number of workers for the lease policy: a larger fleet at once, a smaller one after
        leases.SHRINKS_AFTER_S. Otherwise an overloaded coordinator that lost workers would ask the others for more
        heartbeats, and lose them too."""
        if len(self.workers) >= self.fleet or now - self.fleet_at > leases.SHRINKS_AFTER_S:
            self.fleet, self.fleet_at = len(self.workers), now

    def box_lease_policy(self) -> LeasePolicy:
        calls_per_s = leases.WATCHES_PER_S / self.load_factor
        limits = self.limits
        return leases.lease_policy(limits.client_lease_s, self.live_boxes, calls_per_s, limits.idle_report_s)

    def snapshot_share(self) -> SnapshotShare:
        calls_per_s = (
            len(self.workers) / self.worker_lease_policy().heartbeat_s
            + self.live_boxes / self.box_lease_policy().heartbeat_s
        )
        return leases.share(self.placed, calls_per_s)

    def touch(self, attempt: Attempt, box: Box) -> None:
        self.touched.add((attempt.run, attempt.number, box.number))

    def lane_key(self, key: SlotKey, generation: int) -> bytes:
        """Return the key by which a worker verifies tickets for the slot's lane; derived from the journal's secret, so
        it survives restarts."""
        return lane_key(self.journal.secret, *key, generation)

    def ticket(self, key: SlotKey, generation: int) -> str:
        return make_ticket(self.lane_key(key, generation), self.tickets_expire)

    # ----------------------------------------------------------------------------------------------------- finding

    def attempt(self, run_name: str, number: int) -> Attempt:
        """Return the open attempt. Raises UnknownRunError, or SupersededError if attempt `number` is over."""
        run = known_run(self.runs, run_name)
        if run.current is not None and run.current.number == number:
            return run.current
        past = run.past.get(number)
        if past is not None:
            raise attempt_over(past)
        if number < run.attempt:
            raise SupersededError(f"attempt {number} of run {run_name} is over, the newest is {run.attempt}")
        raise UnknownRunError(f"run {run_name} has no attempt {number}, the newest is {run.attempt}")

    def runs_named(self, name: str) -> list[Run]:
        """Return the run JOB/N, or all runs of the job. Raises UnknownRunError."""
        if name in self.runs:
            return [self.runs[name]]
        runs = [run for run in self.runs.values() if run.name.rpartition("/")[0] == name]
        if not runs:
            raise UnknownRunError(f"the coordinator has no run or job {name!r}: see `penstock status --all`")
        return runs

    def slot(self, key: SlotKey) -> Slot | None:
        run = self.runs.get(key.run)
        if run is None or run.current is None or run.current.number != key.attempt:
            return None
        box = run.current.boxes.get(key.box)
        return box.slots[key.slot] if box is not None and key.slot < len(box.slots) else None

    def open_attempts(self) -> list[Attempt]:
        return [run.current for run in self.runs.values() if run.current is not None]

    def slots_of(self, worker: Worker) -> list[Slot]:
        """Return the slots that the worker runs or prepares as migration target, sorted by key."""
        slots = [self.slot(key) for key in sorted(worker.slots)]
        return [slot for slot in slots if slot is not None]

    def box_of(self, slot: Slot) -> tuple[Attempt, Box]:
        attempt = self.runs[slot.key.run].current
        assert attempt is not None
        return attempt, attempt.boxes[slot.key.box]

    # ------------------------------------------------------------------------------------------------ the journal

    def save_run(self, run: Run) -> None:
        row = {name: getattr(run, name) for name in ("num_boxes", "num_workers", "attempt", "generation")}
        self.journal.put("runs", row | {"run": run.name, "seed": str(run.seed)})

    def save_attempt(self, attempt: Attempt) -> None:
        row = {"run": attempt.run, "attempt": attempt.number, "key": attempt.key, "opened_by": attempt.opened_by}
        self.journal.put("attempts", row | {"state": attempt.state.value, "why": attempt.why})

    def save_box(self, attempt: Attempt, box: Box) -> None:
        self.journal.put("boxes", box_row(attempt, box))

    def save_holder(self, attempt: Attempt, box: Box) -> None:
        self.journal.put("holders", _box_key(attempt, box) | {"credential": box.credential, "working": box.working})

    def set_working(self, attempt: Attempt, box: Box, *, working: bool) -> None:
        """Note that the box's slots have workers, and so count in the budget of its credential, or no longer."""
        if box.working is working:
            return
        attempt.set_working(box, working)
        if attempt.working and attempt.lacks:
            self.lacking[attempt.run] = attempt
        else:
            self.lacking.pop(attempt.run, None)
        jobs, job = self.in_use[box.credential], attempt.run.rpartition("/")[0]
        jobs[job] += attempt.num_workers if working else -attempt.num_workers
        self.budgets_freed += not working
        if not jobs[job]:
            del jobs[job]

    def save_slot(self, slot: Slot) -> None:
        attempt, _ = self.box_of(slot)
        attempt.note_generation(slot.generation)
        row = slot.key._asdict() | {name: getattr(slot, name) for name in SLOT_FIELDS}
        row["capabilities"] = slot.capabilities and slot.capabilities.SerializeToString()
        row["error"] = slot.error and slot.error.SerializeToString()
        self.journal.put("slots", row)

    def save_skip(self, slot: Slot, epoch: int, total: int) -> None:
        row = slot.key._asdict() | {"epoch": epoch, "total": total}
        row |= {"count": slot.skips[epoch, total], "own": slot.skipped[epoch, total]}
        self.journal.put("skips", row)

    def save_abandoned(self, attempt: Attempt, box: Box, epoch: int) -> None:
        row = _box_key(attempt, box) | {"epoch": epoch, "step": box.abandoned[epoch]}
        self.journal.put("abandoned", row)

    def save_history(self, attempt: Attempt, box: Box) -> None:
        self.journal.put("tracks", history_row(attempt, box))

    def history(self, run_name: str, box_number: int) -> pb.History | None:
        run = self.runs.get(run_name)
        attempt = run.current if run is not None else None
        box = attempt.boxes.get(box_number) if attempt is not None else None
        return None if attempt is None or box is None else box_history.history_of(attempt, box, self.snapshot_index)

    # -------------------------------------------------------------------------------------------------- events

    def decide_end(self, attempt: Attempt, by: EndedBy, why: str) -> None:
        """Decide how the attempt ends, and tell it, unless that is decided already."""
        run = self.runs[attempt.run]
        if run.is_decided:
            return
        run.end = end = decide(attempt, by, why, self.wall())
        self.journal.put("ends", {"run": run.name, "end": end.SerializeToString()})
        self.run_ends[end.reason] += 1
        self.new_ends.append((run.name, end))
        text = f"{end.reason}, after step {end.step}: {end.text}"
        place = {"attempt": attempt.number, "step": end.step, **({"box": end.box} if end.HasField("box") else {})}
        self.events.add("run ended", text, run=run.name, worker="", fault=end.fault, **place)

    def add_slot_event(self, kind: str, text: str, slot: Slot, worker: str) -> None:
        numbers = {name: value for name, value in slot.key._asdict().items() if name != "run"}
        self.events.add(kind, text, run=slot.key.run, worker=worker, generation=slot.generation, **numbers)


def box_row(attempt: Attempt, box: Box) -> dict[str, Any]:
    opening = box.opening.SerializeToString() if attempt.state is AttemptState.OPEN else None
    return _box_key(attempt, box) | {"client_id": box.client, "place": box.presence.value, "opening": opening}


def history_row(attempt: Attempt, box: Box) -> dict[str, Any]:
    history = box_history.history_of(attempt, box)
    over = attempt.state is not AttemptState.OPEN
    return _box_key(attempt, box) | {"over": over, "history": history.SerializeToString}


def _box_key(attempt: Attempt, box: Box) -> dict[str, Any]:
    return {"run": attempt.run, "attempt": attempt.number, "box": box.number}
