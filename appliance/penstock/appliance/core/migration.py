"""Planned migration of slots to another worker, without a loss and with hardly any delay for the loop.

    started     the target's runner builds the loader and waits
    ready       the present worker makes a snapshot durable, so that the target has little to replay
    durable     the target replays to where the loop was, or just behind it if the loop waits for each batch
    replayed    the loop takes the batches up to there, which it mostly has
    completed   it has, or MIGRATION_S have passed since `ready`: the target has the slot, under the reserved generation

Until the last step the slot stays on its present worker. If that is lost, the target takes over at once. If the target
is lost or late, the slot stays; such a target is then the last resort of a drain, and not used for balance, until its
process is started again. A loader without state methods and without `replay=True` may be a queue, of which a second
instance would take data: a drain moves its slots at once, and nothing else does.

A slot migrates because its worker drains, it is a straggler, or emptier workers have joined (balance.py).
"""

from __future__ import annotations

from penstock.appliance.core import balance, launch_restarts
from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Slot, Worker
from penstock.appliance.core.free_capacity import why_not_spoken
from penstock.appliance.core.placement import UNREACHABLE_S, Placement
from penstock.proto.errors import UnknownWorkerError
from penstock.proto.rpc.bounds.message_bounds import owned
from penstock.proto.v1 import coordinator_pb2 as pb

TARGET_READY_S = 300.0
"""Longest time for a target to become ready, in seconds: it may have to import torch and read an index."""
MIGRATION_S = 15.0
"""Longest time in seconds from ready to the loop's position, with the snapshot for it. Then the slot migrates, and the
loop waits for the rest."""
LEFT_ALONE_S = 30.0
"""Seconds after a failed migration in which balance leaves the slot; a drain may move it, to a fit worker in reach."""
BALANCE_EVERY_S = 5.0
WAITING_SHARE = 0.2
"""Share of its time that a runner works above which the loop waits for it: below, the loop moves on by at most a fifth
of what a target replays."""


class Migrations:
    """Planned migrations: decides which slots migrate, and follows each to its end."""

    def __init__(self, cluster: ClusterState, placement: Placement) -> None:
        self._cluster, self._placement = cluster, placement
        self._balanced_at = 0.0

    # ---- reports of workers

    def target_reported(self, slot: Slot, report: pb.SlotReport, now: float) -> None:
        """Record what the slot's migration target reports about its runner."""
        target = slot.target
        assert target is not None
        if report.phase == pb.FAILED:
            self._give_up(slot, f"worker {target.worker} could not take over the slot: {report.error.message}", now)
        elif report.phase == pb.READY and not target.ready_at:
            target.ready_at = now
            if report.HasField("capabilities"):
                target.capabilities = owned(report.capabilities)
            self._cluster.bump_worker(slot.worker)
        elif report.migrated and target.delivered is not None and target.replayed is None:
            target.replayed = report.produced
            if target.replayed <= target.delivered:
                self._placement.complete_migration(slot, target.why, now)
            else:
                self._cluster.bump_worker(slot.worker)

    def migrated(self, slot: Slot, delivered: int, now: float) -> None:
        """Continue the migration: the snapshot for the target is durable. `delivered`: what the loop has taken."""
        target = slot.target
        if target is None or not target.ready_at:
            return
        if target.delivered is None:
            target.delivered = delivered
            target.loop_waits = slot.batch_s * slot.batches_per_s > WAITING_SHARE
            self._cluster.bump_worker(target.worker)
        elif target.replayed is not None and delivered >= target.replayed:
            self._placement.complete_migration(slot, target.why, now)

    # ---- periodic checks

    def tick(self, now: float) -> None:
        cluster, balance_after_s = self._cluster, self._cluster.limits.balance_after_s
        for slot in list(self._placement.migrating.values()):
            target = slot.target
            assert target is not None
            if target.ready_at and now - target.ready_at > MIGRATION_S:
                self._placement.complete_migration(slot, target.why, now)
            elif not target.ready_at and now - target.since > TARGET_READY_S:
                waited = f"worker {target.worker} was not ready to take over the slot within {TARGET_READY_S:g} s"
                self._give_up(slot, waited, now)
        for worker in cluster.workers.values():
            if worker.draining:
                self.drain(worker, now)
        if balance_after_s and now - self._balanced_at >= min(BALANCE_EVERY_S, balance_after_s):
            self._balanced_at = now
            budget = max(1, cluster.placed // balance.SLOTS_PER_MIGRATION) - len(self._placement.migrating)
            for move in balance.find_moves(cluster, self._placement, now, budget):
                if move.for_straggler:
                    move.slot.was_slow_at |= {move.slot.worker}
                self._placement.start_migration(move.slot, move.worker, move.why, now)

    def drain(self, worker: Worker, now: float) -> None:
        """Start migrations of the worker's slots. One whose runner is not ready, or whose loader may have one instance
        only, moves at once."""
        why = f"worker {worker.name} drains"
        for slot in self.owned(worker):
            if slot.worker != worker.name or slot.target is not None or slot.phase == pb.FAILED:
                continue
            other = self._elsewhere(slot, worker, now)
            if other is None:
                continue
            attempt, box = self._cluster.box_of(slot)
            restarts = launch_restarts.is_due(attempt, box, slot) and launch_restarts.fits_elsewhere(
                self._cluster.workers, attempt
            )
            if slot.phase == pb.READY and self._may_be_prepared(slot) and not restarts:
                self._placement.start_migration(slot, other, why, now)
            else:  # if its runner is not ready, nothing is gained by keeping it; or all slots of the run restart
                self._placement.move(slot, why, None)
                slot.migrated = True  # a planned move, of which the training job need not be warned

    def _may_be_prepared(self, slot: Slot) -> bool:
        """Return whether a second instance of the loader may be made while the first one serves."""
        _, box = self._cluster.box_of(slot)
        saves = slot.capabilities is None or slot.capabilities.state_methods > 0
        return saves or box.opening.loader.options.replay_without_state

    def _elsewhere(self, slot: Slot, worker: Worker, now: float) -> Worker | None:
        """Return a worker for a slot of a draining one; the last choice is one that failed it or is out of reach."""
        _, box = self._cluster.box_of(slot)
        far = box.unreachable_since(now - UNREACHABLE_S)
        barred = [{worker.name} | slot.unfit_at(self._cluster.workers) | far]
        if now >= slot.left_alone_until:
            barred.append({worker.name})
        return self._placement.find_worker(slot, *barred)

    def owned(self, worker: Worker) -> list[Slot]:
        """Return the slots that run on the worker, without those of which it is only the migration target."""
        return [slot for slot in self._cluster.slots_of(worker) if slot.worker == worker.name]

    def stuck(self, worker: Worker, now: float) -> list[Slot]:
        """Return the slots that cannot leave a draining worker: failed, or without free capacity elsewhere."""
        staying = [slot for slot in self.owned(worker) if slot.target is None]
        return [slot for slot in staying if slot.phase == pb.FAILED or self._elsewhere(slot, worker, now) is None]

    def order(self, request: pb.DrainWorkerRequest, now: float) -> pb.DrainWorkerReply:
        """Drain a worker, end its drain, or only report, for an operator. Raises UnknownWorkerError. After a restart,
        until the worker reports, the reply says that it drains, and a request to end that is refused."""
        worker = self._cluster.workers.get(request.worker)
        if worker is None:
            raise UnknownWorkerError(f"no worker {request.worker!r} is registered: see `penstock status`")
        if request.undo and not worker.registered:
            raise UnknownWorkerError(
                f"worker {request.worker!r} has not reported since the coordinator started: retry once it is live"
            )
        if not request.look:
            self.set_draining(worker, not request.undo, now)
        failed = sum(slot.phase == pb.FAILED for slot in self.owned(worker))
        stuck = self.stuck(worker, now) if worker.draining else []
        openings = (self._cluster.box_of(slot)[1].opening for slot in stuck if slot.phase != pb.FAILED)
        because = (why_not_spoken(opening, self._cluster.lane_protocols) for opening in openings)
        return pb.DrainWorkerReply(
            slots=len(self.owned(worker)),
            stuck=sum(slot.phase != pb.FAILED for slot in stuck),
            stuck_because=next(filter(None, because), ""),
            failed=failed,
            draining=worker.draining or not worker.registered,
            session=worker.session,
        )

    def set_draining(self, worker: Worker, draining: bool, now: float) -> None:
        if draining == worker.draining:
            return
        worker.draining = draining
        kind, text = ("worker drains", "migrates its slots") if draining else ("worker back", "takes slots again")
        self._cluster.events.add(kind, f"worker {worker.name} {text}", worker=worker.name)
        if draining:
            for slot in self._cluster.slots_of(worker):
                if slot.worker != worker.name:
                    self._placement.cancel_migration(slot)  # the slot would have to leave this worker again
            self.drain(worker, now)
        else:
            for slot in self.owned(worker):
                self._placement.cancel_migration(slot)
        self._cluster.bump_worker(worker.name)

    def _give_up(self, slot: Slot, note: str, now: float) -> None:
        """Cancel the migration: its target did not get ready. Balance leaves the slot for LEFT_ALONE_S seconds."""
        if slot.target is not None:
            slot.unfit[slot.target.worker] = slot.target.session
        self._placement.cancel_migration(slot)
        slot.left_alone_until = now + LEFT_ALONE_S
        slot.note = note
        self._cluster.bump_box(*self._cluster.box_of(slot))
