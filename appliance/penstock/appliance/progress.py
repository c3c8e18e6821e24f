"""What a box's report says of its way: how far it is, how fast, and what its loop waited for.

Two kinds of rates. Those of the last report or so are for people who look; those of late, in which older reports count
less and less, are for decisions: a loop that waits once is no reason to move anything.
"""

from __future__ import annotations

import math

from penstock.appliance.books import Books
from penstock.appliance.model import Attempt, Box
from penstock.proto.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb

SPAN_S = 0.5
"""Reports that lie closer together are taken as one."""


def advance(books: Books, attempt: Attempt, box: Box, request: pb.WatchRunRequest, now: float) -> None:
    """The box was handed all up to `request.delivered`, which is not before what is known."""
    position = Position.from_proto(request.delivered)
    steps, box.delivered = position.step - box.step, request.delivered
    _note_ends(books, attempt, box, position)
    _measure(books, box, request, steps, now)
    # The positions of the window, thinned out: its lower edge may be late by a share of it, never early.
    history, edge = box.history, box.step - box.retention
    if box.step - history[-1].step >= max(1, box.retention // books.limits.history_entries):
        history.append(position)
    while len(history) > 1 and history[1].step <= edge:
        history.popleft()
        box.ends = {end: total for end, total in box.ends.items() if end[1] >= history[0].epoch}
    if history[0].step <= edge:
        for slot in box.slots:
            books.ledger.trim(slot.key, history[0].total[slot.key.slot])


def _note_ends(books: Books, attempt: Attempt, box: Box, position: Position) -> None:
    for number in set(range(attempt.num_workers)) - set(position.live):
        box.ends[number, position.epoch] = position.total[number]
    if len(box.ends) > books.limits.ends_max:
        epochs = sorted({epoch for _, epoch in box.ends})
        newer = epochs[len(epochs) // 2]
        box.ends = {end: total for end, total in box.ends.items() if end[1] > newer}
    if position.epoch > box.base.epoch:  # where this pass began, the one before had ended or was left
        begun = zip(position.total, position.delivered, strict=True)
        box.ends |= {(k, position.epoch - 1): total - delivered for k, (total, delivered) in enumerate(begun)}


def _measure(books: Books, box: Box, request: pb.WatchRunRequest, steps: int, now: float) -> None:
    waits = tuple(request.slot_waited_s)
    if box.rate_from == 0.0:
        box.rate_from, box.rate_waited_s, box.rate_slot_waited_s = now, box.waited_s, waits
        return
    box.rate_steps += steps
    span_s = now - box.rate_from
    if span_s < SPAN_S:
        return
    box.steps_per_s = box.rate_steps / span_s
    box.waited_share = _share(box.waited_s - box.rate_waited_s, span_s)
    newest = 1 - math.exp(-span_s / max(SPAN_S, books.limits.balance_after_s))
    box.usual_steps_per_s += newest * (box.steps_per_s - box.usual_steps_per_s)
    box.usual_waited_share += newest * (box.waited_share - box.usual_waited_share)
    if len(waits) == len(box.rate_slot_waited_s) == len(box.slots):
        for slot, waited_s, before_s in zip(box.slots, waits, box.rate_slot_waited_s, strict=True):
            slot.waited_share += newest * (_share(waited_s - before_s, span_s) - slot.waited_share)
    box.rate_from, box.rate_steps, box.rate_waited_s, box.rate_slot_waited_s = now, 0, box.waited_s, waits


def _share(waited_s: float, span_s: float) -> float:
    return min(1.0, max(0.0, waited_s / span_s))  # each executor counts from 0 again
