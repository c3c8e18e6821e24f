"""Balance: decides from measurements which slots should move to another worker. A move costs the start of a runner and
a short replay, so a slot moves for two reasons only.

Stragglers. A loop takes its slots' batches in turn, so one slow slot holds it up; bottleneck.py finds such a slot. One
that costs the loop a tenth of its time moves to a worker where it was not a straggler before, and where no slot of its
run is one now, if possible on another machine: its load or network is the usual cause. The cause may also be the slot's
own data. So the wait doubles with each move of the same straggler, and the number of its moves is limited.

Load. For example after workers have joined, slots move from the fullest worker to the emptiest, as long as the loads of
the two, with the slot counted at both, differ by at least a quarter of a worker's capacity. A slot that runs on its
box's own host stays there, because a batch costs only one memcpy there. A slot does not move to a worker that
stragglers of the same run were moved away from.

A slot stays if its loader would replay the whole epoch, or for longer than `replay_s` seconds, or if no snapshot holds
its random state: the replay would hold up the loop for longer than the move gains.

The check of thousands of slots takes tens of milliseconds, so it is done in slices. The cluster may change between two
slices, so only the lists of boxes and workers that are still to be checked are kept.

Pure: the cluster state is read, never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from penstock.appliance.core import launch_restarts
from penstock.appliance.core.bottleneck import Bottleneck, find
from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Attempt, Box, BoxPresence, Slot, Worker
from penstock.appliance.core.placement import SLOTS_AT_ONCE, UNREACHABLE_S, Placement
from penstock.appliance.core.views import facts
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.state.allowed_modules import module_of
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import coordinator_pb2 as pb

SLOTS_PER_MIGRATION = 100
"""Number of slots in the fleet per migration that may be under way when balance starts another one: in a fleet of 1,000
slots, balance lets at most 10 slots migrate at the same time, and in any fleet one. Drains have no such limit."""
STRAGGLER_WAIT_SHARE = 0.10
"""Smallest share of a training loop's time, from 0 to 1, for which the loop must wait for one slot, or for the slots of
one worker, before balance moves a slot to another worker."""
MAX_STRAGGLER_MOVES = 3
"""Largest number of moves of one straggler. A slot that is slow on every worker has slow data, and moving it does not
help."""
SLICES = 4
"""Number of slots checked in one slice of the balance check, as a multiple of SLOTS_AT_ONCE, which limits how
many slots are placed in one call. Checking a slot takes a quarter of the time of placing one."""
MIN_LOAD_DIFFERENCE = 0.25
"""Smallest difference between the load of the fuller worker before a move and that of the emptier one after it that is
worth the move, as a share of a worker's capacity."""


@dataclass(frozen=True)
class SlotMove:
    """Decision to move a slot to another worker."""

    slot: Slot
    worker: Worker
    """Worker to which the slot moves."""
    why: str
    """Reason, as text for people."""
    for_straggler: bool = False
    """True if the slot moves because it is a straggler, False if it moves to balance the load."""


def find_moves(cluster: ClusterState, placement: Placement, now: float, budget: int) -> Iterator[SlotMove | None]:
    """Yield at most `budget` moves, and None at the end of each slice, where the caller can let other tasks run. The
    caller must make each move before it takes the next one. Each slot is in at most one of the moves. No worker takes a
    slot if an earlier move gave it one or took one from it."""
    slots: set[SlotKey] = set()
    taken: set[str] = set()
    for move in chain(_straggler_moves(cluster, placement, now), _load_moves(cluster, now)) if budget > 0 else ():
        if move is None:
            yield None
        elif move.worker.name not in taken and move.slot.key not in slots:
            slots.add(move.slot.key)
            taken |= {move.worker.name, move.slot.worker}
            yield move
            if len(slots) >= budget:
                return


class _Slice:
    """Counter of the slots, boxes and workers checked in the present slice. When it reaches its limit, the caller ends
    the slice and lets other calls run, because checking a large fleet in one go would delay them."""

    def __init__(self) -> None:
        self._limit = SLICES * SLOTS_AT_ONCE
        self._checked = 0

    def ends(self, checked: int) -> bool:
        """Add `checked` to the number of slots, boxes and workers checked. Return whether the slice ends here; then the
        count starts again from 0."""
        self._checked += checked
        if self._checked < self._limit:
            return False
        self._checked = 0
        return True


def _is_movable(cluster: ClusterState, slot: Slot, now: float, times: int = 1) -> bool:
    """Return whether the slot may be moved: it has run normally on its worker for `times` times
    `balance_after_s` seconds, and moving it is cheap."""
    return (
        slot.phase == pb.READY
        and slot.target is None
        and not slot.gauge.behind
        and _is_cheap(cluster.box_of(slot)[1], slot)
        and now >= slot.left_alone_until
        and now - slot.moved_at >= cluster.limits.balance_after_s * times
    )


def _is_cheap(box: Box, slot: Slot) -> bool:
    """Return whether moving the slot costs little, because its loader resumes from a snapshot. Another one would replay
    the whole epoch on the new worker, or the whole launch if it has four methods, which costs more than the move gains,
    unless a runner of four methods has worked for a short time only."""
    capabilities = slot.capabilities
    return (
        capabilities is not None
        and capabilities.state_methods >= 2
        and not capabilities.not_restartable
        and not capabilities.own_workers
        and (not by_own_methods(capabilities) or slot.worked_s <= launch_restarts.alone_s(box))
    )


def _straggler_moves(cluster: ClusterState, placement: Placement, now: float) -> Iterator[SlotMove | None]:
    part = _Slice()
    for attempt in cluster.open_attempts():
        found: list[Bottleneck] = []
        for box in list(attempt.boxes.values()):
            waits = box.waits.share >= STRAGGLER_WAIT_SHARE
            if waits and box.presence is BoxPresence.LIVE and not box.epoch_ended:
                found += _acute_bottleneck(cluster, box)
            if part.ends(1 + waits * len(box.slots)):
                yield None
        slow = {finding.worker for finding in found}
        for finding in sorted(found, key=lambda finding: -finding.wait_share * finding.blame):
            assert finding.box is not None
            assert finding.slot is not None
            slot = attempt.boxes[finding.box].slots[finding.slot]
            if (
                not cluster.is_open(slot)
                or len(slot.was_slow_at) >= MAX_STRAGGLER_MOVES
                or not _is_movable(cluster, slot, now, 1 << len(slot.was_slow_at))
            ):
                continue
            worker = _elsewhere(cluster, placement, slot, slow | slot.was_slow_at | slot.unfit_at(cluster.workers))
            if worker is not None:
                share = f"{finding.wait_share * finding.blame:.0%}"
                why = f"box {finding.box} waited {share} of its time for the slot on worker {slot.worker}"
                yield SlotMove(slot, worker, why, for_straggler=True)
            if part.ends(len(cluster.workers)):  # `_elsewhere` looks at every worker
                yield None


def _acute_bottleneck(cluster: ClusterState, box: Box) -> list[Bottleneck]:
    """Return the box's bottleneck, in a list of one, if the loop waits for a slow slot, or for the slots of one slow
    worker, for at least STRAGGLER_WAIT_SHARE of its time, so that a slot should move; else an empty list."""
    finding = find([facts(cluster, box)])
    if finding is None or finding.kind not in ("straggler", "network") or finding.slot is None:
        return []
    return [finding] if finding.wait_share * finding.blame >= STRAGGLER_WAIT_SHARE else []


def _elsewhere(cluster: ClusterState, placement: Placement, slot: Slot, slow: set[str]) -> Worker | None:
    """Return a worker that can take the straggler `slot`, on another machine if possible; None if no worker can.
    `slow`: names of workers that must not get the slot, because a straggler runs there, or because the slot was
    slow there or could not be taken over. The slot's present worker and the workers that its box cannot reach are
    excluded too."""
    _, box = cluster.box_of(slot)
    owner = cluster.workers.get(slot.worker)
    here = {worker.name for worker in cluster.workers.values() if owner and worker.host_id == owner.host_id}
    slow = slow | _unreachable(cluster, box)
    return placement.find_worker(slot, slow | here, slow | {slot.worker})


def _unreachable(cluster: ClusterState, box: Box) -> set[str]:
    return box.unreachable_since(cluster.events.now - UNREACHABLE_S)


def _load_moves(cluster: ClusterState, now: float) -> Iterator[SlotMove | None]:
    usable = [worker for worker in cluster.workers.values() if worker.registered and not worker.draining]
    fullest = sorted(usable, key=lambda worker: (-worker.load, worker.name))
    emptiest = [worker for worker in reversed(fullest) if worker.free > 0]
    part = _Slice()
    slow: set[tuple[str, str]] | None = None
    for full, empty in zip(fullest, emptiest, strict=False):
        if full.load - (len(empty.slots) + 1) / empty.capacity < MIN_LOAD_DIFFERENCE:
            return
        if slow is None:
            slow = set()
            for attempt in cluster.open_attempts():
                slow |= {(attempt.run, name) for name in _slow_for(attempt)}
                if part.ends(attempt.num_boxes * attempt.num_workers):
                    yield None
        if cluster.workers.get(full.name) is not full or cluster.workers.get(empty.name) is not empty or not empty.free:
            continue
        slots = [cluster.slot(key) for key in full.slots]
        fitting = [
            slot
            for slot in slots
            if slot is not None and (slot.key.run, empty.name) not in slow and _may_go(cluster, slot, full, empty, now)
        ]
        slot = min(fitting, key=lambda slot: slot.key, default=None)
        if slot is not None:
            why = f"worker {full.name} has {len(full.slots)} slots and worker {empty.name} {len(empty.slots)}"
            yield SlotMove(slot, empty, why)
        if part.ends(len(slots)):
            yield None


def _slow_for(attempt: Attempt) -> set[str]:
    """Return the names of the workers from which stragglers of this attempt were moved away. A slot that was moved
    MAX_STRAGGLER_MOVES times does not count, because it was slow on each of these workers: its data is slow."""
    slots = (slot for box in attempt.boxes.values() for slot in box.slots)
    return {name for slot in slots if len(slot.was_slow_at) < MAX_STRAGGLER_MOVES for name in slot.was_slow_at}


def _may_go(cluster: ClusterState, slot: Slot, full: Worker, empty: Worker, now: float) -> bool:
    if slot.worker != full.name or not _is_movable(cluster, slot, now):
        return False
    _, box = cluster.box_of(slot)
    opening = box.opening
    near = full.host_id == opening.host_id != empty.host_id
    barred = slot.was_slow_at | slot.unfit_at(cluster.workers) | _unreachable(cluster, box)
    return not near and empty.name not in barred and empty.may_run(module_of(opening.loader.input_fn))
