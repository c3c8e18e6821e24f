"""Views of the cluster state: messages that replies contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from penstock.appliance.core import demand, slot_budgets
from penstock.appliance.core.bottleneck import find
from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Attempt, Box, BoxPresence, Slot, Worker
from penstock.appliance.core.free_capacity import why_not_spoken
from penstock.appliance.core.leases import LeasePolicy
from penstock.appliance.core.state_query import SlotStateRequest
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.rpc.version import PROTOCOL, VERSION
from penstock.proto.state.epoch_labels import label_of, to_messages
from penstock.proto.state.loader_names import name_of
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

STEP = 64
"""Workers after which filling a status reply pauses, so that other calls are served."""
STATE_REQUESTS = 1024
"""Most requests for states in one heartbeat reply; the others follow."""


def slot_view(cluster: ClusterState, slot: Slot) -> pb.SlotView:
    view = pb.SlotView(
        slot=slot.key.slot,
        generation=slot.generation,
        phase=slot.phase,
        worker=slot.worker,
        capabilities=slot.capabilities,
        error=slot.error,
        restarts=slot.restarts,
        note=slot.note,
        doing=slot.doing,
        stack=slot.stack,
        skipped=sum(slot.skipped.values()),
        target_worker=slot.target.worker if slot.target is not None else "",
        migrated=slot.migrated,
        start_queue_position=slot.start_queue_position[0],
        start_queue_length=slot.start_queue_position[1],
        start_stage=slot.start_stage,  # type: ignore[arg-type]  # an open enum
    )
    worker = cluster.workers.get(slot.worker)
    if worker is not None and slot.phase in (pb.READY, pb.FAILED):
        # A failed slot keeps its lane while its worker lives, because the batches before the error come first.
        view.host_id, view.local_address, view.tcp_address = worker.host_id, worker.local_address, worker.tcp_address
        view.ticket = cluster.ticket(slot.key, slot.generation)
    return view


def watch_reply(
    cluster: ClusterState, attempt: Attempt, box: Box, seen_version: int, lease_policy: LeasePolicy, wall_s: float
) -> pb.WatchRunReply:
    others = [number for number in sorted(attempt.ended) if number != box.number]
    ended = [pb.BoxEnd(box=number, step=attempt.boxes[number].step) for number in others]
    epoch, begun = box.delivered.epoch, any(slot.delivered for slot in box.delivered.slots)
    left, (label, first) = attempt.left.get(epoch), attempt.named.get(epoch, (-1, -1))
    if left is not None and left[1] != box.number:
        ended.append(pb.BoxEnd(box=left[1], step=left[0], goes_on=True))
    elif begun and label not in (-1, label_of(box.labels_to(), epoch)):
        ended.append(pb.BoxEnd(box=first, goes_on=True, label=label))
    missing = sum(slot.phase == pb.WAITING for slot in box.slots)
    return pb.WatchRunReply(
        version=box.version,
        slots=[slot_view(cluster, slot) for slot in box.slots] if box.version != seen_version else (),
        missing_slots=missing,
        unplaced_because=_why_unplaced(cluster, attempt, box) if missing else "",
        wall_s=wall_s,
        ended=ended,
        heartbeat_s=lease_policy.idle_s,
        lease_s=lease_policy.lease_s,
        fence=attempt.fence,
        twin=attempt.twin_of(box),
        wants_epoch_starts=not box.reported,
    )


def _why_unplaced(cluster: ClusterState, attempt: Attempt, box: Box) -> str:
    parts = slot_budgets.why_waits(cluster, attempt, box), why_not_spoken(box.opening, cluster.lane_protocols)
    return ". ".join(filter(None, parts))


def assignment(
    cluster: ClusterState, attempt: Attempt, box: Box, slot: Slot, worker: Worker, start: records_pb2.BoxPosition
) -> records_pb2.WorkerAssignment:
    """Return the assignment to run the slot or prepare it as target. `start`: one message that all slots share."""
    target = slot.target if slot.worker != worker.name else None
    generation = slot.generation if target is None else target.generation
    return records_pb2.WorkerAssignment(
        **slot.key._asdict(),
        generation=generation,
        num_boxes=attempt.num_boxes,
        num_workers_per_box=attempt.num_workers,
        seed=attempt.seed,
        loader=box.opening.loader,
        lane_key=cluster.lane_key(slot.key, generation),
        resume=box.launch_resume,
        start=start,
        recovery=slot.recovery or target is not None,
        spares_memory=slot.spares_memory,
        is_target=target is not None,
        **_preparation(box, slot, is_target=target is not None),
        skips=[records_pb2.Skip(epoch=epoch, total=total, count=count) for (epoch, total), count in slot.skips.items()],
        mixture_changes=attempt.mixture_changes,
    )


def _preparation(box: Box, slot: Slot, *, is_target: bool) -> dict[str, Any]:
    target = slot.target
    if target is None or not target.ready_at or (is_target and target.delivered is None):
        return {}
    if not is_target:
        return {"prepare_migration": True, "migration_total": target.replayed or 0}
    labels = to_messages(box.labels_to())
    known = {"migration_total": target.delivered, "loop_waits": target.loop_waits, "migration_labels": labels}
    return {"prepare_migration": True, **known}


def heartbeat_reply(
    cluster: ClusterState,
    worker: Worker,
    request: pb.HeartbeatRequest,
    lease_policy: LeasePolicy,
    slot_requests: Iterable[tuple[SlotStateRequest, float]],
    stuck: int,
) -> pb.HeartbeatReply:
    """Return the reply. Its 1,024 assignments of at most ASSIGNMENTS_MAX bytes take 35 ms. `slot_requests`: each with
    the seconds until the last caller gives up; `stuck`: slots that cannot leave the worker, if it drains."""
    quota = cluster.snapshot_share()
    reply = pb.HeartbeatReply(
        version=worker.version,
        wall_s=cluster.wall(),
        heartbeat_s=lease_policy.idle_s,
        lease_s=lease_policy.lease_s,
        snapshot_every_s=quota.every_s,
        snapshot_bytes_per_s=quota.bytes_per_s,
        draining=worker.draining,
        stuck=stuck,
        commit_mark=cluster.journal.mark(),
        unchanged=worker.version == request.seen_version,
    )
    if reply.unchanged:
        return reply
    open_requests = iter(slot_requests)
    reply.state_requests.extend(
        slot_request.request(left_s) for slot_request, left_s in islice(open_requests, STATE_REQUESTS)
    )
    worker.more_requests = next(open_requests, None) is not None
    reply.taken.extend(_taken(cluster, worker, request.slots))
    starts: dict[tuple[str, int], records_pb2.BoxPosition] = {}
    for slot in cluster.slots_of(worker):
        attempt, box = cluster.box_of(slot)
        of_box = attempt.run, box.number
        if of_box not in starts:
            starts[of_box] = box.launch_start
        reply.assignments.append(assignment(cluster, attempt, box, slot, worker, starts[of_box]))
    return reply


def _taken(cluster: ClusterState, worker: Worker, reports: Iterable[pb.SlotReport]) -> Iterator[pb.TakenSlot]:
    """Yield the reported slots that the worker lost, or runs under an old generation: it must stop their runners."""
    for report in reports:
        key = SlotKey(report.run, report.attempt, report.box, report.slot)
        slot, generation = cluster.slot(key) if key in worker.slots else None, report.generation
        if slot is not None and (slot.generation == generation or slot.is_migrating_to(worker.name, generation)):
            continue
        yield pb.TakenSlot(**key._asdict(), generation=report.generation, why=_why_taken(cluster, key))


def _why_taken(cluster: ClusterState, key: SlotKey) -> str:
    slot = cluster.slot(key)
    if slot is not None:
        where = f"worker {slot.worker} has it" if slot.worker else "no worker has it"
        return f"{slot.note or 'the slot was moved'}; {where}"
    run = cluster.runs.get(key.run)
    if run is None:
        return f"the coordinator has no run {key.run}"
    past = run.past.get(key.attempt)
    return past.why if past is not None else f"attempt {key.attempt} of run {key.run} is over"


def _slot_status(cluster: ClusterState, box: Box, slot: Slot, why_waits: str, now: float) -> pb.SlotView:
    view, gauge = slot_view(cluster, slot), slot.gauge
    view.ClearField("ticket")  # an operator may see the slot, but not open its lane
    if slot.phase == pb.WAITING:
        view.note = "; ".join(filter(None, (slot.note, why_waits)))
    view.queued, view.batches_per_s = gauge.queued, slot.batches_per_s
    view.wait_share, view.batch_s = box.waits.of(slot.key.slot), slot.batch_s
    if gauge.saved_at:
        view.snapshot_age_s = max(0.0, now - gauge.saved_at)
    return view


def _box_status(cluster: ClusterState, attempt: Attempt, box: Box, now: float) -> pb.BoxStatus:
    waiting_for, why_waits = "", slot_budgets.why_waits(cluster, attempt, box)
    if 0 < box.waiting_for <= len(box.slots):
        slot = box.slots[box.waiting_for - 1]
        waiting_for = f"worker {slot.worker} (slot {slot.key.slot})" if slot.worker else f"slot {slot.key.slot}"
    return pb.BoxStatus(
        box=box.number,
        live=box.presence is BoxPresence.LIVE,
        step=box.step,
        epoch=box.delivered.epoch or box.start.epoch,
        steps_per_s=box.steps_per_s,
        waited_s=box.waited_s,
        waited_share=box.waited_share,
        waiting_for=waiting_for,
        slots=[_slot_status(cluster, box, slot, why_waits, now) for slot in box.slots],
        epoch_ended=box.epoch_ended,
        wait_share=box.waits.share,
        closed=box.presence is BoxPresence.CLOSED,
    )


def fill_status(reply: pb.StatusReply, cluster: ClusterState, now: float, uptime_s: float) -> Iterator[None]:
    """Fill the reply in steps of one box or STEP workers, between which other calls may change the cluster state."""
    reply.version, reply.protocol, reply.uptime_s = VERSION, PROTOCOL, uptime_s
    caused: Counter[str] = Counter()
    """Worker -> share of the boxes' time spent waiting for its slots, summed over boxes."""
    cores = demand.cores(cluster.workers.values())
    for run in list(cluster.runs.values()):
        status = reply.runs.add(
            run=run.name,
            attempt=run.attempt,
            num_boxes=run.num_boxes,
            num_workers_per_box=run.num_workers,
            open=run.current is not None,
            end=run.end,
        )
        if run.current is not None:
            advice = demand.advise(run.current, cores)
            status.recommended_workers_per_box = advice.workers_per_box
            yield from _fill_run(status, cluster, run.current, now, caused, advice.busy_cores)
    reply.recommended_workers = demand.daemons(cluster.open_attempts(), cluster.workers.values())
    for number, worker in enumerate(list(cluster.workers.values())):
        slots = [slot for slot in cluster.slots_of(worker) if slot.worker == worker.name]
        reply.workers.add(
            worker=worker.name,
            host_id=worker.host_id,
            slots=worker.capacity,
            slots_used=len(worker.slots),
            live=worker.registered,
            seen_s_ago=max(0.0, now - worker.reported_at),
            tcp_address=worker.tcp_address,
            batches_per_s=sum(slot.batches_per_s for slot in slots),
            draining=worker.draining,
            version=worker.release,
            allow=worker.allow,
            wait_share=caused[worker.name],
        )
        if number % STEP == STEP - 1:
            yield
    reply.events.extend(cluster.events.messages())


def _fill_run(
    status: pb.RunStatus, cluster: ClusterState, attempt: Attempt, now: float, caused: Counter[str], busy_cores: int
) -> Iterator[None]:
    going: list[Box] = []
    for _, box in sorted(attempt.boxes.items()):
        status.input_fn = name_of(box.opening.loader)
        box_status = _box_status(cluster, attempt, box, now)
        status.boxes.append(box_status)
        status.recoveries += sum(slot.restarts for slot in box_status.slots)
        if box_status.live and not box_status.epoch_ended:
            going.append(box)
            status.steps_per_s += box_status.steps_per_s
            status.batches_per_s += sum(slot.batches_per_s for slot in box_status.slots)
            status.wait_share = max(status.wait_share, box_status.wait_share)
            for slot in box_status.slots:
                caused[slot.worker] += slot.wait_share  # type: ignore[assignment]
        yield
    status.steps_per_s /= max(1, len(going))
    bottleneck = find(going, cluster.workers, busy_cores, partial(slot_budgets.why_waits, cluster, attempt))
    if bottleneck is not None:
        status.bottleneck.CopyFrom(bottleneck)
        because = why_not_spoken(attempt.boxes[bottleneck.box].opening, cluster.lane_protocols)
        if bottleneck.kind == "unplaced" and because:
            status.bottleneck.text += f" {because}."
