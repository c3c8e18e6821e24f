"""Handling of a worker's report about one of its slots: what the slot's runner is doing, that it is ready, that it has
ended."""

from __future__ import annotations

from penstock.appliance.core import launch_restarts
from penstock.appliance.core.cluster_state import ClusterState
from penstock.appliance.core.migration import Migrations
from penstock.appliance.model.entities import Slot, SlotKey, Worker
from penstock.appliance.policies import quarantine
from penstock.proto.errors import MemoryLimitError
from penstock.proto.rpc.bounds.message_bounds import owned
from penstock.proto.rpc.channel import detail_of
from penstock.proto.state.position import EPOCHS_AHEAD
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

_MAX_ACTIVITY, _MAX_STACK = 300, 12_000
"""Longest texts taken from a report of a hang or a crash, in characters: what the runner is doing, and its stack. Both
are bounded because every view of the box contains them."""
END_COST = 2
"""Time for handling the report that a runner has ended (75 us), in multiples of the time for placing one slot. One
heartbeat call handles at most `limits.slots_at_once` / END_COST of these reports."""
_KEPT_FIRSTS = EPOCHS_AHEAD + 1
"""Number of epochs whose first batches are kept for a slot's next runner, the newest ones."""
_NO_REASON = records_pb2.ErrorDetail(
    name="PenstockError", message="the slot's runner failed, and the worker reported no reason: see the worker's log"
)


def note(cluster: ClusterState, migrations: Migrations, worker: Worker, report: pb.SlotReport, now: float) -> bool:
    """Record a worker's report about a slot that it runs, or that it prepares to take over. Return True if this is the
    first report that the runner of a slot has ended. A report of another worker, or about another generation, changes
    nothing."""
    slot = cluster.slot(SlotKey(report.run, report.attempt, report.box, report.slot))
    if slot is not None and slot.is_migrating_to(worker.name, report.generation):
        migrations.target_reported(slot, report, now)
        return False
    if slot is None or slot.generation != report.generation or slot.worker != worker.name:
        return False  # fenced: the worker's next assignments do not have the slot
    cluster.note_rate(slot, report, now)
    doing = report.doing[:_MAX_ACTIVITY]
    if doing != slot.doing:
        slot.doing, slot.stack = doing, report.stack[:_MAX_STACK]
        cluster.bump_box(*cluster.box_of(slot))
    _keep_firsts(slot, report)
    if report.phase == pb.FAILED and slot.phase != pb.FAILED:
        if report.recycle:
            _recycle(cluster, slot, report)
        elif report.lost:
            what = report.error.message or "the worker reported no reason"
            stack = report.error.remote_traceback[:_MAX_STACK]
            has_position = report.HasField("making") and quarantine.is_valid_position(report.making)
            making = owned(report.making) if has_position else None
            cluster.move(slot, f"runner of {slot} on worker {worker.name} died: {what}", now, making, stack)
        elif launch_restarts.is_refuted(cluster.box_of(slot)[1], slot, report.error):
            cluster.take_back_restart(cluster.box_of(slot)[0], report.error.message)
        else:
            cluster.fail(slot, report.error if report.HasField("error") else _NO_REASON)
        return True
    if report.phase == pb.READY and slot.phase in (pb.STARTING, pb.READY):
        capabilities = owned(report.capabilities) if report.HasField("capabilities") else slot.capabilities
        if slot.phase != pb.READY or capabilities != slot.capabilities:
            slot.moved_at = now if slot.phase != pb.READY else slot.moved_at
            slot.phase, slot.ever_ready, slot.capabilities = pb.READY, True, capabilities
            cluster.save_slot(slot)
            cluster.bump_box(*cluster.box_of(slot))
        if report.migrated:
            migrations.migrated(slot, report.delivered, now)
    return False


def _keep_firsts(slot: Slot, report: pb.SlotReport) -> None:
    """Keep the first batches of epochs that a runner reports at its end. An epoch's first batch replaces what was kept
    of the epoch."""
    for first in report.firsts[-_KEPT_FIRSTS:]:
        slot.firsts[first.epoch, first.began] = first.digest
    for known in sorted(slot.firsts)[:-_KEPT_FIRSTS]:
        del slot.firsts[known]


def _recycle(cluster: ClusterState, slot: Slot, report: pb.SlotReport) -> None:
    """Replace a runner that ended because it used too much memory, right after a snapshot. If this runner and the one
    before both reached the limit before their second batch, fail the slot instead."""
    if report.outgrown and 0 < slot.outgrown == slot.generation - 1:
        error = MemoryLimitError(
            f"{report.error.message}; this runner and the one before reached the limit before their second batch: "
            "raise the limit (--runner-memory), or make smaller batches"
        )
        cluster.fail(slot, detail_of(error))
        return
    slot.outgrown, slot.spares_memory = slot.generation if report.outgrown else 0, True
    cluster.move(slot, report.error.message, None)
