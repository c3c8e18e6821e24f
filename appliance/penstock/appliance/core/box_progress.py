"""Progress that a box (a data-parallel rank) reports to the coordinator: its position, the ends of its slots' epochs,
abandoned epochs. The states of the last `retention_steps` steps may be requested. Snapshots that no such state needs
are dropped as the position advances.

A box also reports workers that it cannot reach, although both can reach the coordinator. A lane goes from the training
host directly to the worker's host, so only the box can notice a broken route or a firewall between the two. The box
reports the slots whose lanes it could not open or keep while its connection to the coordinator worked. (The connection
shows that the box's own network worked.) Such a slot moves to a worker that the box can reach, if one has free
capacity. Otherwise the slot stays where it is, and the box keeps trying to open the lane.

A report moves only the slots of its own box. A box that can reach no worker at all must not move its slots through the
whole fleet, with a runner started in vain each time. So the reports of a box count for only a few workers at a time
(`limits.unreachable_max`).
"""

from __future__ import annotations

from bisect import bisect_right

from penstock.appliance.core.cluster_state import ClusterState
from penstock.appliance.core.opening import resumes
from penstock.appliance.model.entities import Attempt, Box, BoxPresence, Run, Slot, Worker
from penstock.proto.errors import SAME_RELEASE, InvalidArgumentError
from penstock.proto.rpc.bounds.message_bounds import owned
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb

_COMPARED_EPOCHS = 64
"""Number of newest epochs for which the coordinator knows which box has left it first, and what it is called."""
_MAX_REASON = 300
"""Largest number of characters taken from the reason in a box's report."""


def note_opening(cluster: ClusterState, run: Run, request: pb.OpenRunRequest) -> None:
    """Mark a new run as unused, so that its next launch may begin it anew on another topology. Remove the mark if the
    request loads a state; `advance` removes it when a box reports the first step."""
    if resumes(request):
        _note_use(cluster, run)
    elif run.attempt == 0:
        run.unused = True
        cluster.journal.put("unused", {"run": run.name})


def _note_use(cluster: ClusterState, run: Run) -> None:
    if run.unused:
        run.unused = False
        cluster.journal.drop("unused", run=run.name)


def advance(cluster: ClusterState, attempt: Attempt, box: Box, request: pb.WatchRunRequest, now: float) -> None:
    """Record the position that the box reports, `request.delivered`, which must not be before the recorded one. Drop
    the slots' snapshots that only states before the last `retention_steps` steps need."""
    position = Position.received(request.delivered, InvalidArgumentError)
    steps, box.delivered = position.step - box.step, owned(request.delivered)
    if position.step > 0:
        _note_use(cluster, cluster.runs[attempt.run])
    _note_ends(cluster, attempt, box, position)
    if any(position.delivered):  # the loop may still name an epoch of which it has taken nothing
        _note_first(attempt.named, position.epoch, (position.label, box.number))
    box.measure(now, steps)
    # Not every position of the window is kept, so snapshots may be dropped a fraction of the window late, never early.
    history, edge = box.history, box.step - box.retention
    if box.step - history[-1].step >= max(1, box.retention // cluster.limits.history_entries):
        history.append(position)
    while len(history) > 1 and history[1].step <= edge:
        history.popleft()
        box.ends = {end: total for end, total in box.ends.items() if end[1] >= history[0].epoch}
    if history[0].step <= edge:
        for slot in box.slots:
            cluster.snapshot_index.trim(slot.key, history[0].total[slot.key.slot])


def note_epoch_starts(cluster: ClusterState, attempt: Attempt, box: Box, request: pb.WatchRunRequest) -> None:
    """Record the positions at which the box began epochs. After a restart of the coordinator, a client sends all of
    these positions again, perhaps in several reports. Set `box.reported` with the last of these reports. Raises
    InvalidArgumentError for a position that is not the start of an epoch."""
    spacing = max(1, box.retention // cluster.limits.history_entries)
    for message in request.epoch_starts:
        start = Position.received(owned(message), InvalidArgumentError)
        if not box.is_fresh(start) or start.step < box.start.step:
            raise InvalidArgumentError(
                f"an epoch's start must have no batch of its epoch, and must be at step {box.start.step} or later, in "
                f"an epoch after {box.start.epoch}, where this launch began, got step {start.step} (epoch "
                f"{start.epoch}). {SAME_RELEASE}"
            )
        _note_ends(cluster, attempt, box, start)
        _note_left(attempt, box, start)
        at = bisect_right(box.history, start.step, key=lambda position: position.step)
        if at > 0 and start.step - box.history[at - 1].step >= spacing:
            box.history.insert(at, start)
    if not (box.reported or request.omits_epoch_starts):
        box.reported = True
        cluster.touch(attempt, box)


def _note_left(attempt: Attempt, box: Box, start: Position) -> None:
    _note_first(attempt.left, start.epoch - 1, (start.step, box.number))


def _note_first(noted: dict[int, tuple[int, int]], epoch: int, what: tuple[int, int]) -> None:
    noted.setdefault(epoch, what)
    if len(noted) > _COMPARED_EPOCHS:
        del noted[min(noted)]


def note_sources(box: Box, request: pb.WatchRunRequest) -> None:
    """Record what the box reports about its data sources: the number of samples from each source, and the cost of the
    most expensive box's batch divided by the mean over all boxes (`Box.imbalance`)."""
    if request.sources:
        box.imbalance = request.imbalance
        box.sources = {count.source: owned(count) for count in request.sources}


def note_fence(cluster: ClusterState, box: Box, request: pb.WatchRunRequest) -> None:
    """Record that the box has received a fence: the step before which all boxes wait while a change of the mixture is
    decided. Record also the last step that the box had taken when the fence arrived."""
    fence = request.fence_key, request.fence_taken
    if fence != box.fence:
        box.fence = fence
        cluster.changed(("mixture", request.run))


def ask(cluster: ClusterState, run_name: str, number: int) -> Box | None:
    """Ask a box for a report of its present position: answer its client's long poll, because the client reports with
    each new poll. Otherwise the next report comes after up to one heartbeat interval. Do not wait for the report.

    Return the box; None if the run is not open or the box has no live client. `number`: the box's number.
    """
    run = cluster.runs.get(run_name)
    attempt = run.current if run is not None else None
    box = attempt.boxes.get(number) if attempt is not None else None
    if attempt is None or box is None or box.presence is not BoxPresence.LIVE:
        return None
    cluster.bump_box(attempt, box)
    return box


def note_abandoned(cluster: ClusterState, attempt: Attempt, box: Box, request: pb.WatchRunRequest) -> None:
    """Record the epochs that the box's loop abandoned by `break`. Raises InvalidArgumentError for more than
    `limits.abandoned_max` of them."""
    touched: list[Box] = []
    for abandoned_epoch in request.abandoned:
        if abandoned_epoch.epoch in box.abandoned:
            continue
        if len(box.abandoned) >= cluster.limits.abandoned_max:
            raise InvalidArgumentError(
                f"box {box.number} must abandon at most {cluster.limits.abandoned_max} epochs (by `break`) in one "
                "launch, got one more: start the job again from its last saved state. A loop that uses "
                "DataExecutor(persistent=True) abandons no epoch"
            )
        if attempt.note_abandoned(box, abandoned_epoch.epoch, abandoned_epoch.step):
            touched = list(attempt.boxes.values())
        cluster.save_abandoned(attempt, box, abandoned_epoch.epoch)
        touched = touched or [box]
    for other in touched:
        cluster.touch(attempt, other)


def _note_ends(cluster: ClusterState, attempt: Attempt, box: Box, position: Position) -> None:
    for number in set(range(attempt.num_workers)) - set(position.live):
        box.ends[number, position.epoch] = position.total[number]
    if len(box.ends) > cluster.limits.ends_max:
        epochs = sorted({epoch for _, epoch in box.ends})
        newer = epochs[len(epochs) // 2]
        box.ends = {end: total for end, total in box.ends.items() if end[1] > newer}
    if position.epoch > box.start.epoch:  # the epoch before ended or was abandoned at this position
        begun = zip(position.total, position.delivered, strict=True)
        box.ends |= {(k, position.epoch - 1): total - delivered for k, (total, delivered) in enumerate(begun)}


def note_unreachable(
    cluster: ClusterState, attempt: Attempt, box: Box, request: pb.WatchRunRequest, now: float
) -> None:
    """Record which workers the box cannot reach, and move the box's slots from them if another worker has free
    capacity."""
    for claim in request.unreachable:
        slot = box.slots[claim.slot] if claim.slot < len(box.slots) else None
        if slot is None or slot.generation != claim.generation or slot.phase != pb.READY or not slot.worker:
            continue
        believed = box.unreachable_since(now - cluster.limits.unreachable_per_s)
        if slot.worker not in believed and len(believed) >= cluster.limits.unreachable_max:
            continue
        box.unreachable[slot.worker] = now
        if _elsewhere(cluster, box, slot, now) is not None:
            why = f"the training job of box {box.number} cannot reach worker {slot.worker}: {claim.why[:_MAX_REASON]}"
            cluster.move(slot, why, None)


def _elsewhere(cluster: ClusterState, box: Box, slot: Slot, now: float) -> Worker | None:
    opening = box.opening
    for since in (now - cluster.limits.unreachable_s, now - cluster.limits.unreachable_again_s):
        barred = box.unreachable_since(since)
        worker = cluster.free_capacity.choose(slot, opening.host_id, opening.loader.input_fn, barred | {slot.worker})
        if worker is not None:
            return worker
    return None
