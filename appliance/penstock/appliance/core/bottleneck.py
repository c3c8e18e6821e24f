"""Bottleneck of a run: the training loop, one worker, too few workers, a stalled runner, or the network between loop
and workers.

A loop that seldom waits is the bottleneck itself. Waits alone could suggest the wrong slot, because the loop takes the
slots in turn: if all are equally slow, it waits for one, and the others make their batches meanwhile. So a slot is the
bottleneck only if it causes at least half of the waiting, at least half of the other slots have batches ready
meanwhile, and it takes at least 1.5 times as long for a batch (ready batches alone prove nothing: over time any small
difference fills a ring). Otherwise there are too few slots, or input_fn is too slow. If the slot is on another host and
has batches ready itself, they arrive late: the bottleneck is the network. If it is on this host and has batches ready,
its waits are over: those of a start or a recovery count for a minute.

Collectives keep the boxes in step, so the run is as fast as the box that waits most. Pure: entities are read, never
changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from penstock.appliance.core.entities import Box, Slot, Worker
from penstock.appliance.core.gauges import AHEAD
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.units import INPUT_BOUND, percent

LEAST_S = 3.0
"""Shortest time in seconds over which waits are measured before a bottleneck is reported."""
MIN_BLAME = 0.5
"""Smallest share of a box's waiting that a straggler causes, or that happens while batches are ready (network)."""
STALLED_S, STALLED_FACTOR = 10.0, 3.0
"""A loop that waits for one batch is stalled after so many seconds, and so many times its last interval of steps."""
STRAGGLER_FACTOR = 1.5
"""Smallest ratio of a straggler's time per batch to that of the other slots."""


def _of_box(
    box: Box, kind: str, text: str, slot: int | None = None, worker: str = "", blame: float = 0.0
) -> pb.Bottleneck:
    """Return a bottleneck. `kind`: starting (first batches are made, or too little is measured), loop, straggler (one
    slot or worker), network (batches arrive late), workers (too few slots, or a slow input_fn), unplaced (no free
    capacity), recovering (a slot's new runner starts or replays, or the slot has failed), stalled (one batch takes far
    longer than those before, or than the runner's worker expects)."""
    bound, share = kind not in ("starting", "loop"), 0.0 if kind == "starting" and slot is None else box.waits.share
    return pb.Bottleneck(
        kind=kind, text=text, input_bound=bound, wait_share=share, box=box.number, slot=slot, worker=worker, blame=blame
    )


def find(
    boxes: Iterable[Box],
    workers: Mapping[str, Worker],
    busy_cores: int = 0,
    why_waits: Callable[[Box], str] = lambda box: "",
) -> pb.Bottleneck | None:
    """Return the run's bottleneck from the boxes whose loops run; None if there are none. `busy_cores`: cores of the
    workers' machines if the slots keep all busy; else 0. `why_waits`: what a box waits for (slot_budgets.py)."""
    boxes = list(boxes)
    stuck = next((found for box in boxes if (found := _unplaced(box, why_waits)) is not None), None)
    stuck = stuck or next((found for box in boxes if (found := _stalled(box)) is not None), None)
    if stuck is not None or not boxes:
        return stuck
    worst = max(boxes, key=lambda box: (box.waits.span_s >= LEAST_S, box.waits.share))
    if worst.waits.span_s < LEAST_S:
        return _of_box(worst, "starting", _beginning(boxes))
    top = max(worst.slots, key=lambda slot: worst.waits.of(slot.key.slot))
    share = worst.waits.share
    if share <= INPUT_BOUND or not worst.waits.of(top.key.slot):
        text = (
            f"Not input-bound: box {worst.number}, which waits most, waits for data {percent(share)} of its time. The "
            "training loop sets the speed."
        )
        return _of_box(worst, "loop", text)
    waits = f"Input-bound: box {worst.number} waits for data {percent(share)} of its time"
    alone = _of_phase(worst, top, waits) or _late(worst, top, waits, workers) or _over(worst, top)
    return alone or _straggler(worst, top, waits) or _few(worst, waits, busy_cores)


def _unplaced(box: Box, why_waits: Callable[[Box], str]) -> pb.Bottleneck | None:
    """Return a bottleneck if a slot has no worker and waits are measured for less than LEAST_S: no first batch."""
    slot = next((slot for slot in box.slots if slot.phase == pb.WAITING), None)
    if slot is None or box.waits.span_s >= LEAST_S:
        return None
    why = why_waits(box) or (
        f"no worker has free capacity for its slot {slot.key.slot}. Start more workers, or workers with more slots"
    )
    return _of_box(box, "unplaced", f"Box {box.number} must wait: {why}.", slot.key.slot)


def _stalled(box: Box) -> pb.Bottleneck | None:
    """Return a bottleneck if the loop waits for a runner that is long in one call, or far longer than usual."""
    if not 0 < box.waiting_for <= len(box.slots):
        return None
    slot, still_s = box.slots[box.waiting_for - 1], box.waits.still_s
    unusual = still_s > max(STALLED_S, STALLED_FACTOR * box.waits.step_s)
    works = slot.phase == pb.READY and not slot.gauge.queued and not (slot.gauge.behind and slot.recovery)
    if not slot.doing and not (unusual and works):
        return None
    doing = f"is {slot.doing}" if slot.doing else "makes no batch. The slot's note names the call if that lasts"
    waited = f"waits since {still_s:.0f} s" if still_s else "waits"
    text = f"Stalled: box {box.number} {waited} for slot {slot.key.slot}, whose runner on worker {slot.worker} {doing}."
    return _of_box(box, "stalled", text, slot.key.slot, slot.worker, 1.0)


def _beginning(boxes: Sequence[Box]) -> str:
    starting = [slot for box in boxes for slot in box.slots if slot.phase == pb.STARTING]
    if starting:
        return f"Starting: the first batches of {len(starting)} slots are being made."
    return "Starting: not enough has been measured yet."


def _of_phase(box: Box, top: Slot, waits: str) -> pb.Bottleneck | None:
    """Return a bottleneck if slot `top` has no ready runner, or one still behind. `waits`: begins its text."""
    behind, number = top.gauge.behind and top.recovery, top.key.slot
    if top.phase == pb.READY and not behind:
        return None
    blame = _share(box, [top])
    prefix = f"{waits}, {percent(blame)} of that for slot {number}"
    if top.phase == pb.WAITING:
        text = f"{prefix}, for which no worker has free capacity: start more workers, or workers with more slots."
        return _of_box(box, "unplaced", text, number, "", blame)
    if top.phase == pb.FAILED:
        text = f"{prefix}, which has failed for good on worker {top.worker}: see its error."
    elif top.restarts or behind:
        text = f"{prefix}, whose new runner on worker {top.worker} is still starting or replaying."
    else:
        text = f"{prefix}, whose first batch is being made on worker {top.worker}."
        return _of_box(box, "starting", text, number, top.worker, blame)
    return _of_box(box, "recovering", text, number, top.worker, blame)


def _late(box: Box, top: Slot, waits: str, workers: Mapping[str, Worker]) -> pb.Bottleneck | None:
    number, worker, queued = top.key.slot, workers.get(top.worker), top.gauge.mean_queued
    is_near = worker is not None and worker.host_id == box.opening.host_id
    if is_near or box.waits.late(number) < MIN_BLAME or queued < AHEAD:
        return None
    blame = _share(box, [top])
    text = (
        f"{waits}, {percent(blame)} of that for slot {number}, although {queued:.1f} batches are ready "
        f"there on average: they arrive late from worker {top.worker}. Check the network to that machine, and its load."
    )
    return _of_box(box, "network", text, number, top.worker, blame)


def _over(box: Box, top: Slot) -> pb.Bottleneck | None:
    """Return a bottleneck if the slot that the loop waited for most has batches ready now."""
    if top.gauge.mean_queued < AHEAD:
        return None
    text = (
        f"Not input-bound any more: box {box.number} waited for data {percent(box.waits.share)} of the last minute, "
        f"most for slot {top.key.slot}, where {top.gauge.mean_queued:.1f} batches are ready on average now. The "
        "training loop sets the speed."
    )
    return _of_box(box, "loop", text)


def _straggler(box: Box, top: Slot, waits: str) -> pb.Bottleneck | None:
    """Return a bottleneck if the loop waits mainly for one slot or worker, which is slower than the others."""
    by_worker = Counter[str]()
    for slot in box.slots:
        by_worker[slot.worker] += box.waits.of(slot.key.slot)  # type: ignore[assignment]
    worker = max(by_worker, key=lambda name: by_worker[name])
    whole = [slot for slot in box.slots if slot.worker == worker]
    rest = [slot for slot in whole if slot is not top]
    # the slot is slow, not its worker
    alone = all(slot.gauge.mean_queued >= AHEAD and _slower([top], [slot]) for slot in rest)
    groups = [[top], whole] if alone else [whole, [top]]
    for group in groups:
        numbers = {slot.key.slot for slot in group}
        others = [slot for slot in box.slots if slot.key.slot not in numbers]
        blame = _share(box, group)
        ahead = 2 * sum(slot.gauge.mean_queued >= AHEAD for slot in others) >= len(others)
        if blame < MIN_BLAME or not others or not ahead or not _slower(group, others):
            continue
        who = f"slot {top.key.slot} on worker {top.worker}" if len(group) == 1 else f"worker {worker}"
        text = (
            f"{waits}, {percent(blame)} of that for {who}, which is slower than the others: {_mean(group):.1f} "
            f"batches are ready there on average, {_mean(others):.1f} at each other slot. Check that machine, and the "
            "data that the slot reads."
        )
        return _of_box(box, "straggler", text, top.key.slot, group[0].worker, blame)
    return None


def _slower(group: Sequence[Slot], others: Sequence[Slot]) -> bool:
    """Return whether `group` is STRAGGLER_FACTOR times as slow; True if not known: then ready batches decide."""
    own, usual = ([slot.batch_s for slot in slots if slot.batch_s > 0] for slots in (group, others))
    return not own or not usual or max(own) >= STRAGGLER_FACTOR * median(usual)


def _few(box: Box, waits: str, busy_cores: int) -> pb.Bottleneck:
    number = len(box.slots)
    many = f"all its {number} slots are busy" if number > 1 else "its one slot is busy"
    text = f"{waits}, and {many} ({_mean(box.slots):.1f} batches are ready at each on average)"
    if busy_cores:
        text += (
            f", and all {busy_cores} cores of the workers' machines are busy. Start workers on more machines, or make "
            "input_fn faster."
        )
    else:
        text += ". Raise num_workers_per_box, or make input_fn faster."
    return _of_box(box, "workers", text)


def _share(box: Box, group: Sequence[Slot]) -> float:
    """Return the part of the box's waiting that is for these slots."""
    waited, whole = (sum(box.waits.of(slot.key.slot) for slot in slots) for slots in (group, box.slots))
    return min(1.0, waited / whole)


def _mean(slots: Sequence[Slot]) -> float:
    return sum(slot.gauge.mean_queued for slot in slots) / len(slots)
