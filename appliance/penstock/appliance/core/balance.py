"""Balance: decides from measurements which slots should move to another worker.

A move costs the start of a runner and a short replay, so a slot moves for two reasons only.

Stragglers (bottleneck.py). A slot that costs the loop a tenth of its time moves to a worker where it was no straggler
before, if possible on another machine, whose load or network is the usual cause. The cause may also be the slot's own
data, so the wait doubles with each move and the number of moves is limited.

Load. Slots move from the fullest worker to the emptiest while their loads, with the slot counted at both, differ by a
quarter of a worker's capacity. A slot on its box's own host stays, because a batch costs only one memcpy there. A slot
never goes to a worker that stragglers of its run were moved away from.

A slot stays if its loader would replay the whole epoch or more than `replay_s` seconds, or if no snapshot holds its
random state. Pure: the cluster state is read, never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain

from penstock.appliance.core import launch_restarts
from penstock.appliance.core.bottleneck import find
from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Attempt, Box, BoxPresence, Slot, Worker
from penstock.appliance.core.placement import UNREACHABLE_S, Placement
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import coordinator_pb2 as pb

SLOTS_PER_MIGRATION = 100
"""Slots in the fleet for each migration that balance may have under way (at least one). Drains have no such limit."""
STRAGGLER_WAIT_SHARE = 0.10
"""Smallest share of its time for which a loop must wait for a slot or worker before balance moves a slot."""
BOXES_AT_ONCE = 512
"""Boxes in which a check looks for a straggler, those that wait most: 30 us each, in which heartbeats wait."""
MAX_STRAGGLER_MOVES = 3
"""Largest number of moves of one straggler: a slot that is slow on every worker has slow data."""
MIN_LOAD_DIFFERENCE = 0.25
"""Smallest difference of loads worth a move, as a share of capacity: fuller worker before, emptier one after it."""


@dataclass(frozen=True)
class SlotMove:
    slot: Slot
    worker: Worker
    why: str
    for_straggler: bool = False
    """True if the slot moves because it is a straggler, False to balance the load."""


def find_moves(cluster: ClusterState, placement: Placement, now: float, budget: int) -> Iterator[SlotMove]:
    """Yield at most `budget` moves. The caller makes each move before it takes the next. No worker takes a slot if an
    earlier move gave it one or took one from it."""
    slots: set[SlotKey] = set()
    taken: set[str] = set()
    for move in chain(_straggler_moves(cluster, placement, now), _load_moves(cluster, now)) if budget > 0 else ():
        if move.worker.name not in taken and move.slot.key not in slots:
            slots.add(move.slot.key)
            taken |= {move.worker.name, move.slot.worker}
            yield move
            if len(slots) >= budget:
                return


def _is_movable(cluster: ClusterState, slot: Slot, now: float, times: int = 1) -> bool:
    """Return whether the slot has run normally for `times` * `balance_after_s` seconds, and moving it is cheap."""
    return (
        slot.phase == pb.READY
        and slot.target is None
        and not slot.gauge.behind
        and _is_cheap(cluster.box_of(slot)[1], slot)
        and now >= slot.left_alone_until
        and now - slot.moved_at >= cluster.limits.balance_after_s * times
    )


def _is_cheap(box: Box, slot: Slot) -> bool:
    """Return whether the slot's loader resumes from a snapshot: a replay of the epoch, or of the launch with four
    methods, costs more than a move gains, unless the runner has worked for a short time only."""
    capabilities = slot.capabilities
    return (
        capabilities is not None
        and capabilities.state_methods >= 2
        and not capabilities.not_restartable
        and not capabilities.own_workers
        and (not by_own_methods(capabilities) or slot.worked_s <= launch_restarts.alone_s(box))
    )


def _straggler_moves(cluster: ClusterState, placement: Placement, now: float) -> Iterator[SlotMove]:
    for attempt in cluster.open_attempts():
        going = [box for box in attempt.boxes.values() if box.presence is BoxPresence.LIVE and not box.epoch_ended]
        waiting = [box for box in going if box.waits.share >= STRAGGLER_WAIT_SHARE]
        most = nlargest(BOXES_AT_ONCE, waiting, key=lambda box: box.waits.share)
        found = [finding for box in most for finding in _acute_bottleneck(cluster, box)]
        slow = {finding.worker for finding in found}
        for finding in sorted(found, key=lambda finding: -finding.wait_share * finding.blame):
            slot = attempt.boxes[finding.box].slots[finding.slot]
            times_moved = len(slot.was_slow_at)
            if times_moved >= MAX_STRAGGLER_MOVES or not _is_movable(cluster, slot, now, 1 << times_moved):
                continue
            worker = _elsewhere(cluster, placement, slot, slow | slot.was_slow_at | slot.unfit_at(cluster.workers))
            if worker is not None:
                share = f"{finding.wait_share * finding.blame:.0%}"
                why = f"box {finding.box} waited {share} of its time for the slot on worker {slot.worker}"
                yield SlotMove(slot, worker, why, for_straggler=True)


def _acute_bottleneck(cluster: ClusterState, box: Box) -> list[pb.Bottleneck]:
    """Return the box's bottleneck if its loop waits for a slot or worker at least STRAGGLER_WAIT_SHARE of its time."""
    finding = find([box], cluster.workers)
    if finding is None or finding.kind not in ("straggler", "network"):
        return []
    return [finding] if finding.wait_share * finding.blame >= STRAGGLER_WAIT_SHARE else []


def _elsewhere(cluster: ClusterState, placement: Placement, slot: Slot, slow: set[str]) -> Worker | None:
    """Return a worker for the straggler, on another machine if possible, not its own, of `slow`, or out of reach."""
    _, box = cluster.box_of(slot)
    owner = cluster.workers.get(slot.worker)
    here = {worker.name for worker in cluster.workers.values() if owner and worker.host_id == owner.host_id}
    slow = slow | _unreachable(cluster, box)
    return placement.find_worker(slot, slow | here, slow | {slot.worker})


def _unreachable(cluster: ClusterState, box: Box) -> set[str]:
    return box.unreachable_since(cluster.clock() - UNREACHABLE_S)


def _load_moves(cluster: ClusterState, now: float) -> Iterator[SlotMove]:
    usable = [worker for worker in cluster.workers.values() if worker.registered and not worker.draining]
    fullest = sorted(usable, key=lambda worker: (-worker.load, worker.name))
    emptiest = [worker for worker in reversed(fullest) if worker.free > 0]
    slow: set[tuple[str, str]] | None = None
    for full, empty in zip(fullest, emptiest, strict=False):
        if full.load - (len(empty.slots) + 1) / empty.capacity < MIN_LOAD_DIFFERENCE:
            return
        if slow is None:
            slow = {(attempt.run, name) for attempt in cluster.open_attempts() for name in _slow_for(attempt)}
        if not empty.free:
            continue
        slot = next(
            (
                slot
                for slot in cluster.slots_of(full)
                if (slot.key.run, empty.name) not in slow and _may_go(cluster, slot, full, empty, now)
            ),
            None,
        )
        if slot is not None:
            why = f"worker {full.name} has {len(full.slots)} slots and worker {empty.name} {len(empty.slots)}"
            yield SlotMove(slot, empty, why)


def _slow_for(attempt: Attempt) -> set[str]:
    """Return workers that stragglers left, without slots moved MAX_STRAGGLER_MOVES times: their data is slow."""
    slots = (slot for box in attempt.boxes.values() for slot in box.slots)
    return {name for slot in slots if len(slot.was_slow_at) < MAX_STRAGGLER_MOVES for name in slot.was_slow_at}


def _may_go(cluster: ClusterState, slot: Slot, full: Worker, empty: Worker, now: float) -> bool:
    if slot.worker != full.name or not _is_movable(cluster, slot, now):
        return False
    _, box = cluster.box_of(slot)
    opening = box.opening
    near = full.host_id == opening.host_id != empty.host_id
    barred = slot.was_slow_at | slot.unfit_at(cluster.workers) | _unreachable(cluster, box)
    return not near and empty.name not in barred and empty.can_serve(opening)
