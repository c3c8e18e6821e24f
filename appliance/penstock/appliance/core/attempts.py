"""Attempts: calls of training jobs, which open runs, report progress and close boxes, and the end of attempts.

An operator ends a run whose job hangs (`penstock run close`); the next call of a job that still lives gets
SupersededError with the reason. The run itself remains, and the next launch opens it again.

Only a box can notice a broken route to a worker, because a lane goes directly to the worker's host. A slot whose worker
its box reports as unreachable moves. A report moves only the box's own slots and counts for UNREACHABLE_MAX workers at
a time: a box that can reach no worker at all must not move its slots through the whole fleet.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.appliance.core import box_progress, launch_restarts, opening, views
from penstock.appliance.core.cluster import ClusterState, box_row, history_row
from penstock.appliance.core.entities import (
    Attempt,
    AttemptState,
    Box,
    BoxPresence,
    ClosedAttempt,
    Run,
    Slot,
    client_of,
    shown,
)
from penstock.appliance.core.leases import LEASE_MAX_S, PromisedLease
from penstock.appliance.core.placement import SLOTS_AT_ONCE, UNREACHABLE_AGAIN_S, UNREACHABLE_S, Placement
from penstock.appliance.core.request_checks import check_name, check_progress
from penstock.appliance.core.run_end import EndedBy
from penstock.appliance.journal.journal import TABLES
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.errors import BoxTakenError, InvalidArgumentError, SupersededError, UnknownRunError
from penstock.proto.rpc.bounds.message_bounds import owned
from penstock.proto.rpc.version import VERSION
from penstock.proto.rpc.wire_errors import detail_of, error_of
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

PAST_ATTEMPTS = 16
"""Number of a run's earlier attempts that are remembered, so that their late calls are refused."""
LINGER_S = 60.0
"""Seconds that a closed box keeps its workers for other boxes: a rank that saves last needs the states of all boxes."""
ABANDONED_S = 3600.0
"""Seconds after which an attempt without a live box is closed; LINGER_S if a box of it has failed. Until then its boxes
may come back."""
ABANDONED_MAX = 1 << 19
"""Largest number of epochs that a box may abandon by `break` in one attempt."""
UNREACHABLE_MAX = 8
UNREACHABLE_PER_S = 60.0
"""One box can mark at most UNREACHABLE_MAX workers as unreachable within this many seconds."""
_MAX_REASON = 300
"""Largest number of characters taken from the reason in a box's report."""


class Attempts:
    """Attempts of all runs, and their boxes. `settle`: completes a change (StateMachine.settle)."""

    def __init__(
        self,
        cluster: ClusterState,
        placement: Placement,
        promised: PromisedLease,
        fresh_seed: Callable[[], int],
        settle: Callable[[], None],
    ) -> None:
        self._cluster, self._placement, self._promised = cluster, placement, promised
        self._fresh_seed, self._settle = fresh_seed, settle

    # -------------------------------------------------------------------------------------------------------- opening

    def open_run(self, request: pb.OpenRunRequest, credential: str = "") -> pb.OpenRunReply:
        """Open a run, or add a box to its open attempt. `credential`: name or digest of the caller's token."""
        cluster = self._cluster
        now = cluster.clock()
        start = opening.validate(request)
        client, request = opening.without_secret(request)
        name = opening.run_name(request)
        run = cluster.runs.get(name)
        opening.check_limits(request, run, len(cluster.runs), cluster.snapshot_index)
        decision = opening.decide(run, request, client, now)
        if isinstance(decision, Box):
            attempt = cluster.attempt(name, run.attempt if run is not None else 0)
            self._renew(attempt, decision, now)
        else:
            superseded = run.current if run is not None and decision is None else None
            opening.check_capacity(request, credential, superseded, cluster.slots_held)
            request.ClearField("process_age_s")
            attempt = decision or self._next_attempt(name, run, client, request, now)
            self._add_box(attempt, client, request, start, now, credential)
        lease_policy = cluster.box_lease_policy()
        self._promised.keep(lease_policy.lease_s, now)
        self._settle()
        return pb.OpenRunReply(
            run=name,
            attempt=attempt.number,
            seed=attempt.seed,
            lease_s=lease_policy.lease_s,
            version=VERSION,
            heartbeat_s=lease_policy.idle_s,
        )

    def _next_attempt(self, name: str, run: Run | None, client: str, request: pb.OpenRunRequest, now: float) -> Attempt:
        cluster = self._cluster
        seed = opening.seed_of(run, request, self._fresh_seed)
        opener = f"box {request.box}, client {shown(client)} on host {request.host or '?'}"
        if run is None:
            run = cluster.runs[name] = Run(name, seed, 0, 0, 0, 0)
        if opening.resumes(request):
            self._note_use(run)
        elif run.attempt == 0:
            run.unused = True
            cluster.journal.put("unused", {"run": run.name})
        number = run.attempt + 1
        if run.current is not None:
            why = f"attempt {run.current.number} of run {name} was superseded by attempt {number}, opened by {opener}"
            self.end(run.current, EndedBy.NEWER_ATTEMPT, why)
        run.seed, run.attempt = seed, number
        run.num_boxes, run.num_workers = request.num_boxes, request.num_workers_per_box
        run.current = Attempt(
            name, number, request.attempt_key, opener, run.num_boxes, run.num_workers, seed, last_live=now
        )
        run.current.mixture_changes = run.mixture_changes
        cluster.save_run(run)
        cluster.save_attempt(run.current)
        return run.current

    def _note_use(self, run: Run) -> None:
        """Record that the run has a position to lose, so that no launch may begin it anew on another topology."""
        if run.unused:
            run.unused = False
            self._cluster.journal.drop("unused", run=run.name)

    def _add_box(
        self, attempt: Attempt, client: str, request: pb.OpenRunRequest, start: Position, now: float, credential: str
    ) -> None:
        cluster = self._cluster
        run = cluster.runs[attempt.run]
        cluster.live_boxes += 1
        lease = now + cluster.box_lease_policy().lease_s
        box = Box(
            request.box, client, request, start, BoxPresence.LIVE, lease, 0, credential=credential, reported_at=now
        )
        cluster.slots_held[credential] += attempt.num_workers
        box.history.append(start)
        attempt.add_box(box)
        for number in range(attempt.num_workers):
            slot = Slot(SlotKey(attempt.run, attempt.number, box.number, number), run.generation + 1)
            box.slots.append(slot)
            self._placement.enqueue(slot)
            cluster.save_slot(slot)
        cluster.save_box(attempt, box)
        cluster.save_holder(attempt, box)
        cluster.bump_box(attempt, box)
        where = f"in attempt {attempt.number}, from host {request.host or '?'}"
        text = f"box {box.number} of {attempt.topology} is {where}"
        cluster.events.add("box opened", text, run=attempt.run, attempt=attempt.number, box=box.number)

    # ---------------------------------------------------------------------------------------------------------- boxes

    def _find_box(self, run: str, attempt_number: int, number: int, client_id: str) -> tuple[Attempt, Box]:
        attempt = self._cluster.attempt(run, attempt_number)
        box, where = attempt.boxes.get(number), f"box {number} of run {run} (attempt {attempt_number})"
        if box is None:
            raise UnknownRunError(f"{where} has not been opened: start the job again")
        if box.client != client_of(client_id):
            raise BoxTakenError(f"{where} is held by {box.who()}: give each process of the job its own box number")
        if box.presence is BoxPresence.CLOSED:
            raise SupersededError(f"{where} was closed by its client: open it again with a new Appliance")
        return attempt, box

    def _renew(self, attempt: Attempt, box: Box, now: float, known_s: float = 0.0) -> None:
        """Renew the box's lease, to at least the `known_s` seconds that the client knows (up to a limit)."""
        if box.presence is BoxPresence.GONE:
            self._revive(attempt, box)
        box.lease_until = now + self._cluster.box_lease_policy().promised(known_s, LEASE_MAX_S)
        box.reported_at, box.hung_up = now, False

    def box_hung_up(self, request: pb.WatchRunRequest) -> None:
        """Note that the connection of the box's client ended during a report, for openings that ask whether it lives
        (opening.py). Over a network it may connect again, so its lease stays as it is (Limits.hung_up_s)."""
        run = self._cluster.runs.get(request.run)
        if run is not None and run.current is not None and run.current.number == request.attempt:
            box = run.current.boxes.get(request.box)
            if box is not None and box.client == client_of(request.client_id):
                box.hung_up = True
                box.lease_until = min(box.lease_until, self._cluster.clock() + self._cluster.limits.hung_up_s)

    def _revive(self, attempt: Attempt, box: Box) -> None:
        attempt.set_presence(box, BoxPresence.LIVE)
        text = f"the training job of box {box.number} reported again"
        self._cluster.events.add("box back", text, run=attempt.run, attempt=attempt.number, box=box.number)
        for slot in box.slots:
            if slot.phase == pb.WAITING:
                self._placement.enqueue(slot)
        self._cluster.save_box(attempt, box)
        self._cluster.bump_box(attempt, box)

    def box_view(self, request: pb.WatchRunRequest) -> pb.WatchRunReply:
        cluster = self._cluster
        attempt, box = self._find_box(request.run, request.attempt, request.box, request.client_id)
        lease_policy = cluster.box_lease_policy()
        self._promised.keep(lease_policy.lease_s, box.reported_at)
        box.lease_until = max(box.lease_until, box.reported_at + lease_policy.lease_s)
        cluster.journal.commit()
        reply = views.watch_reply(cluster, attempt, box, request.seen_version, lease_policy, cluster.wall())
        reply.commit_mark = cluster.journal.mark()
        return reply

    def box_hold(self, request: pb.WatchRunRequest) -> float:
        """Return the seconds for which a WatchRun call is held if nothing changes."""
        cluster, name = self._cluster, f"{request.run}.{request.box}"
        _, box = self._find_box(request.run, request.attempt, request.box, request.client_id)
        return min(request.hold_s, cluster.box_lease_policy().left(cluster.clock(), name, is_idle=box.is_idle))

    def box_version(self, request: pb.WatchRunRequest) -> int:
        return self._find_box(request.run, request.attempt, request.box, request.client_id)[1].version

    def ask(self, run_name: str, number: int) -> Box | None:
        """Answer the long poll of the box's client, which then reports its position. None: no live client."""
        run = self._cluster.runs.get(run_name)
        if run is None or run.current is None or number not in run.current.live:
            return None
        box = run.current.boxes[number]
        self._cluster.bump_box(run.current, box)
        return box

    def report_box(self, request: pb.WatchRunRequest) -> None:
        cluster = self._cluster
        now = cluster.clock()
        cluster.journal.confirm(request.commit_mark, f"box {request.box} of run {request.run}")
        attempt, box = self._find_box(request.run, request.attempt, request.box, request.client_id)
        check_progress(request, attempt.num_workers)
        self._renew(attempt, box, now, request.lease_s)
        if box_progress.note_epoch_starts(attempt, box, request):
            cluster.touch(attempt, box)
        self._note_abandoned(attempt, box, request)
        if (request.fence_key, request.fence_taken) != box.fence:
            box.fence = request.fence_key, request.fence_taken
            cluster.changed(("mixture", request.run))
        if request.delivered.step >= box.delivered.step:  # else a later report was received before this one
            box.is_idle = request.delivered.step == box.delivered.step and not request.waiting_for
            self._advance(attempt, box, request, now)
        attempt.note_first_digest(box, request.first_digest)
        launch_restarts.note_offer(cluster.snapshot_index, attempt, box, request)
        self._note_unreachable(box, request, now)
        self._settle()

    def _advance(self, attempt: Attempt, box: Box, request: pb.WatchRunRequest, now: float) -> None:
        delivered = request.delivered
        passed = attempt.abandoned_between(box.step, delivered.step)
        if request.epoch_ended != box.epoch_ended or delivered.epoch != box.delivered.epoch or passed:
            self._cluster.touch(attempt, box)
        attempt.set_ended(box, request.epoch_ended)
        box.waiting_for, box.waited_s = request.waiting_for, request.waited_s
        box.note_waits(now, request.waited_by_slot_s, delivered.step)
        if request.sources:
            box.imbalance = request.imbalance
            box.sources = {count.source: owned(count) for count in request.sources}
        if delivered.slots:
            box_progress.advance(self._cluster.snapshot_index, attempt, box, request, now)
            if delivered.step > 0:
                self._note_use(self._cluster.runs[attempt.run])

    def _note_abandoned(self, attempt: Attempt, box: Box, request: pb.WatchRunRequest) -> None:
        touched: list[Box] = []
        for abandoned_epoch in request.abandoned:
            if abandoned_epoch.epoch in box.abandoned:
                continue
            if len(box.abandoned) >= ABANDONED_MAX:
                raise InvalidArgumentError(
                    f"box {box.number} must `break` at most {ABANDONED_MAX} epochs in one launch, got one more: use "
                    "DataExecutor(persistent=True)"
                )
            if attempt.note_abandoned(box, abandoned_epoch.epoch, abandoned_epoch.step):
                touched = list(attempt.boxes.values())
            self._cluster.save_abandoned(attempt, box, abandoned_epoch.epoch)
            touched = touched or [box]
        for other in touched:
            self._cluster.touch(attempt, other)

    def _note_unreachable(self, box: Box, request: pb.WatchRunRequest, now: float) -> None:
        for claim in request.unreachable:
            slot = box.slots[claim.slot] if claim.slot < len(box.slots) else None
            if slot is None or slot.generation != claim.generation or slot.phase != pb.READY or not slot.worker:
                continue
            believed = box.unreachable_since(now - UNREACHABLE_PER_S)
            if slot.worker not in believed and len(believed) >= UNREACHABLE_MAX:
                continue
            box.unreachable[slot.worker] = now
            windows = (UNREACHABLE_S, UNREACHABLE_AGAIN_S)
            barred = (box.unreachable_since(now - seconds) | {slot.worker} for seconds in windows)
            if self._placement.find_worker(slot, *barred) is not None:
                reason = claim.why[:_MAX_REASON]
                why = f"the training job of box {box.number} cannot reach worker {slot.worker}: {reason}"
                self._placement.move(slot, why, None)

    # ----------------------------------------------------------------------------------------------------------- ends

    def close_run(self, request: pb.CloseRunRequest) -> None:
        """Close the box for its client; no effect if it is superseded or closed, and so released already."""
        cluster = self._cluster
        try:
            attempt, box = self._find_box(request.run, request.attempt, request.box, request.client_id)
        except (SupersededError, UnknownRunError):
            cluster.journal.commit()
            return
        if request.HasField("progress"):
            self.report_box(request.progress)
        box.error, box.finished = _shortened(request), request.finished
        attempt.set_presence(box, BoxPresence.CLOSED)
        attempt.set_ended(box, True)
        cluster.budgets_freed += 1
        if attempt.live:
            if box.error is not None:  # the boxes that go on cannot bring the launch to its end without this one
                cluster.decide_end(attempt, EndedBy.BOXES, box.error.message)
            box.lingers_until = cluster.clock() + LINGER_S
            for slot in box.slots:
                self._placement.waiting.pop(slot.key, None)
            cluster.save_box(attempt, box)
            cluster.save_history(attempt, box)
            cluster.touch(attempt, box)
        else:
            self.end(attempt, EndedBy.BOXES, f"attempt {attempt.number} of run {attempt.run} was closed")
            if request.forget:
                for table in TABLES:
                    cluster.journal.drop(table, run=attempt.run)
                del cluster.runs[attempt.run]
        self._settle()

    def end_run(self, request: pb.EndRunRequest) -> pb.EndRunReply:
        """End the open attempt of a run (JOB/N) or those of a job. Raises UnknownRunError, InvalidArgumentError."""
        check_name("run", request.run)
        reply = pb.EndRunReply()
        for run in self._cluster.runs_named(request.run):
            attempt = run.current
            reply.runs.add(run=run.name, attempt=run.attempt, was_open=attempt is not None)
            if attempt is not None:
                why = f"attempt {attempt.number} of run {run.name} was ended by an operator (`penstock run close`)"
                self.end(attempt, EndedBy.OPERATOR, why)
        self._settle()
        return reply

    def end(self, attempt: Attempt, by: EndedBy, why: str) -> None:
        """End the attempt, and take its slots from their workers; its calls are refused with the reason `why`."""
        cluster = self._cluster
        run = cluster.runs[attempt.run]
        cluster.decide_end(attempt, by, why)
        state = AttemptState.SUPERSEDED if by is EndedBy.NEWER_ATTEMPT else AttemptState.ENDED
        attempt.state, attempt.why = state, why
        run.current = None
        boxes = attempt.boxes.values()
        for box in boxes:
            cluster.slots_held[box.credential] -= attempt.num_workers
            cluster.set_working(attempt, box, working=False)
        self._release(attempt)
        # the box's number does not matter: `settle` looks at the attempt only
        cluster.touched.add((attempt.run, attempt.number, next(iter(attempt.boxes), 0)))
        run.generation = max(run.generation, attempt.generation)
        clients = {box.number: box.client for box in boxes}
        reported_at = max((box.reported_at for box in boxes), default=0.0)
        run.past[attempt.number] = ClosedAttempt(attempt.number, attempt.key, state, why, clients, reported_at)
        which: dict[str, str | int] = {"run": attempt.run, "attempt": attempt.number}
        cluster.journal.put_all("boxes", lambda: (box_row(attempt, box) for box in boxes), **which)
        cluster.journal.put_all("tracks", lambda: (history_row(attempt, box) for box in boxes), **which)
        for table in ("slots", "skips", "abandoned", "reserved", "holders"):
            cluster.journal.drop(table, **which)
        cluster.save_attempt(attempt)
        cluster.save_run(run)
        while len(run.past) > PAST_ATTEMPTS:
            oldest = min(run.past)
            del run.past[oldest]
            for table in ("attempts", "boxes", "tracks"):
                cluster.journal.drop(table, run=run.name, attempt=oldest)
        cluster.snapshot_index.drop_attempt(attempt.run, attempt.number)

    def _release(self, attempt: Attempt) -> None:
        cluster = self._cluster
        left: set[str] = set()
        for box in attempt.boxes.values():
            for slot in box.slots:
                self._placement.cancel_migration(slot)
                if slot.worker:
                    left.add(self._placement.take(slot))
                self._placement.waiting.pop(slot.key, None)
            box.version = cluster.next_version()
            cluster.changed(("box", attempt.run, attempt.number, box.number))
        for name in sorted(left):
            cluster.bump_worker(name)

    # ------------------------------------------------------------------------------------------------ periodic checks

    def tick(self, now: float, patience_s: float) -> None:
        """Vacate boxes whose leases ended over `patience_s` ago, and end attempts without a live box; about
        SLOTS_AT_ONCE slots in a call."""
        vacated = live_boxes = 0
        for attempt in self._cluster.open_attempts():
            for box in attempt.boxes.values():
                if vacated >= SLOTS_AT_ONCE:
                    break
                if box.presence is BoxPresence.LIVE and box.lease_until <= now - patience_s:
                    note = f"the training job of box {box.number} has not reported for {now - box.reported_at:.1f} s"
                    vacated += self._vacate(attempt, box, BoxPresence.GONE, note)
                elif 0.0 < box.lingers_until <= now:
                    box.lingers_until = 0.0
                    vacated += self._vacate(attempt, box, BoxPresence.CLOSED, f"box {box.number} was closed")
            live_boxes += len(attempt.live)
            if attempt.live:
                attempt.last_live = now
            elif now - attempt.last_live > (LINGER_S if self._cluster.runs[attempt.run].is_decided else ABANDONED_S):
                silent_s = now - attempt.last_live
                why = f"no box of attempt {attempt.number} of run {attempt.run} has reported for {silent_s:.0f} s"
                self.end(attempt, EndedBy.SILENCE, why)
        self._cluster.live_boxes = live_boxes

    def _vacate(self, attempt: Attempt, box: Box, presence: BoxPresence, note: str) -> int:
        """Take the box's slots from their workers: its client is lost or has closed it. Return the number of slots."""
        cluster = self._cluster
        attempt.set_presence(box, presence)
        kind = "box lost" if presence is BoxPresence.GONE else "box closed"
        cluster.events.add(kind, note, run=attempt.run, attempt=attempt.number, box=box.number)
        if box.reported:
            cluster.save_history(attempt, box)
        for slot in box.slots:
            self._placement.vacate(slot, note)
        cluster.set_working(attempt, box, working=False)
        cluster.save_holder(attempt, box)
        cluster.save_box(attempt, box)
        cluster.bump_box(attempt, box)
        return len(box.slots)


def _shortened(request: pb.CloseRunRequest) -> records_pb2.ErrorDetail | None:
    """Return the error with which the box closes, without its traceback, which the training job has."""
    if not request.HasField("error"):
        return None
    error = detail_of(error_of(request.error))
    error.ClearField("remote_traceback")
    return error
