"""Workers that a box cannot reach, although both can reach the coordinator.

A lane goes from the training host to the worker's host and never through the coordinator, so only the box can see a
broken route or a firewall between these two. It reports the slots whose lanes it could not open or keep while it had
contact with the coordinator, that is, while its own network worked. Such a slot moves to a worker that is not known to
be unreachable from the box, as long as one has free capacity; else it stays, and the box keeps trying the lane.

A box's report moves its own slots only. A box that can reach no worker must not move its slots through the whole fleet,
with a runner started in vain each time. So its reports count for only a few workers at a time (`unreachable_max`).
"""

from __future__ import annotations

from penstock.appliance.core.cluster_state import ClusterState
from penstock.appliance.model.entities import Attempt, Box, Slot, Worker
from penstock.proto.v1 import coordinator_pb2 as pb

_MAX_REASON = 300
"""Longest reason taken from a box's report, in characters."""


def note(cluster: ClusterState, attempt: Attempt, box: Box, request: pb.WatchRunRequest, now: float) -> None:
    """Move the slots whose lanes the box reports as cut off, where another worker has free capacity for them."""
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
