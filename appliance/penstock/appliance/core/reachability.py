"""Workers that a box cannot reach, although both the box and the worker can reach the coordinator.

A lane goes from the training host directly to the worker's host, so only the box can notice a broken route or a
firewall between the two. The box reports the slots whose lanes it could not open or keep while its connection to the
coordinator worked, which shows that its own network worked. Such a slot moves to a worker that the box can reach, if
one has free capacity. Otherwise the slot stays where it is, and the box keeps trying to open the lane.

A report moves only the slots of its own box. A box that can reach no worker at all must not move its slots through the
whole fleet, with a runner started in vain each time. So the reports of a box count for only a few workers at a time
(`limits.unreachable_max`).
"""

from __future__ import annotations

from penstock.appliance.core.cluster_state import ClusterState
from penstock.appliance.model.entities import Attempt, Box, Slot, Worker
from penstock.proto.v1 import coordinator_pb2 as pb

_MAX_REASON = 300
"""Largest number of characters taken from the reason in a box's report."""


def note(cluster: ClusterState, attempt: Attempt, box: Box, request: pb.WatchRunRequest, now: float) -> None:
    """Record which workers the box reports as unreachable, and move its slots from them if another worker has free
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
