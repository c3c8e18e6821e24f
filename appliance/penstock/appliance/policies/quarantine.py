"""A batch that kills its runner each time: which one it is, and what becomes of it.

A runner that dies while it makes a batch says which one, by its place. When a slot has been lost too often without
progress and every loss was at the same place, it is that batch's doing: it is quarantined. Then the slot fails with an
error that names the batch, or, by the run's policy, the batch is left out from then on: every later runner of the slot,
and every replay, passes over it, and the next batch takes its number.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.appliance.model.entities import Box, Slot, SlotLoss
from penstock.proto.errors import WorkerLostError
from penstock.proto.state.position import MOST, Position
from penstock.proto.v1 import records_pb2

_MOST_STEPS = 100_000
"""That a runner can be ahead of what the box has reported; more is no honest place."""


def is_place(making: records_pb2.Skip) -> bool:
    """False for what can be no batch's. User code can write into the memory where its runner notes what it makes, and
    what comes of that must not be a row that no journal takes."""
    return max(making.epoch, making.total, making.count) <= MOST


def still_count(losses: Sequence[SlotLoss], latest: SlotLoss, horizon: float) -> list[SlotLoss]:
    """The losses that count with the latest one: recent, or at the same batch, and with no progress since."""
    return [
        loss
        for loss in losses
        if loss.delivered == latest.delivered
        and (loss.at > horizon or (latest.making is not None and loss.making == latest.making))
    ]


def culprit(losses: Sequence[SlotLoss]) -> records_pb2.Skip | None:
    """The place of the batch that all of them were at."""
    making = losses[-1].making
    return making if making is not None and all(loss.making == making for loss in losses) else None


def leave_out(slot: Slot, place: records_pb2.Skip) -> None:
    """From now on one more batch is left out there."""
    key = (place.epoch, place.total)
    slot.skips[key] = place.count + 1
    slot.skipped[key] = slot.skipped.get(key, 0) + 1
    slot.losses = []


def name_of(box: Box, slot: Slot, place: records_pb2.Skip) -> str:
    """ "batch 17 of box 0 slot 1 (step 34)"."""
    position = Position.from_proto(box.delivered) if box.delivered.slots else box.start.copy()
    number, number_of_slot = place.total + 1, slot.key.slot
    step = ""
    if position.epoch == place.epoch and number_of_slot in position.live:
        for _ in range(_MOST_STEPS):
            if position.total[number_of_slot] >= number:
                step = f" (step {position.step})"
                break
            position.deliver()
    return f"batch {number} of {slot}{step}"


def verdict(box: Box, slot: Slot, place: records_pb2.Skip | None, window_s: float) -> WorkerLostError:
    """The error of a slot that is given up."""
    losses = slot.losses
    each = "; ".join(loss.note for loss in losses)
    if place is None:
        text = (
            f"{slot} of run {slot.key.run} was lost {len(losses)} times within {window_s:g} s without a batch "
            f"delivered in between (after batch {losses[-1].delivered} of the slot): {each}"
        )
    else:
        text = (
            f"{name_of(box, slot, place)} of run {slot.key.run} is quarantined, for it killed its runner "
            f'{len(losses)} times. Mend it, or have such batches left out: Appliance(poison="skip"). The deaths: {each}'
        )
    return WorkerLostError(text, remote_traceback=slot.stack)
