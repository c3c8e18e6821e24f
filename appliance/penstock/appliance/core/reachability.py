"""Workers that a box cannot reach, although the coordinator hears them both.

A lane goes from the training host to the worker's and never past here, so a route or a firewall between these two is
nobody else's to see. The box tells with its reports which slots' lanes it could not open or keep, having heard from the
coordinator meanwhile: its own network works. Such a slot goes to a worker that is not known to be out of the box's
reach, as long as there is one with room; else it stays, and the lane is tried on.

What a box says moves its own slots and no others, and keeps only these from a worker. So that one which can reach
nobody does not chase its slots through the fleet, each start of a runner for nothing, it is believed a few workers a
minute.
"""

from __future__ import annotations

from penstock.appliance.core.cluster_state import ClusterState
from penstock.appliance.model.entities import Attempt, Box, Slot, Worker
from penstock.proto.v1 import coordinator_pb2 as pb

_WHY = 300
"""Characters of what the box says."""


def note(cluster: ClusterState, attempt: Attempt, box: Box, request: pb.WatchRunRequest, now: float) -> None:
    """Moves the slots whose lanes the box says are cut off, where another worker has room for them."""
    for claim in request.unreachable:
        slot = box.slots[claim.slot] if claim.slot < len(box.slots) else None
        if slot is None or slot.generation != claim.generation or slot.phase != pb.READY or not slot.worker:
            continue
        believed = box.unreachable_since(now - cluster.limits.unreachable_per_s)
        if slot.worker not in believed and len(believed) >= cluster.limits.unreachable_max:
            continue
        box.unreachable[slot.worker] = now
        if _elsewhere(cluster, box, slot, now) is not None:
            why = f"the training job of box {box.number} cannot reach worker {slot.worker}: {claim.why[:_WHY]}"
            cluster.move(slot, why, None)


def _elsewhere(cluster: ClusterState, box: Box, slot: Slot, now: float) -> Worker | None:
    opening = box.opening
    for since in (now - cluster.limits.unreachable_s, now - cluster.limits.unreachable_again_s):
        barred = box.unreachable_since(since)
        worker = cluster.room.choose(slot, opening.host_id, opening.loader.input_fn, barred | {slot.worker})
        if worker is not None:
            return worker
    return None
