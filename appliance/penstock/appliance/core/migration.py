"""Planned migration of slots to another worker, without a loss and with hardly any delay for the loop.

    started     the target worker prepares: its runner builds the loader and waits
    ready       the present worker makes a snapshot durable, so that the target has little to replay
    durable     the target replays, to where the training loop was, or, if the loop waits for each batch, just behind it
    replayed    the loop takes the batches up to there, which it mostly has
    completed   it has, or MIGRATION_S seconds have passed since `ready`: the slot belongs to the target, under
                the generation that was reserved for the target

Until the last step the slot stays on its present worker and its batches are delivered. If the present worker is lost
meanwhile, the target takes over at once. If the target is lost, or does not get ready in time, the slot stays on its
present worker. A target that did not get ready is then chosen only as the last resort when a worker drains, and not for
balance, until the target's process is started again.

A loader without state methods and without `replay=True` may be a queue, of which a second instance would take data. Its
slots are not prepared elsewhere: a drain takes them from their worker at once, and nothing else moves them.

A slot migrates for one of three reasons: its worker drains; it is a straggler; or workers with more free capacity have
joined (see balance.py). A slot's output does not depend on where it runs, so a migration never changes the stream.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.appliance.core import balance, launch_restarts
from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Slot, Worker
from penstock.appliance.core.placement import UNREACHABLE_S, Placement
from penstock.proto.errors import UnknownWorkerError
from penstock.proto.rpc.bounds.message_bounds import owned
from penstock.proto.v1 import coordinator_pb2 as pb

TARGET_READY_S = 300.0
"""Longest time for a migration target to become ready, in seconds. A target may have to import torch and read the index
of a dataset. Meanwhile the slot runs on its present worker."""
MIGRATION_S = 15.0
"""Longest time in seconds for a ready migration target to replay to where the training loop is, and for the present
worker to make the snapshot durable that this needs. After this time the slot migrates, and the loop waits for the
rest."""
LEFT_ALONE_S = 30.0
"""Seconds after a failed migration in which balance does not move the slot again. A slot whose worker drains may go to
another worker meanwhile, but not to one that failed to get ready for it or that its box cannot reach."""
BALANCE_EVERY_S = 5.0
"""Seconds between two checks whether slots should move to other workers."""
WAITING_SHARE = 0.2
"""Share of the time for which a slot's runner works, above which the training loop counts as waiting for the slot.
Below it, the loop moves on by at most a fifth of what a migration's target replays meanwhile."""


class Migrations:
    """Planned migrations: decides which slots migrate, and follows each migration to its end."""

    def __init__(self, cluster: ClusterState, placement: Placement) -> None:
        self._cluster, self._placement = cluster, placement
        self._balanced_at = 0.0
        self._moves: Iterator[balance.SlotMove | None] | None = None
        """Iterator of the balance check that is under way, which yields the slots to move. Each tick continues it for
        one slice. None: no check is under way."""

    # ---- reports of workers

    def target_reported(self, slot: Slot, report: pb.SlotReport, now: float) -> None:
        """Record what a slot's migration target reports about the runner that it prepares for the slot."""
        target = slot.target
        assert target is not None
        if report.phase == pb.FAILED:
            self._give_up(slot, f"worker {target.worker} could not take over the slot: {report.error.message}", now)
        elif report.phase == pb.READY and not target.ready_at:
            target.ready_at = now
            if report.HasField("capabilities"):
                target.capabilities = owned(report.capabilities)
            self._tell(slot.worker)
        elif report.migrated and target.delivered is not None and target.replayed is None:
            target.replayed = report.produced
            if target.replayed <= target.delivered:
                self._placement.complete_migration(slot, target.why, now)
            else:
                self._tell(slot.worker)

    def migrated(self, slot: Slot, delivered: int, now: float) -> None:
        """Continue the slot's migration after a report of its present worker: the snapshot for the target is durable.
        `delivered`: number of the slot's batches that the training loop has taken."""
        target = slot.target
        if target is None or not target.ready_at:
            return
        if target.delivered is None:
            target.delivered = delivered
            target.loop_waits = slot.batch_s * slot.batches_per_s > WAITING_SHARE
            self._tell(target.worker)
        elif target.replayed is not None and delivered >= target.replayed:
            self._placement.complete_migration(slot, target.why, now)

    def _tell(self, name: str) -> None:
        """Let a worker's next assignments say what its slots' migrations need."""
        worker = self._cluster.workers.get(name)
        if worker is not None:
            self._cluster.bump_worker(worker)

    # ---- periodic checks

    def tick(self, now: float) -> None:
        """Check the migrations under way, the draining workers, and the balance of the fleet."""
        cluster, balance_after_s = self._cluster, self._cluster.limits.balance_after_s
        for slot in list(self._placement.migrating.values()):
            target = slot.target
            assert target is not None
            if not cluster.is_open(slot):
                continue  # `release_ended` is about to release the slot
            if target.ready_at and now - target.ready_at > MIGRATION_S:
                self._placement.complete_migration(slot, target.why, now)
            elif not target.ready_at and now - target.since > TARGET_READY_S:
                waited = f"worker {target.worker} was not ready to take over the slot within {TARGET_READY_S:g} s"
                self._give_up(slot, waited, now)
        for worker in cluster.workers.values():
            if worker.draining:
                self.drain(worker, now)
        due = now - self._balanced_at >= min(BALANCE_EVERY_S, balance_after_s)
        if balance_after_s and due and self._moves is None:
            self._balanced_at = now
            budget = max(1, cluster.placed // balance.SLOTS_PER_MIGRATION) - len(self._placement.migrating)
            self._moves = balance.find_moves(cluster, self._placement, now, budget)
        for move in self._moves or ():
            if move is None:
                return
            if move.for_straggler:
                move.slot.was_slow_at |= {move.slot.worker}
            self._placement.start_migration(move.slot, move.worker, move.why, now)
        self._moves = None

    def drain(self, worker: Worker, now: float) -> None:
        """Start migrations of the worker's slots to other workers that have free capacity. A slot whose runner is not
        ready moves at once, and so does one whose loader may have one instance only."""
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
        """Return True if a second instance of the slot's loader may be made while the first one serves."""
        _, box = self._cluster.box_of(slot)
        saves = slot.capabilities is None or slot.capabilities.state_methods > 0
        return saves or box.opening.loader.options.replay_without_state

    def _elsewhere(self, slot: Slot, worker: Worker, now: float) -> Worker | None:
        """Return a worker that can take a slot of a draining worker; None if no worker can. A worker that failed to get
        ready as the slot's target, or that the slot's box cannot reach, is the last choice."""
        _, box = self._cluster.box_of(slot)
        far = box.unreachable_since(now - UNREACHABLE_S)
        barred = [{worker.name} | slot.unfit_at(self._cluster.workers) | far]
        if now >= slot.left_alone_until:
            barred.append({worker.name})
        return self._placement.find_worker(slot, *barred)

    def owned(self, worker: Worker) -> list[Slot]:
        """Return the slots that run on the worker, without the slots for which the worker is only the migration
        target."""
        slots = [self._cluster.slot(key) for key in sorted(worker.slots)]
        return [slot for slot in slots if slot is not None and slot.worker == worker.name]

    def stuck(self, worker: Worker, now: float) -> int:
        """Return the number of slots that cannot leave a draining worker: failed slots, and slots for which no other
        worker has free capacity."""
        staying = [slot for slot in self.owned(worker) if slot.target is None]
        return sum(slot.phase == pb.FAILED or self._elsewhere(slot, worker, now) is None for slot in staying)

    def order(self, request: pb.DrainWorkerRequest, now: float) -> pb.DrainWorkerReply:
        """Carry out an operator's request: drain a worker, end its drain, or only report its state. Raises
        UnknownWorkerError.

        After a restart the coordinator does not know whether a worker drains until the worker reports. Until then the
        reply always says that the worker drains, and a request to end its drain is refused.
        """
        worker = self._cluster.workers.get(request.worker)
        if worker is None:
            names = sorted(self._cluster.workers)
            if not names:
                raise UnknownWorkerError(
                    f"worker must be a registered one, got {request.worker!r}, but no worker is registered: start "
                    "workers, and see `penstock status`"
                )
            more = f" or one of {len(names) - 8} more" if len(names) > 8 else ""
            raise UnknownWorkerError(
                f"worker must be one of {', '.join(names[:8])}{more}, got {request.worker!r}: see `penstock status`"
            )
        if request.undo and not worker.registered:
            raise UnknownWorkerError(
                f"worker {request.worker!r} has not reported since the coordinator started: retry once `penstock "
                "status` shows the worker as live"
            )
        if not request.look:
            self.set_draining(worker, not request.undo, now)
        failed = sum(slot.phase == pb.FAILED for slot in self.owned(worker))
        return pb.DrainWorkerReply(
            slots=len(self.owned(worker)),
            stuck=self.stuck(worker, now) - failed if worker.draining else 0,
            failed=failed,
            draining=worker.draining or not worker.registered,
            session=worker.session,
        )

    def set_draining(self, worker: Worker, draining: bool, now: float) -> None:
        """Start or end the drain of a worker. While a worker drains, it gets no new slots, and its slots migrate to
        other workers."""
        if draining == worker.draining:
            return
        worker.draining = draining
        kind, text = ("worker drains", "migrates its slots") if draining else ("worker back", "takes slots again")
        self._cluster.events.add(kind, f"worker {worker.name} {text}", worker=worker.name)
        if draining:
            for slot in [self._cluster.slot(key) for key in sorted(worker.slots)]:
                if slot is not None and slot.worker != worker.name:
                    self._placement.cancel_migration(slot)  # the slot would have to leave this worker again
            self.drain(worker, now)
        else:
            for slot in self.owned(worker):
                self._placement.cancel_migration(slot)
        self._cluster.bump_worker(worker)

    def _give_up(self, slot: Slot, note: str, now: float) -> None:
        """Cancel the slot's migration, because its target did not get ready. For LEFT_ALONE_S seconds balance
        does not move the slot, and a drain moves it only to a worker that is not known to be unfit or unreachable.
        `note`: what happened, for people."""
        if slot.target is not None:
            slot.unfit[slot.target.worker] = slot.target.session
        self._placement.cancel_migration(slot)
        slot.left_alone_until = now + LEFT_ALONE_S
        slot.note = note
        self._cluster.bump_box(*self._cluster.box_of(slot))
