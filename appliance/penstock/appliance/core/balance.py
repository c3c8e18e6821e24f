"""Balance: which slots should run elsewhere, as a function of measurements.

A move costs a runner's start on another worker and a short replay, so it has two reasons only.

Stragglers. A box takes its slots' batches in turn, so one slow slot holds up the loop, whatever the others do.
bottleneck.py finds that slot: the loop waits for it while the others have batches ready and take less time for each, or
its batches arrive late. If it costs the loop a tenth of its time, it moves to a worker where it has not been, on
another machine if one has free capacity: the usual cause is a machine, the other load on it, or the network. The cause
may also be the slot's own data. So the wait before the next such move doubles each time, and their number is limited.

Load. When workers join, slots move from the fullest worker to the emptiest, as long as their loads differ by a quarter
of a worker's capacity. A slot on the box's own host stays there, because a batch costs only one memcpy there. A slot
does not move to a worker that stragglers of the same run have left: that worker is empty because it is slow, and the
slot would leave it again.

A slot is not moved if its loader would replay its whole epoch, or if no snapshot has its random state: the replay would
hold the loop up for longer than the move gains.

The work is done in slices, because it takes tens of milliseconds for thousands of slots. The cluster state may change
between two slices, so a slice keeps only the lists of boxes and workers still to look at.

Pure: the cluster state is read, never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from penstock.appliance.core.cluster_state import ClusterState
from penstock.appliance.core.views import facts
from penstock.appliance.model.entities import Attempt, Box, BoxPresence, Slot, SlotKey, Worker
from penstock.appliance.policies.bottleneck import Bottleneck, find
from penstock.proto.state.allowed_modules import module_of
from penstock.proto.v1 import coordinator_pb2 as pb

SLOTS_PER_MIGRATION = 100
"""Slots of the fleet per concurrent migration for balance; one migration is always allowed."""
STRAGGLER_WAIT_SHARE = 0.10
"""Share of its time that a loop must wait for a slot before the slot is moved."""
MAX_STRAGGLER_MOVES = 3
"""Largest number of moves of a straggler: a slot that is slow on every worker has slow data."""
SLICES = 4
"""Slots per slice, in units of `slots_at_once`: checking a slot costs a quarter of what placing one costs."""
MIN_LOAD_DIFFERENCE = 0.25
"""Smallest difference in load that is worth a move, as a share of a worker's capacity."""


@dataclass(frozen=True)
class SlotMove:
    slot: Slot
    worker: Worker
    why: str
    for_straggler: bool = False
    """True if the slot moves because it is a straggler. If its own data is slow, no move helps."""


def look(cluster: ClusterState, now: float, budget: int) -> Iterator[SlotMove | None]:
    """Yield at most `budget` moves, and None where a slice ends so that other tasks can run. The caller makes each move
    before it takes the next. A slot or a worker is in at most one of the moves."""
    slots: set[SlotKey] = set()
    taken: set[str] = set()
    for move in chain(_stragglers(cluster, now), _levelled(cluster, now)) if budget > 0 else ():
        if move is None:
            yield None
        elif move.worker.name not in taken and move.slot.key not in slots:
            slots.add(move.slot.key)
            taken |= {move.worker.name, move.slot.worker}
            yield move
            if len(slots) >= budget:
                return


class _Slice:
    """Counter of the slots, boxes and workers that one call has checked. The next call continues there, because
    checking a large fleet in one go would delay other calls."""

    def __init__(self, cluster: ClusterState) -> None:
        self._most = SLICES * cluster.limits.slots_at_once
        self._looked = 0

    def ends(self, looked: int) -> bool:
        """Count slots, boxes or workers that were looked at; return whether this call has looked at enough."""
        self._looked += looked
        if self._looked < self._most:
            return False
        self._looked = 0
        return True


def _settled(cluster: ClusterState, slot: Slot, now: float, times: int = 1) -> bool:
    """Return whether the slot runs well where it is, has done so for long enough, and is cheap to move."""
    return (
        slot.phase == pb.READY
        and slot.target is None
        and not slot.gauge.behind
        and _is_cheap(slot)
        and now >= slot.left_alone_until
        and now - slot.moved_at >= cluster.limits.balance_after_s * times
    )


def _is_cheap(slot: Slot) -> bool:
    """Return whether moving the slot costs little, because its loader resumes from a snapshot. Without a snapshot the
    new worker would replay the whole epoch, which costs more than the overload that the move is to cure."""
    capabilities = slot.capabilities
    return (
        capabilities is not None
        and capabilities.state_methods >= 2
        and not capabilities.not_restartable
        and not capabilities.own_workers
    )


def _stragglers(cluster: ClusterState, now: float) -> Iterator[SlotMove | None]:
    part = _Slice(cluster)
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
                or not _settled(cluster, slot, now, 1 << len(slot.was_slow_at))
            ):
                continue
            worker = _elsewhere(cluster, slot, slow | slot.was_slow_at | slot.unfit_at(cluster.workers))
            if worker is not None:
                share = f"{finding.wait_share * finding.blame:.0%}"
                why = f"box {finding.box} waited {share} of its time for it on worker {slot.worker}"
                yield SlotMove(slot, worker, why, for_straggler=True)
            if part.ends(len(cluster.workers)):  # `_elsewhere` looks at every worker
                yield None


def _acute_bottleneck(cluster: ClusterState, box: Box) -> list[Bottleneck]:
    """Return the bottleneck if one slot holds the box up enough to act on; else an empty list."""
    finding = find([facts(cluster, box)])
    if finding is None or finding.kind not in ("straggler", "network") or finding.slot is None:
        return []
    return [finding] if finding.wait_share * finding.blame >= STRAGGLER_WAIT_SHARE else []


def _elsewhere(cluster: ClusterState, slot: Slot, slow: set[str]) -> Worker | None:
    """Return a worker for a straggler, on another machine if possible. `slow`: workers that are excluded."""
    _, box = cluster.box_of(slot)
    opening = box.opening
    owner = cluster.workers.get(slot.worker)
    here = {worker.name for worker in cluster.workers.values() if owner and worker.host_id == owner.host_id}
    slow = slow | _far(cluster, box)
    for barred in (slow | here, slow | {slot.worker}):
        worker = cluster.free_capacity.choose(slot, opening.host_id, opening.loader.input_fn, barred)
        if worker is not None:
            return worker
    return None


def _far(cluster: ClusterState, box: Box) -> set[str]:
    """Return the workers that the box could not reach lately."""
    return box.unreachable_since(cluster.events.now - cluster.limits.unreachable_s)


def _levelled(cluster: ClusterState, now: float) -> Iterator[SlotMove | None]:
    there = [worker for worker in cluster.workers.values() if worker.registered and not worker.draining]
    fullest = sorted(there, key=lambda worker: (-worker.load, worker.name))
    emptiest = [worker for worker in reversed(fullest) if worker.free > 0]
    part = _Slice(cluster)
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
    """Return the workers that the run's stragglers have left. A slot that is slow everywhere does not count."""
    slots = (slot for box in attempt.boxes.values() for slot in box.slots)
    return {name for slot in slots if len(slot.was_slow_at) < MAX_STRAGGLER_MOVES for name in slot.was_slow_at}


def _may_go(cluster: ClusterState, slot: Slot, full: Worker, empty: Worker, now: float) -> bool:
    if slot.worker != full.name or not _settled(cluster, slot, now):
        return False
    _, box = cluster.box_of(slot)
    opening = box.opening
    near = full.host_id == opening.host_id != empty.host_id
    barred = slot.was_slow_at | slot.unfit_at(cluster.workers) | _far(cluster, box)
    return not near and empty.name not in barred and empty.may_run(module_of(opening.loader.input_fn))
