"""Poison batches: pure functions that find the batch that kills its runner each time, record that it is skipped, and
make the error of a slot that fails.

A runner records the position of the batch that it is making; if it dies, its worker reports that. A batch is
quarantined when its slot was lost too often without progress, each time at this position. Then the slot fails with an
error that names it, or, by the run's policy, every later runner and replay omits it, and the next batch takes its
number.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.appliance.core.entities import Box, Slot, SlotLoss
from penstock.proto.errors import PoisonBatchError, WorkerLostError
from penstock.proto.state.position import MOST, Position
from penstock.proto.v1 import records_pb2

_MOST_STEPS = 100_000
"""Most steps that `name_of` counts on from a box's position; a batch further ahead is named without its step."""


def is_valid_position(making: records_pb2.Skip) -> bool:
    """Return whether this can be a position: user code can overwrite it, and the journal does not take all numbers."""
    return max(making.epoch, making.total, making.count) <= MOST


def relevant_losses(losses: Sequence[SlotLoss], latest: SlotLoss, horizon: float) -> list[SlotLoss]:
    """Return the losses that count with the latest: no batch since, and after `horizon` or at the same batch."""
    return [
        loss
        for loss in losses
        if loss.delivered == latest.delivered
        and (loss.at > horizon or (latest.making is not None and loss.making == latest.making))
    ]


def common_position(losses: Sequence[SlotLoss]) -> records_pb2.Skip | None:
    """Return the position of the batch at every loss; None if they differ or one is not known."""
    making = losses[-1].making
    return making if making is not None and all(loss.making == making for loss in losses) else None


def skip_batch(slot: Slot, position: records_pb2.Skip) -> None:
    """Record that the slot skips one more batch at this position, and forget its losses."""
    key = (position.epoch, position.total)
    slot.skips[key] = position.count + 1
    slot.skipped[key] = slot.skipped.get(key, 0) + 1
    slot.losses = []


def name_of(box: Box, slot: Slot, place: records_pb2.Skip) -> str:
    """Return a name for messages, such as "batch 17 of box 0 slot 1 (step 34)"."""
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


def loss_error(box: Box, slot: Slot, place: records_pb2.Skip | None, window_s: float) -> WorkerLostError:
    """Return the error of a slot that lost its runner too often. `place`: position of the poison batch, or None."""
    losses = slot.losses
    each = "; ".join(dict.fromkeys(loss.note for loss in losses))
    if place is None:
        text = (
            f"{slot} of run {slot.key.run} lost its runner {len(losses)} times within {window_s:g} s without a batch "
            f"delivered in between (after batch {losses[-1].delivered} of the slot). Remove the causes and start the "
            f"job again: {each}"
        )
        return WorkerLostError(text, remote_traceback=slot.stack)
    text = (
        f"{name_of(box, slot, place)} of run {slot.key.run} is quarantined, because it killed its runner "
        f'{len(losses)} times. Repair the data or code of that batch, or pass Appliance(poison="skip") to skip '
        f"such batches. Causes of death: {each}"
    )
    return PoisonBatchError(text, remote_traceback=slot.stack)
