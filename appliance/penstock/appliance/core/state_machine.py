"""State machine of the coordinator: takes calls and returns replies. The journal does its only I/O; time and seeds are
passed in.

Each public method handles one call of coordinator.proto, or the passing of time (`tick`). A method checks the sender,
changes the cluster state, gives waiting slots to workers, plans state queries again where something changed, and
commits. The reply is made after the commit, so everything in it is on disk. All calls are idempotent, and late calls of
superseded peers change nothing: see the order contract at the top of coordinator.proto.

The methods run in one thread and never wait. The service does the waiting: a held call waits for its topic, and
`changed` announces the topics that have changed.

Leases. Only silence shows a death reliably. When the lease of a worker ends, its slots move to other workers. When the
lease of a client ends, the workers of its box are freed at once. The client keeps its box until the next attempt opens,
because a process that was only stopped for a while can recover. lease_policy.py decides how long a lease is. If the
coordinator itself was stopped, all leases are extended by the time in which it received no calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from penstock.appliance.core import box_progress, closing, launch_restarts, opening, slot_reports, views
from penstock.appliance.core.cluster_state import BOX_COST, ClusterState, Topic
from penstock.appliance.core.migration import Migrations
from penstock.appliance.core.recovery import restore
from penstock.appliance.core.state_queries import StateQueries
from penstock.appliance.model.entities import (
    AssignedSlots,
    Attempt,
    AttemptState,
    Box,
    BoxPresence,
    Run,
    Slot,
    SlotKey,
    Worker,
    client_of,
    shown,
)
from penstock.appliance.model.limits import Limits
from penstock.appliance.model.recent_events import RecentEvents
from penstock.appliance.model.request_checks import (
    check_answer,
    check_measures,
    check_progress,
    check_registration,
    check_reports,
    check_state_query,
)
from penstock.appliance.policies.lease_policy import PromisedLease, patience_s, updated_load_factor
from penstock.appliance.policies.placement import why_not_allowed
from penstock.appliance.states.state_query import StateQuery
from penstock.appliance.storage.journal import Journal
from penstock.appliance.storage.snapshot_index import DurableSnapshot, SnapshotIndex
from penstock.proto.errors import (
    BoxTakenError,
    InputFnNotAllowedError,
    OverloadedError,
    SupersededError,
    UnknownRunError,
)
from penstock.proto.rpc.channel import VERSION, detail_of
from penstock.proto.rpc.credentials.tickets import expiry
from penstock.proto.v1 import coordinator_pb2 as pb


class StateMachine:
    """State machine of the coordinator. All methods run in the coordinator's event loop.

    Args:
        journal: where the cluster state is kept.
        snapshot_index: index of snapshots and blobs, filled from the store.
        limits: limits of the coordinator.
        clock: returns monotonic seconds.
        wall: returns seconds since the Unix epoch, for replies.
        fresh_seed: returns a seed for a run whose request has none.
        changed: called with every topic whose view has changed; it must not call the state machine.
        host: host on which this coordinator runs.
    """

    def __init__(
        self,
        journal: Journal,
        snapshot_index: SnapshotIndex,
        limits: Limits,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        fresh_seed: Callable[[], int],
        changed: Callable[[Topic], None],
        host: str = "",
    ) -> None:
        self.cluster = ClusterState(journal, snapshot_index, limits, changed, RecentEvents(clock, wall))
        self.limits = limits
        self._clock = clock
        self._wall = wall
        self._fresh_seed = fresh_seed
        self.state_queries = StateQueries(self.cluster)
        self._migrations = Migrations(self.cluster)
        self._old_sessions: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._started = self._ticked = now = clock()
        self.cluster.tickets_expire = expiry(wall())
        self._to_workers = PromisedLease(journal, "worker_lease_s", limits.worker_lease_s, now)
        self._to_boxes = PromisedLease(journal, "client_lease_s", limits.client_lease_s, now)
        away_s = limits.return_s if journal.noted("host", "") not in ("", host) else 0.0
        if journal.noted("host", "") != host:
            journal.note("host", host)
        self._found_by = now + max(self._to_workers.lease_s, away_s)
        restore(self.cluster, now, max(self._to_workers.lease_s, away_s), max(self._to_boxes.lease_s, away_s))

    # ------------------------------------------------------------------------------------------------------ common

    def settle(self) -> None:
        """Complete a change: give waiting slots to workers, plan state queries again, and commit."""
        cluster = self.cluster
        if cluster.release_ended():
            cluster.place_waiting()
        self.state_queries.settle()
        cluster.journal.commit()

    # -------------------------------------------------------------------------------------------------------- clients

    def open_run(self, request: pb.OpenRunRequest, credential: str = "") -> pb.OpenRunReply:
        """Open a run, or add a box to its open attempt. `credential`: digest of the caller's credential token."""
        now, cluster = self._clock(), self.cluster
        start = opening.validate(request, self.limits)
        client, request = opening.without_secret(request)
        name = opening.run_name(request)
        run = cluster.runs.get(name)
        opening.check_limits(request, run, len(cluster.runs), cluster.snapshot_index, self.limits)
        match opening.decide(run, request, client, now):
            case opening.RepeatedOpening(box):
                attempt = cluster.attempt(name, run.attempt if run is not None else 0)
                self._renew(attempt, box, now)
            case opening.JoinAttempt(attempt):
                opening.check_capacity(request, credential, None, cluster.slots_held, self.limits)
                cluster.add_box(attempt, client, request, start, now, credential)
            case opening.OpenAttempt():
                superseded = run.current if run is not None else None
                opening.check_capacity(request, credential, superseded, cluster.slots_held, self.limits)
                attempt = self._next_attempt(name, run, client, request, now)
                cluster.add_box(attempt, client, request, start, now, credential)
        lease_policy = cluster.box_lease_policy()
        self._to_boxes.keep(lease_policy.lease_s, now)
        self.settle()
        return pb.OpenRunReply(
            run=name,
            attempt=attempt.number,
            seed=attempt.seed,
            lease_s=lease_policy.lease_s,
            version=VERSION,
            heartbeat_s=lease_policy.heartbeat_s,
        )

    def _next_attempt(self, name: str, run: Run | None, client: str, request: pb.OpenRunRequest, now: float) -> Attempt:
        cluster = self.cluster
        seed = opening.seed_of(run, request, self._fresh_seed)
        opener = f"box {request.box}, client {shown(client)} on host {request.host_id or '?'}"
        if run is None:
            run = cluster.runs[name] = Run(name, seed, 0, 0, 0, 0)
        box_progress.note_opening(cluster, run, request)
        number = run.attempt + 1
        if run.current is not None:
            why = f"attempt {run.current.number} of run {name} was superseded by attempt {number}, opened by {opener}"
            cluster.end(run.current, AttemptState.SUPERSEDED, why)
        run.seed, run.attempt = seed, number
        run.num_boxes, run.num_workers = request.num_boxes, request.num_workers_per_box
        run.current = Attempt(
            name, number, request.attempt_key, opener, run.num_boxes, run.num_workers, seed, last_live=now
        )
        run.current.mixture_changes = run.mixture_changes
        cluster.save_run(run)
        cluster.save_attempt(run.current)
        return run.current

    def _renew(self, attempt: Attempt, box: Box, now: float, known_s: float = 0.0) -> None:
        """Renew the box's lease, to at least `known_s` seconds: the lease that the client knows (up to a limit)."""
        if box.presence is BoxPresence.GONE:
            self.cluster.revive(attempt, box, now)
        box.lease_until = now + self.cluster.box_lease_policy().promised(known_s, self.limits.lease_max_s)
        box.reported_at = now

    def _find_box(self, run: str, attempt_number: int, number: int, client_id: str) -> tuple[Attempt, Box]:
        attempt = self.cluster.attempt(run, attempt_number)
        box, where = attempt.boxes.get(number), f"box {number} of run {run} (attempt {attempt_number})"
        if box is None:
            raise UnknownRunError(
                f"{where} has not been opened: start the job again (gRPC clients: call OpenRun first)"
            )
        if box.client != client_of(client_id):
            raise BoxTakenError(f"{where} is held by {box.who()}: give each process of the job its own box number")
        if box.presence is BoxPresence.CLOSED:
            raise SupersededError(f"{where} was closed by its client: open it again with a new Appliance")
        return attempt, box

    def watch_run(self, request: pb.WatchRunRequest) -> pb.WatchRunReply:
        """Record a box's report and return the reply at once. (The service waits for a change before it replies.)"""
        self.report_box(request)
        return self.box_view(request)

    def report_box(self, request: pb.WatchRunRequest) -> None:
        self._report(request)

    def box_view(self, request: pb.WatchRunRequest) -> pb.WatchRunReply:
        attempt, box = self._find_box(request.run, request.attempt, request.box, request.client_id)
        lease_policy = self.cluster.box_lease_policy()
        self._to_boxes.keep(lease_policy.lease_s, box.reported_at)
        box.lease_until = max(box.lease_until, box.reported_at + lease_policy.lease_s)
        self.cluster.journal.commit()
        reply = views.watch_reply(self.cluster, attempt, box, request.seen_version, lease_policy, self._wall())
        reply.commit_mark = self.cluster.journal.mark()
        return reply

    def box_hold(self, request: pb.WatchRunRequest) -> float:
        """Return the seconds for which a WatchRun call is held if nothing changes."""
        name = f"{request.run}.{request.box}"
        return min(request.hold_s, self.cluster.box_lease_policy().left(self._clock(), name))

    def box_version(self, request: pb.WatchRunRequest) -> int:
        _, box = self._find_box(request.run, request.attempt, request.box, request.client_id)
        return box.version

    def _report(self, request: pb.WatchRunRequest) -> tuple[Attempt, Box]:
        now = self._clock()
        self.cluster.journal.confirm(request.commit_mark, f"box {request.box} of run {request.run}")
        attempt, box = self._find_box(request.run, request.attempt, request.box, request.client_id)
        check_progress(request, attempt.num_workers, self.limits)
        self._renew(attempt, box, now, request.lease_s)
        box_progress.note_epoch_starts(self.cluster, attempt, box, request)
        delivered = request.delivered
        box_progress.note_abandoned(self.cluster, attempt, box, request)
        box_progress.note_fence(self.cluster, box, request)
        if delivered.step >= box.delivered.step:  # else a later report was received before this one
            passed = attempt.abandoned_between(box.step, delivered.step)
            if request.epoch_ended != box.epoch_ended or delivered.epoch != box.delivered.epoch or passed:
                self.cluster.touch(attempt, box)
            attempt.set_ended(box, request.epoch_ended)
            box.waiting_for, box.waited_s = request.waiting_for, request.waited_s
            box.note_waits(now, request.waited_by_slot_s)
            box_progress.note_sources(box, request)
            if delivered.slots:
                box_progress.advance(self.cluster, attempt, box, request, now)
        launch_restarts.note_offer(self.cluster.snapshot_index, attempt, box, request)
        box_progress.note_unreachable(self.cluster, attempt, box, request, now)
        self.settle()
        return attempt, box

    def close_run(self, request: pb.CloseRunRequest) -> None:
        """Close the box for its client. A call for a box that is superseded or closed has no effect, because that box
        is released already."""
        try:
            attempt, box = self._find_box(request.run, request.attempt, request.box, request.client_id)
        except (SupersededError, UnknownRunError):
            self.cluster.journal.commit()
            return
        if request.HasField("progress"):
            self._report(request.progress)
        closing.close_box(self.cluster, attempt, box, self._clock(), forget=request.forget)
        self.settle()

    def end_run(self, request: pb.EndRunRequest) -> pb.EndRunReply:
        """End a run, or all runs of a job, for an operator."""
        reply = closing.end_runs(self.cluster, request.run)
        self.settle()
        return reply

    # -------------------------------------------------------------------------------------------------------- workers

    def register_worker(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerReply:
        now, cluster = self._clock(), self.cluster
        check_registration(request, self.limits)
        cluster.journal.confirm(request.commit_mark, f"worker {request.worker}")
        if (request.worker, request.session) in self._old_sessions:
            raise SupersededError(
                f"another process has since registered as worker {request.worker}: give every worker its own --name"
            )
        if request.worker not in cluster.workers and len(cluster.workers) >= self.limits.workers_max:
            raise OverloadedError(
                f"at most {self.limits.workers_max} workers can be registered, got one more: start fewer workers with "
                "more --slots each"
            )
        old = cluster.workers.get(request.worker)
        keeps = AssignedSlots()
        draining = request.draining
        if old is not None and old.session == request.session:
            keeps, draining = old.slots, old.draining or request.draining
        elif old is not None:
            cluster.drop_worker(old, f"worker {old.name} was restarted", now)
            self._old_sessions[old.name, old.session] = None
            while len(self._old_sessions) > self.limits.past_sessions:
                self._old_sessions.popitem(last=False)
        worker = Worker(
            request.worker,
            request.session,
            request.host_id,
            request.slots,
            request.local_address,
            request.tcp_address,
            registered=True,
            lease_until=now,
            seen_at=now,
            version=cluster.next_version(),
            draining=draining,
            allow=tuple(request.allow),
            release=request.version,
            cores=request.cores,
            slots=keeps,
        )
        cluster.workers[worker.name] = worker
        cluster.events.add("worker joined", f"worker {worker.name} has {worker.capacity} slots", worker=worker.name)
        cluster.count_fleet(now)
        lease_policy = cluster.worker_lease_policy()
        self._to_workers.keep(lease_policy.lease_s, now)
        worker.lease_until = now + lease_policy.lease_s
        cluster.free_capacity.offer(worker)
        for key in sorted(worker.slots)[worker.capacity :]:
            slot = cluster.slot(key)
            if slot is not None and slot.worker == worker.name:
                cluster.move(slot, f"worker {worker.name} came back with {worker.capacity} slots", None)
            elif slot is not None:
                cluster.cancel_migration(slot)
        for key in sorted(worker.slots):  # the worker's addresses may have changed
            slot = cluster.slot(key)
            if slot is not None:
                cluster.bump_box(*cluster.box_of(slot))
        self.settle()
        return pb.RegisterWorkerReply(
            lease_s=lease_policy.lease_s, version=VERSION, heartbeat_s=lease_policy.heartbeat_s
        )

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        """Record a worker's report and return the reply at once. (The service waits for a change before it replies.)"""
        self.report_worker(request)
        return self.worker_view(request)

    def report_worker(self, request: pb.HeartbeatRequest) -> None:
        now, cluster = self._clock(), self.cluster
        check_measures(hold_s=request.hold_s, lease_s=request.lease_s)
        worker = self._registered(request.worker, request.session)
        if worker is not None:
            check_reports(request.slots, worker.capacity, self.limits)
            worker.seen_at = now
            worker.lease_until = now + cluster.worker_lease_policy().promised(request.lease_s, self.limits.lease_max_s)
            ended, most = 0, self.limits.slots_at_once // slot_reports.END_COST
            for report in request.slots:
                if report.phase != pb.FAILED or ended < most:  # the worker's next report repeats an end skipped here
                    ended += slot_reports.note(cluster, self._migrations, worker, report, now)
            if request.leaving and not worker.draining:
                self._migrations.set_draining(worker, True, now)
            self.settle()

    def worker_hung_up(self, name: str, session: str) -> None:
        """Shorten the lease of a worker whose connection ended during a heartbeat, because it may have died."""
        worker = self._registered(name, session)
        if worker is not None:
            longer = self.cluster.worker_lease_policy().lease_s / self.limits.worker_lease_s
            worker.lease_until = min(worker.lease_until, self._clock() + self.limits.hung_up_s * longer)

    def worker_view(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        reply = pb.HeartbeatReply()
        for _ in self.worker_view_steps(request, reply):
            pass
        return reply

    def worker_view_steps(self, request: pb.HeartbeatRequest, reply: pb.HeartbeatReply) -> Iterator[None]:
        """Fill the reply in steps, between which other calls are served. The reply carries the worker's version at the
        first step. So a change that happens between two steps is in the reply to the worker's next heartbeat."""
        worker = self._registered(request.worker, request.session)
        if worker is None:
            self.cluster.journal.commit()
            reply.register_again = True
            return
        lease_policy = self.cluster.worker_lease_policy()
        self._to_workers.keep(lease_policy.lease_s, worker.seen_at)
        worker.lease_until = max(worker.lease_until, worker.seen_at + lease_policy.lease_s)
        self.cluster.journal.commit()
        slot_requests = self.state_queries.slot_requests(worker.name, self._clock())
        stuck = self._migrations.stuck(worker, self._clock()) if worker.draining else 0
        yield from views.fill_heartbeat(
            reply, self.cluster, worker, request, lease_policy, self._wall(), slot_requests, stuck
        )
        reply.commit_mark = self.cluster.journal.mark()

    def worker_hold(self, request: pb.HeartbeatRequest) -> float:
        """Return the seconds for which a Heartbeat call is held if nothing changes."""
        return min(request.hold_s, self.cluster.worker_lease_policy().left(self._clock(), request.worker))

    def worker_version(self, request: pb.HeartbeatRequest) -> int:
        """Return the version of the worker's view; -1, which no peer has seen, if the worker must register again."""
        worker = self._registered(request.worker, request.session)
        return -1 if worker is None else worker.version

    def _registered(self, name: str, session: str) -> Worker | None:
        worker = self.cluster.workers.get(name)
        return worker if worker is not None and worker.session == session and worker.registered else None

    def deregister_worker(self, request: pb.DeregisterWorkerRequest) -> None:
        worker = self._registered(request.worker, request.session)
        if worker is not None:
            worker.draining = worker.left = True
            self.cluster.events.add("worker left", f"worker {worker.name} is shutting down", worker=worker.name)
            self.cluster.drop_worker(worker, f"worker {worker.name} drains", None)
        self.settle()

    def drain_worker(self, request: pb.DrainWorkerRequest) -> pb.DrainWorkerReply:
        """Start or end the drain of a worker for an operator, or report its state."""
        reply = self._migrations.order(request, self._clock())
        self.settle()
        return reply

    # ----------------------------------------------------------------------------------------------- snapshots, blobs

    def slot_to_recover(self, key: SlotKey, generation: int) -> Slot:
        """Return the slot for a worker whose runner starts or prepares to take it over. `generation` must be the slot's
        present one or that of its migration target. Raises UnknownRunError, SupersededError."""
        slot = self.cluster.slot(key)
        if slot is not None and slot.target is not None and slot.target.generation == generation:
            return slot
        return self.slot_of_generation(key, generation)

    def slot_of_generation(self, key: SlotKey, generation: int) -> Slot:
        """Return the slot, if `generation` is its present one. Raises UnknownRunError for an unknown slot,
        SupersededError for another generation, and for a slot without a worker."""
        attempt = self.cluster.attempt(key.run, key.attempt)
        slot = self.cluster.slot(key)
        if slot is None:
            raise UnknownRunError(
                f"run {key.run} (attempt {attempt.number}) has no slot {key.slot} in box {key.box}: restart this worker"
            )
        if slot.generation != generation or not slot.worker:
            present = slot.generation if slot.worker else "that of its runner (it has none now)"
            raise SupersededError(
                f"generation of {slot} of run {key.run} must be {present}, got {generation}: the coordinator has given "
                "the slot to another runner, or to none, so stop this one"
            )
        return slot

    def snapshot_stored(self, header: pb.SnapshotHeader) -> None:
        """Record that a snapshot is on disk. Raises SupersededError if the slot has a newer generation by now.

        Such a late snapshot may have replaced another one of the same position on disk. It is kept nevertheless,
        because the content of a snapshot depends only on its position, unless the mixture was changed since.
        """
        key = SlotKey(header.run, header.attempt, header.box, header.slot)
        kept = DurableSnapshot(header.total, header.epoch, header.size, header.epoch_start)
        slot = self.cluster.slot(key)
        if slot is None or slot.is_outdated(header.generation, header.total):
            self.cluster.snapshot_index.discard(key, kept)
        else:
            self.cluster.snapshot_index.add(key, kept)
            slot.gauge.saved_at = self._clock()
        self.slot_of_generation(key, header.generation)

    def blob_stored(self, name: str, size: int, credential: str = "") -> None:
        """Record that a blob is on disk. `size`: bytes; `credential`: digest of the sender's credential token."""
        self.cluster.snapshot_index.add_blob(name, size, self._clock(), credential)

    # ---------------------------------------------------------------------------------------------------------- state

    def begin_state(self, request: pb.FetchStateRequest) -> StateQuery:
        """Return the state query that answers the request. It may be complete already. The caller must call `end_state`
        when it has its answer or gives up. Raises StateUnavailableError, UnknownRunError, SupersededError,
        OverloadedError."""
        check_state_query(request)
        caller_box: int | None = None
        if request.HasField("progress"):
            self._report(request.progress)
            caller_box = request.progress.box
        if request.aggregate_blob:
            query = self.state_queries.begin_aggregation(request, caller_box or 0, self._clock())
        else:
            query = self.state_queries.begin(request, caller_box, self._clock())
        self.settle()
        return query

    def sent_state(self, query: StateQuery, box: int) -> None:
        """Record that the saved states of box `box` were sent to one caller of the query."""
        self.state_queries.sent(query, box)

    def end_state(self, query: StateQuery, sent: int = 0) -> None:
        """Remove a caller of the query that has its answer or has given up. `sent`: number of boxes whose saved states
        this caller was sent. When the last caller is removed, the open requests to workers are withdrawn."""
        self.state_queries.end(query, sent)

    def admit_state(self, answer: pb.StateAnswer) -> float | None:
        """Return None if the coordinator can take the data of a worker's answer now, or does not need it. Otherwise
        return the longest time in seconds to wait for memory. The topic ANSWERS_FREED announces freed memory."""
        return self.state_queries.admit(answer.request, answer.state_bytes, self._clock())

    def answer_wanted(self, answer: pb.StateAnswer) -> bool:
        return self.state_queries.wanted(answer.request)

    def answer_lost(self, answer: pb.StateAnswer) -> None:
        """Free the memory that was reserved for a worker's answer whose data did not arrive."""
        self.state_queries.lost(answer.request)

    def answer_state(self, answer: pb.StateAnswer, data: bytes) -> None:
        check_answer(answer, self.limits)
        self.state_queries.answer(answer, data)
        self.settle()

    # ----------------------------------------------------------------------------------------------- time, operators

    def tick(self, unreceived_s: float = 0.0) -> None:
        """End the leases that are over, and do all other periodic work. The server calls this several times per lease.
        `unreceived_s`: age in seconds of the oldest call that may still be queued in gRPC. The call may be a heartbeat,
        so an overloaded coordinator extends leases by this time."""
        now, cluster, limits = self._clock(), self.cluster, self.limits
        gap, self._ticked = now - self._ticked, now
        cluster.load_factor = updated_load_factor(cluster.load_factor, max(gap, unreceived_s), limits.tick_s)
        late = gap if gap > limits.stall_s else gap - 2 * limits.tick_s
        if late > 0:
            gap = late
            for worker in cluster.workers.values():
                worker.lease_until += gap
            for attempt in cluster.open_attempts():
                attempt.last_live += gap
                for box in attempt.boxes.values():
                    box.lease_until += gap
        load_factor = cluster.load_factor
        cluster.drop_silent(now, patience_s(load_factor, cluster.worker_lease_policy().lease_s, unreceived_s))
        cluster.count_fleet(now)
        overdue = now - patience_s(load_factor, cluster.box_lease_policy().lease_s, unreceived_s)
        vacated = 0  # in slots; beyond `slots_at_once` the rest is left to the next tick
        named: set[str] = set()
        cluster.live_boxes = 0
        for attempt in cluster.open_attempts():
            named |= attempt.blobs
            live = 0
            for box in attempt.boxes.values():
                live += box.presence is BoxPresence.LIVE
                if vacated >= limits.slots_at_once:
                    continue
                if box.presence is BoxPresence.LIVE and box.lease_until <= overdue:
                    live -= 1
                    vacated += BOX_COST + len(box.slots)
                    silent = now - box.reported_at
                    note = f"the training job of box {box.number} has not reported for {silent:.1f} s"
                    cluster.vacate(attempt, box, BoxPresence.GONE, note)
                elif 0.0 < box.lingers_until <= now:
                    box.lingers_until = 0.0
                    vacated += BOX_COST + len(box.slots)
                    cluster.vacate(attempt, box, BoxPresence.CLOSED, f"box {box.number} was closed")
            cluster.live_boxes += live
            if live:
                attempt.last_live = now
            elif now - attempt.last_live > limits.abandoned_s:
                why = (
                    f"no box of attempt {attempt.number} of run {attempt.run} has reported for {limits.abandoned_s:g} s"
                )
                cluster.end(attempt, AttemptState.ENDED, why)
        cluster.snapshot_index.drop_idle_blobs(named, now)
        cluster.free_discarded(now)
        self._migrations.tick(now)
        self._renew_tickets()
        self._fail_disallowed_slots(now)
        self._to_workers.shorten(cluster.worker_lease_policy().lease_s, now)
        self._to_boxes.shorten(cluster.box_lease_policy().lease_s, now)
        self.settle()

    def _renew_tickets(self) -> None:
        expires = expiry(self._wall())
        if expires != self.cluster.tickets_expire:
            self.cluster.tickets_expire = expires
            for attempt in self.cluster.open_attempts():
                for box in attempt.boxes.values():
                    self.cluster.bump_box(attempt, box)

    def _fail_disallowed_slots(self, now: float) -> None:
        """Fail slots that have never run and that no registered worker may run. A slot that has run waits until its
        worker comes back. After its start the coordinator first waits for the length of a lease, in which all workers
        register."""
        cluster = self.cluster
        if now < self._found_by or not cluster.waiting:
            return
        asked: dict[str, str] = {}
        failed = 0
        for box in [box for attempt in cluster.open_attempts() for box in attempt.boxes.values()]:
            input_fn = box.opening.loader.input_fn
            if input_fn not in asked:
                asked[input_fn] = why_not_allowed(input_fn, cluster.workers.values())
            for slot in box.slots if asked[input_fn] else ():
                if slot.key in cluster.waiting and not slot.restarts:
                    failed += 1
                    if failed > self.limits.slots_at_once:
                        return
                    del cluster.waiting[slot.key]
                    cluster.fail(slot, detail_of(InputFnNotAllowedError(asked[input_fn])))

    def status(self) -> pb.StatusReply:
        reply = pb.StatusReply()
        for _ in self.status_steps(reply):
            pass
        return reply

    def status_steps(self, reply: pb.StatusReply) -> Iterator[None]:
        """Fill the reply to a status call in steps, between which other calls can be served."""
        now = self._clock()
        reply.wall_s = self._wall()
        return views.fill_status(reply, self.cluster, now, now - self._started)
