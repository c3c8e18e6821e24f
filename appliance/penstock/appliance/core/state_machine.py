"""State machine of the coordinator: takes calls and returns replies, with no I/O but the journal's; time and seeds are
passed in.

Each call of coordinator.proto, and the passing of time (`tick`), is one method of `attempts`, `workers`,
`state_queries` or of this class. It checks the sender, changes the cluster state, and settles: waiting slots are
placed, queries are planned again, all is committed. The reply is made after the commit, so everything in it is on disk.
All calls are idempotent, and late calls of superseded peers change nothing: see the order contract in
coordinator.proto. Methods run in one thread and never wait: the service holds calls until `changed` announces their
topic.

Only silence shows a death reliably. When a worker's lease ends, its slots move; when a client's ends, its box's workers
are freed, and the client keeps the box until the next attempt, because a stopped process can recover. If the
coordinator itself was stopped, all leases are extended by that time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from penstock.appliance.core import views
from penstock.appliance.core.attempts import Attempts
from penstock.appliance.core.cluster import ClusterState, Topic
from penstock.appliance.core.entities import Box, Slot, Worker
from penstock.appliance.core.free_capacity import why_not_allowed
from penstock.appliance.core.leases import PromisedLease, patience_s, updated_load_factor
from penstock.appliance.core.migration import Migrations
from penstock.appliance.core.placement import SLOTS_AT_ONCE, Placement
from penstock.appliance.core.recovery import restore
from penstock.appliance.core.request_checks import check_answer, check_state_query
from penstock.appliance.core.state_queries import StateQueries
from penstock.appliance.core.state_query import StateQuery
from penstock.appliance.core.workers import Workers
from penstock.appliance.journal.journal import Journal
from penstock.appliance.journal.snapshot_index import DurableSnapshot, SlotKey, SnapshotIndex
from penstock.appliance.limits import Limits
from penstock.proto.errors import InputFnNotAllowedError, SupersededError, UnknownRunError
from penstock.proto.rpc.credentials.tickets import expiry
from penstock.proto.rpc.wire_errors import detail_of
from penstock.proto.v1 import coordinator_pb2 as pb

RETURN_S = 25.0
"""Shortest lease in seconds of every peer in the journal when a coordinator starts on another host: peers notice only
by failed pings (channel.py), and then resolve the name again."""
STALL_S = 1.0
"""Delay of the coordinator's own timer in seconds above which it was stopped and so received no calls: every lease is
extended by all of it; by a shorter delay, by the part above two periods (`tick_s`). An overloaded coordinator waits
longer: leases.patience_s."""


class StateMachine:
    """State machine of the coordinator; all methods run in its event loop. `wall`: seconds since the Unix epoch;
    `changed`: called with every topic whose view has changed; must not call the state machine."""

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
        self.clock = clock
        self._started = self._ticked = now = clock()
        self._to_workers = PromisedLease(journal, "worker_lease_s", limits.worker_lease_s, now)
        self._to_boxes = PromisedLease(journal, "client_lease_s", limits.client_lease_s, now)
        self.cluster = ClusterState(journal, snapshot_index, limits, changed, clock, wall)
        self.cluster.tickets_expire = expiry(wall())
        self.placement = Placement(self.cluster)
        self.state_queries = StateQueries(self.cluster)
        self._migrations = Migrations(self.cluster, self.placement)
        self.attempts = Attempts(self.cluster, self.placement, self._to_boxes, fresh_seed, self.settle)
        self.workers = Workers(
            self.cluster, self.placement, self._migrations, self.state_queries, self._to_workers, self.settle
        )
        away_s = RETURN_S if journal.noted("host", "") not in ("", host) else 0.0
        if journal.noted("host", "") != host:
            journal.note("host", host)
        worker_lease_s = max(self._to_workers.lease_s, away_s)
        self._found_by = now + worker_lease_s
        restore(self.cluster, self.placement.waiting, now, worker_lease_s, max(self._to_boxes.lease_s, away_s))

    def settle(self) -> None:
        self.placement.place_waiting()
        self.state_queries.settle()
        self.cluster.journal.commit()

    # ------------------------------------------------------------------------------------- snapshots, blobs, states

    def slot_to_recover(self, key: SlotKey, generation: int) -> Slot:
        """Return the slot for a worker whose runner starts, under the slot's generation or its migration target's.
        Raises UnknownRunError, SupersededError."""
        slot = self.cluster.slot(key)
        if slot is not None and slot.target is not None and slot.target.generation == generation:
            return slot
        return self.slot_of_generation(key, generation)

    def slot_of_generation(self, key: SlotKey, generation: int) -> Slot:
        """Return the slot, if it has a worker and this generation. Raises UnknownRunError, SupersededError."""
        self.cluster.attempt(key.run, key.attempt)
        slot = self.cluster.slot(key)
        if slot is None:
            raise UnknownRunError(f"run {key.run} has no box {key.box} slot {key.slot}: restart this worker")
        if slot.generation != generation or not slot.worker:
            present = slot.generation if slot.worker else "that of its runner (it has none now)"
            raise SupersededError(
                f"generation of {slot} of run {key.run} must be {present}, got {generation}: stop this runner"
            )
        return slot

    def snapshot_stored(self, header: pb.SnapshotHeader) -> None:
        """Record that a snapshot is on disk. Raises SupersededError if the slot has a newer generation. A late one,
        which may have replaced another on disk, is kept: its content depends only on its position, unless the
        mixture was changed."""
        key = SlotKey(header.run, header.attempt, header.box, header.slot)
        kept = DurableSnapshot(header.total, header.epoch, header.size, header.epoch_start)
        slot = self.cluster.slot(key)
        if slot is None or slot.is_outdated(header.generation, header.total):
            self.cluster.snapshot_index.discard(key, kept)
        else:
            self.cluster.snapshot_index.add(key, kept)
            slot.gauge.saved_at = self.clock()
        self.slot_of_generation(key, header.generation)

    def begin_state(self, request: pb.FetchStateRequest) -> StateQuery:
        """Return the state query that answers the request, perhaps complete already. The caller must call
        `state_queries.end`. Raises StateUnavailableError, UnknownRunError, SupersededError, OverloadedError."""
        check_state_query(request)
        caller_box: int | None = None
        if request.HasField("progress"):
            self.attempts.report_box(request.progress)
            caller_box = request.progress.box
        if request.aggregate_blob:
            query = self.state_queries.begin_aggregation(request, caller_box or 0, self.clock())
        else:
            query = self.state_queries.begin(request, caller_box, self.clock())
        self.settle()
        return query

    def answer_state(self, answer: pb.StateAnswer, data: bytes) -> None:
        check_answer(answer)
        self.state_queries.answer(answer, data)
        self.settle()

    # ----------------------------------------------------------------------------------------------- time, operators

    def tick(self, unreceived_s: float = 0.0) -> None:
        """End leases that are over, and do all other periodic work. `unreceived_s`: age of the oldest call, perhaps a
        heartbeat, that may be queued in gRPC, by which an overloaded coordinator extends leases."""
        now, cluster = self.clock(), self.cluster
        self._extend_leases(now, unreceived_s)
        self.workers.drop_silent(
            now, patience_s(cluster.load_factor, cluster.worker_lease_policy().lease_s, unreceived_s)
        )
        cluster.count_fleet(now)
        takers = (worker for worker in cluster.workers.values() if worker.registered and not worker.draining)
        cluster.lane_protocols = Counter(worker.lane_protocol for worker in takers)
        self.attempts.tick(now, patience_s(cluster.load_factor, cluster.box_lease_policy().lease_s, unreceived_s))
        in_use = {blob for attempt in cluster.open_attempts() for blob in attempt.blobs}
        cluster.snapshot_index.drop_idle_blobs(in_use, now)
        self._migrations.tick(now)
        self._renew_tickets()
        self._fail_disallowed_slots(now)
        self._to_workers.shorten(cluster.worker_lease_policy().lease_s, now)
        self._to_boxes.shorten(cluster.box_lease_policy().lease_s, now)
        self.settle()

    def misses_peers(self) -> bool:
        """Return whether more than half of a peer's lease has passed without a report."""
        cluster, now = self.cluster, self.clock()
        late_by = now + cluster.worker_lease_policy().lease_s / 2
        if any(worker.lease_until < late_by for worker in cluster.workers.values()):
            return True
        late_by = now + cluster.box_lease_policy().lease_s / 2
        live = [attempt.boxes[number] for attempt in cluster.open_attempts() for number in attempt.live]
        return any(box.lease_until < late_by for box in live)

    def ask_silent(self, since: float) -> list[Worker | Box]:
        """Answer the long polls of the peers that have not reported since then, so that they report. Return them."""
        cluster = self.cluster
        workers = [worker for worker in cluster.workers.values() if worker.reported_at < since]
        for worker in workers:
            cluster.bump_worker(worker.name)
        boxes = [(attempt, attempt.boxes[number]) for attempt in cluster.open_attempts() for number in attempt.live]
        silent = [(attempt, box) for attempt, box in boxes if box.reported_at < since]
        for attempt, box in silent:
            cluster.bump_box(attempt, box)
        return [*workers, *(box for _, box in silent)]

    def _extend_leases(self, now: float, unreceived_s: float) -> None:
        """Extend all leases by the time in which the coordinator itself was stopped or late."""
        cluster, tick_s = self.cluster, self.cluster.limits.tick_s
        gap, self._ticked = now - self._ticked, now
        cluster.load_factor = updated_load_factor(cluster.load_factor, max(gap, unreceived_s), tick_s)
        late = gap if gap > STALL_S else gap - 2 * tick_s
        if late > 0:
            for worker in cluster.workers.values():
                worker.lease_until += late
            for attempt in cluster.open_attempts():
                attempt.last_live += late
                for box in attempt.boxes.values():
                    box.lease_until += late

    def _renew_tickets(self) -> None:
        expires = expiry(self.cluster.wall())
        if expires != self.cluster.tickets_expire:
            self.cluster.tickets_expire = expires
            for attempt in self.cluster.open_attempts():
                for box in attempt.boxes.values():
                    self.cluster.bump_box(attempt, box)

    def _fail_disallowed_slots(self, now: float) -> None:
        """Fail slots that never ran and that no worker may run, once all had a lease's time to register."""
        cluster, waiting = self.cluster, self.placement.waiting
        if now < self._found_by or not waiting:
            return
        refused: dict[str, str] = {}
        fresh = [slot for slot in waiting.values() if not slot.restarts]
        for slot in fresh[:SLOTS_AT_ONCE]:
            input_fn = cluster.box_of(slot)[1].opening.loader.input_fn
            if input_fn not in refused:
                refused[input_fn] = why_not_allowed(input_fn, cluster.workers.values())
            if refused[input_fn]:
                del waiting[slot.key]
                self.placement.fail(slot, detail_of(InputFnNotAllowedError(refused[input_fn])))

    def status_steps(self, reply: pb.StatusReply) -> Iterator[None]:
        """Fill the reply to a status call in steps, between which other calls can be served."""
        now = self.clock()
        reply.wall_s = self.cluster.wall()
        return views.fill_status(reply, self.cluster, now, now - self._started)
