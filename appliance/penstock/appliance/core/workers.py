"""Workers: calls of worker daemons, which register, report what their slots' runners do, and leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.appliance.core import launch_restarts, quarantine, views
from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Slot, Worker, lane_protocol_of
from penstock.appliance.core.leases import LEASE_MAX_S, PromisedLease
from penstock.appliance.core.migration import Migrations
from penstock.appliance.core.placement import SLOTS_AT_ONCE, Placement
from penstock.appliance.core.request_checks import check_measures, check_registration, check_reports
from penstock.appliance.core.state_queries import StateQueries
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.errors import MemoryLimitError, OverloadedError, SupersededError
from penstock.proto.rpc.bounds.message_bounds import owned
from penstock.proto.rpc.version import VERSION
from penstock.proto.rpc.wire_errors import detail_of
from penstock.proto.state.position import EPOCHS_AHEAD
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

HUNG_UP_S = 1.5
"""Remaining lease in seconds after a connection ends during a heartbeat, n times as long as the lease grows: the
process has probably died; one that only lost the connection is back in half a second."""
PAST_SESSIONS = 64
"""Replaced worker processes whose sessions are remembered, so that their late calls are refused."""
WORKERS_MAX = 100_000
END_COST = 2
"""Cost of handling a runner's end (75 us), in placed slots; a heartbeat handles SLOTS_AT_ONCE / END_COST of them."""
_MAX_ACTIVITY, _MAX_STACK = 300, 12_000
"""Longest activity and stack taken from a report of a hang or crash, in characters; every view of the box has them."""
_KEPT_FIRSTS = EPOCHS_AHEAD + 1
"""Newest epochs whose first batches are kept for a slot's next runner."""
_NO_REASON = records_pb2.ErrorDetail(
    name="PenstockError", message="the slot's runner failed, and the worker reported no reason: see the worker's log"
)


class Workers:
    """Workers of the fleet. `settle`: completes a change (StateMachine.settle)."""

    def __init__(
        self,
        cluster: ClusterState,
        placement: Placement,
        migrations: Migrations,
        state_queries: StateQueries,
        promised: PromisedLease,
        settle: Callable[[], None],
    ) -> None:
        self._cluster, self._placement, self._migrations = cluster, placement, migrations
        self._state_queries, self._promised = state_queries, promised
        self._settle = settle
        self._old_sessions: deque[tuple[str, str]] = deque(maxlen=PAST_SESSIONS)

    def register_worker(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerReply:
        cluster = self._cluster
        now = cluster.clock()
        check_registration(request)
        cluster.journal.confirm(request.commit_mark, f"worker {request.worker}")
        if (request.worker, request.session) in self._old_sessions:
            raise SupersededError(
                f"another process has since registered as worker {request.worker}: give every worker its own --name"
            )
        if request.worker not in cluster.workers and len(cluster.workers) >= WORKERS_MAX:
            raise OverloadedError(f"at most {WORKERS_MAX} workers can register: start fewer, with more --slots each")
        old = cluster.workers.get(request.worker)
        keeps: dict[SlotKey, int] = {}
        draining = request.draining
        if old is not None and old.session == request.session:
            keeps, draining = old.slots, old.draining or request.draining
        elif old is not None:
            self._placement.drop_worker(old, f"worker {old.name} was restarted", now)
            self._old_sessions.append((old.name, old.session))
        worker = Worker(
            request.worker,
            request.session,
            request.host_id,
            request.slots,
            request.local_address,
            request.tcp_address,
            registered=True,
            lease_until=now,
            reported_at=now,
            version=cluster.next_version(),
            draining=draining,
            allow=tuple(request.allow),
            release=request.version,
            cores=request.cores,
            lane_protocol=lane_protocol_of(request),
            slots=keeps,
        )
        cluster.workers[worker.name] = worker
        cluster.events.add("worker joined", f"worker {worker.name} has {worker.capacity} slots", worker=worker.name)
        cluster.count_fleet(now)
        lease_policy = cluster.worker_lease_policy()
        self._promised.keep(lease_policy.lease_s, now)
        worker.lease_until = now + lease_policy.lease_s
        cluster.free_capacity.offer(worker)
        self._restore_slots(worker)
        self._settle()
        return pb.RegisterWorkerReply(lease_s=lease_policy.lease_s, version=VERSION, heartbeat_s=lease_policy.idle_s)

    def _restore_slots(self, worker: Worker) -> None:
        """Take what exceeds the capacity of a worker that is back, and tell boxes its addresses, perhaps new."""
        note = f"worker {worker.name} came back with {worker.capacity} slots"
        self._placement.drop_worker(worker, note, None, worker.capacity)
        for slot in self._cluster.slots_of(worker):
            self._cluster.bump_box(*self._cluster.box_of(slot))

    def _registered(self, name: str, session: str) -> Worker | None:
        worker = self._cluster.workers.get(name)
        return worker if worker is not None and worker.session == session and worker.registered else None

    def report_worker(self, request: pb.HeartbeatRequest) -> None:
        cluster = self._cluster
        now = cluster.clock()
        check_measures(hold_s=request.hold_s, lease_s=request.lease_s)
        worker = self._registered(request.worker, request.session)
        if worker is not None:
            check_reports(request.slots, worker.capacity)
            worker.reported_at = now
            worker.lease_until = now + cluster.worker_lease_policy().promised(request.lease_s, LEASE_MAX_S)
            batches = sum(report.produced + report.delivered for report in request.slots)
            worker.is_idle, worker.batches = batches == worker.batches, batches
            ended, most = 0, SLOTS_AT_ONCE // END_COST
            for report in request.slots:
                if report.phase != pb.FAILED or ended < most:  # the worker's next report repeats an end skipped here
                    ended += self._note_report(worker, report, now)
            if request.leaving and not worker.draining:
                self._migrations.set_draining(worker, True, now)
            self._settle()

    def worker_view(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        cluster, worker = self._cluster, self._registered(request.worker, request.session)
        if worker is None:
            cluster.journal.commit()
            return pb.HeartbeatReply(register_again=True)
        lease_policy = cluster.worker_lease_policy()
        self._promised.keep(lease_policy.lease_s, worker.reported_at)
        worker.lease_until = max(worker.lease_until, worker.reported_at + lease_policy.lease_s)
        cluster.journal.commit()
        slot_requests = self._state_queries.slot_requests(worker.name, cluster.clock())
        stuck = len(self._migrations.stuck(worker, cluster.clock())) if worker.draining else 0
        return views.heartbeat_reply(cluster, worker, request, lease_policy, slot_requests, stuck)

    def worker_hold(self, request: pb.HeartbeatRequest) -> float:
        cluster, worker = self._cluster, self._registered(request.worker, request.session)
        is_idle = worker is not None and worker.is_idle
        return min(request.hold_s, cluster.worker_lease_policy().left(cluster.clock(), request.worker, is_idle=is_idle))

    def worker_version(self, request: pb.HeartbeatRequest) -> int:
        """Return the version of the worker's view; -1, which no peer has seen, if it must register again."""
        worker = self._registered(request.worker, request.session)
        return -1 if worker is None else worker.version

    def worker_hung_up(self, name: str, session: str) -> None:
        """Shorten the lease of a worker whose connection ended during a heartbeat: it may have died."""
        worker = self._registered(name, session)
        if worker is not None:
            longer = self._cluster.worker_lease_policy().lease_s / self._cluster.limits.worker_lease_s
            worker.lease_until = min(worker.lease_until, self._cluster.clock() + HUNG_UP_S * longer)

    def deregister_worker(self, request: pb.DeregisterWorkerRequest) -> None:
        worker = self._registered(request.worker, request.session)
        if worker is not None:
            worker.draining = worker.left = True
            self._cluster.free_capacity.offer(worker)
            self._cluster.events.add("worker left", f"worker {worker.name} is shutting down", worker=worker.name)
            self._placement.drop_worker(worker, f"worker {worker.name} drains", None)
        self._settle()

    def drain_worker(self, request: pb.DrainWorkerRequest) -> pb.DrainWorkerReply:
        reply = self._migrations.order(request, self._cluster.clock())
        self._settle()
        return reply

    def drop_silent(self, now: float, patience_s: float) -> None:
        """Drop workers whose leases ended over `patience_s` ago; after SLOTS_AT_ONCE slots, the next call continues."""
        cluster, moved = self._cluster, 0
        for worker in [worker for worker in cluster.workers.values() if worker.lease_until + patience_s <= now]:
            if moved >= SLOTS_AT_ONCE:
                break
            moved += len(worker.slots)
            del cluster.workers[worker.name]
            cluster.free_capacity.forget(worker.name)
            note = f"worker {worker.name} has not reported for {now - worker.reported_at:.1f} s"
            if not worker.left:
                cluster.workers_lost += 1
                cluster.events.add("worker lost", note, worker=worker.name)
            self._placement.drop_worker(worker, note, now)

    # --------------------------------------------------------------------------------------------- reports about slots

    def _note_report(self, worker: Worker, report: pb.SlotReport, now: float) -> bool:
        """Record a report about a slot that the worker runs or prepares. Return whether it is the first of a runner's
        end. A report of another worker or generation changes nothing."""
        cluster = self._cluster
        slot = cluster.slot(SlotKey(report.run, report.attempt, report.box, report.slot))
        if slot is not None and slot.is_migrating_to(worker.name, report.generation):
            self._migrations.target_reported(slot, report, now)
            return False
        if slot is None or slot.generation != report.generation or slot.worker != worker.name:
            return False  # fenced: the worker's next assignments do not have the slot
        self._note_rate(slot, report, now)
        doing = report.doing[:_MAX_ACTIVITY]
        if doing != slot.doing:
            slot.doing, slot.stack = doing, report.stack[:_MAX_STACK]
            cluster.bump_box(*cluster.box_of(slot))
        for first in report.firsts[-_KEPT_FIRSTS:]:
            slot.firsts[first.epoch, first.began] = first.digest
        for known in sorted(slot.firsts)[:-_KEPT_FIRSTS]:
            del slot.firsts[known]
        if report.phase == pb.FAILED and slot.phase != pb.FAILED:
            self._note_end(worker, slot, report, now)
            return True
        if report.phase == pb.READY and slot.phase in (pb.STARTING, pb.READY):
            self._note_ready(slot, report, now)
        return False

    def _note_rate(self, slot: Slot, report: pb.SlotReport, now: float) -> None:
        """Record the runner's speed and lead over the loop; while it starts, its stage and place in the queue."""
        slot.batches_per_s, slot.batch_s = report.batches_per_s, report.batch_s
        slot.worked_s = max(slot.worked_s, report.worked_s)  # a runner may die in its replay
        slot.batch_cpu_s, slot.batch_delay_s = report.batch_cpu_s, report.batch_delay_s
        _, box = self._cluster.box_of(slot)
        start_queue_position = report.start_queue_position, report.start_queue_length
        if (start_queue_position, report.start_stage) != (slot.start_queue_position, slot.start_stage):
            slot.start_queue_position, slot.start_stage = start_queue_position, report.start_stage
            # The position is sent with the next reply, at most one heartbeat later. It does not wake the boxes' calls:
            # each start changes the positions of all queued slots, so n slots would cause n * n calls.
            box.version = self._cluster.next_version()
        slot.gauge.report(now, report.produced, max(report.delivered, box.total(slot.key.slot)))
        if slot.gauge.lost_at and not slot.gauge.behind:
            lost_at, slot.gauge.lost_at = slot.gauge.lost_at, 0.0
            took = f"{now - lost_at:.1f} s after"
            text = f"{slot} continues on worker {slot.worker}, {took} it lost its runner"
            self._cluster.add_slot_event("slot recovered", text, slot, slot.worker)
            slot.note = f"recovered {took} this: {slot.note}"
            self._cluster.save_slot(slot)

    def _note_ready(self, slot: Slot, report: pb.SlotReport, now: float) -> None:
        capabilities = owned(report.capabilities) if report.HasField("capabilities") else slot.capabilities
        if slot.phase != pb.READY or capabilities != slot.capabilities:
            slot.moved_at = now if slot.phase != pb.READY else slot.moved_at
            slot.phase, slot.ever_ready, slot.capabilities = pb.READY, True, capabilities
            self._cluster.save_slot(slot)
            self._cluster.bump_box(*self._cluster.box_of(slot))
        if report.migrated:
            self._migrations.migrated(slot, report.delivered, now)

    def _note_end(self, worker: Worker, slot: Slot, report: pb.SlotReport, now: float) -> None:
        attempt, box = self._cluster.box_of(slot)
        if report.recycle:
            self._recycle(slot, report)
        elif report.lost:
            what = report.error.message or "the worker reported no reason"
            stack = report.error.remote_traceback[:_MAX_STACK]
            has_position = report.HasField("making") and quarantine.is_valid_position(report.making)
            making = owned(report.making) if has_position else None
            self._placement.move(slot, f"runner of {slot} on worker {worker.name} died: {what}", now, making, stack)
        elif launch_restarts.is_refuted(box, slot, report.error):
            self._placement.take_back_restart(attempt, report.error.message)
        else:
            self._placement.fail(slot, report.error if report.HasField("error") else _NO_REASON)

    def _recycle(self, slot: Slot, report: pb.SlotReport) -> None:
        """Replace a runner that used too much memory, right after a snapshot. If it and the one before did so before
        their second batch, fail the slot."""
        if report.outgrown and 0 < slot.outgrown == slot.generation - 1:
            error = MemoryLimitError(
                f"{report.error.message}; this runner and the one before reached the limit before their second batch: "
                "raise the limit (--runner-memory), or make smaller batches"
            )
            self._placement.fail(slot, detail_of(error))
            return
        slot.outgrown, slot.spares_memory = slot.generation if report.outgrown else 0, True
        self._placement.move(slot, report.error.message, None)
