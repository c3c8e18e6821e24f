"""Slots that go to another worker in good order: nobody died, and the loop shall hardly notice.

    appointed   another worker is told to get ready: its runner builds the loader and waits (the successor)
    ready       the slot's worker is told to make durable what the successor needs so as to replay least
    taken over  the slot is the successor's, under the generation that it was given when it was appointed

Until the last of these the slot stays where it is and its batches flow. If its worker is lost meanwhile the successor
takes over at once; if the successor is lost, or does not get ready, the slot stays. A worker that did not get ready is
asked again only after a while, by one that drains, and if nobody else has a place; for the sake of balance it is not.

Three reasons: its worker drains; it is a straggler; or workers have joined that have more room (see balance.py). What
comes out of a slot does not depend on where it runs, so none of them changes the stream.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.appliance.core import balance
from penstock.appliance.core.cluster_state import ClusterState
from penstock.appliance.model.entities import Slot, Worker
from penstock.proto.errors import UnknownWorkerError
from penstock.proto.v1 import coordinator_pb2 as pb


class Migrations:
    """Decides which slots are handed over, and sees them through."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._balanced_at = 0.0
        self._look: Iterator[balance.SlotMove | None] | None = None
        """At the balance, a slice with each tick; None between two looks."""

    # ---- what workers say

    def heard(self, slot: Slot, report: pb.SlotReport, now: float) -> None:
        """A successor reports about the slot that it is getting ready for."""
        target = slot.target
        assert target is not None
        if report.phase == pb.FAILED:
            self._give_up(slot, f"worker {target.worker} could not take it over: {report.error.message}", now)
        elif report.phase == pb.READY and not target.ready_at:
            target.ready_at = now
            if report.HasField("capabilities"):
                target.capabilities = report.capabilities
            worker = self._cluster.workers.get(slot.worker)
            if worker is not None:
                self._cluster.bump_worker(worker)  # to be told that it shall hand over

    def migrated(self, slot: Slot, now: float) -> None:
        """The slot's worker says that all is durable that the successor needs."""
        if slot.target is not None and slot.target.ready_at:
            self._cluster.take_over(slot, slot.target.why, now)

    # ---- time

    def tick(self, now: float) -> None:
        """Sees to those under way, to workers that drain, and to the balance."""
        cluster, limits = self._cluster, self._cluster.limits
        for slot in list(cluster.appointed.values()):
            target = slot.target
            assert target is not None
            if not cluster.is_open(slot):
                continue  # it is about to be released
            if target.ready_at and now - target.ready_at > limits.migration_s:
                cluster.take_over(slot, target.why, now)
            elif not target.ready_at and now - target.since > limits.target_ready_s:
                waited = f"worker {target.worker} was not ready to take it over within {limits.target_ready_s:g} s"
                self._give_up(slot, waited, now)
        for worker in cluster.workers.values():
            if worker.draining:
                self.drain(worker, now)
        due = now - self._balanced_at >= min(limits.balance_every_s, limits.balance_after_s)
        if limits.balance_after_s and due and self._look is None:
            self._balanced_at = now
            room = max(1, cluster.placed // balance.ONE_IN) - len(cluster.appointed)
            self._look = balance.look(cluster, now, room)
        for move in self._look or ():
            if move is None:
                return
            if move.nudge:
                move.slot.was_slow_at |= {move.slot.worker}
            cluster.appoint(move.slot, move.worker, move.why, now)
        self._look = None

    def drain(self, worker: Worker, now: float) -> None:
        """Appoints successors for what the worker has, as far as others have places."""
        why = f"worker {worker.name} drains"
        for slot in self.owned(worker):
            if slot.target is not None or slot.phase == pb.FAILED:
                continue
            other = self._elsewhere(slot, worker, now)
            if other is None:
                continue
            if slot.phase == pb.READY:
                self._cluster.appoint(slot, other, why, now)
            else:  # it has given nothing out, so there is nothing to keep going
                self._cluster.move(slot, why, None)

    def _elsewhere(self, slot: Slot, worker: Worker, now: float) -> Worker | None:
        """A place for a slot of a worker that drains: with one that could not take it over only if no other has one."""
        cluster = self._cluster
        _, box = cluster.box_of(slot)
        host_id, input_fn = box.opening.host_id, box.opening.loader.input_fn
        far = box.unreachable_since(now - cluster.limits.unreachable_s)
        other = cluster.room.choose(slot, host_id, input_fn, {worker.name} | slot.unfit_at(cluster.workers) | far)
        if other is None and now >= slot.left_alone_until:
            other = cluster.room.choose(slot, host_id, input_fn, {worker.name})
        return other

    def owned(self, worker: Worker) -> list[Slot]:
        """The slots of the worker, without those that it is getting ready for."""
        slots = [self._cluster.slot(key) for key in sorted(worker.slots)]
        return [slot for slot in slots if slot is not None and slot.worker == worker.name]

    def stuck(self, worker: Worker, now: float) -> int:
        """Slots that stay with a worker that drains: they have failed, or there is no place elsewhere."""
        staying = [slot for slot in self.owned(worker) if slot.target is None]
        return sum(slot.phase == pb.FAILED or self._elsewhere(slot, worker, now) is None for slot in staying)

    def order(self, request: pb.DrainWorkerRequest, now: float) -> pb.DrainWorkerReply:
        """An operator wants a worker drained, or not any more, or only looks. Raises UnknownWorkerError.

        Whether one that only the journal knows drains, it tells when it comes back: until then nobody is told that it
        does not, and it cannot be told so either.
        """
        worker = self._cluster.workers.get(request.worker)
        if worker is None:
            there = ", ".join(sorted(self._cluster.workers)[:8]) or "none"
            raise UnknownWorkerError(f"there is no worker {request.worker!r}; there are: {there}")
        if request.undo and not worker.registered:
            raise UnknownWorkerError(
                f"worker {request.worker!r} was not heard of since the coordinator was started: ask once it is back"
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
        """It takes no new slots and hands its own over; or it takes slots again."""
        if draining == worker.draining:
            return
        worker.draining = draining
        kind, text = ("worker drains", "hands its slots over") if draining else ("worker back", "takes slots again")
        self._cluster.events.add(kind, f"worker {worker.name} {text}", worker=worker.name)
        if draining:
            for slot in [self._cluster.slot(key) for key in sorted(worker.slots)]:
                if slot is not None and slot.worker != worker.name:
                    self._cluster.dismiss(slot)  # it would come here to leave again
            self.drain(worker, now)
        else:
            for slot in self.owned(worker):
                self._cluster.dismiss(slot)
        self._cluster.bump_worker(worker)

    def _give_up(self, slot: Slot, note: str, now: float) -> None:
        """It stays where it is, for now."""
        if slot.target is not None:
            slot.unfit[slot.target.worker] = slot.target.session
        self._cluster.dismiss(slot)
        slot.left_alone_until = now + self._cluster.limits.left_alone_s
        slot.note = note
        self._cluster.bump_box(*self._cluster.box_of(slot))
