"""Why a run has ended: one reason for each attempt, decided once, at the first of these moments: a box closes with an
error, the last live box closes, a newer attempt or an operator ends the attempt, or no box has reported for too long.

The error of a box says most, whoever ended the attempt afterwards; that of a failed slot stands for a box that could
not tell it. Next comes a training process that was lost. Pure: entities are read, never changed.
"""

from __future__ import annotations

from enum import Enum, auto

from penstock.appliance.core.entities import Attempt, Box, BoxPresence
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

FINISHED, CLOSED, RAISED, QUARANTINED = "finished", "closed", "raised", "quarantined"
STALLED, NO_WORKERS, SUPERSEDED, CLIENT_LOST = "stalled", "no workers", "superseded", "client lost"
REASONS = (FINISHED, CLOSED, RAISED, QUARANTINED, STALLED, NO_WORKERS, SUPERSEDED, CLIENT_LOST)
FAULTS = frozenset((RAISED, QUARANTINED, STALLED, NO_WORKERS, CLIENT_LOST))
"""Reasons that nobody asked for."""
_TEXT = 1000
"""Most characters of an error's message that are kept: every status has the ends of all runs."""
_BY_ERROR = {"PoisonBatchError": QUARANTINED, "DeadlineError": STALLED, "NoWorkersError": NO_WORKERS}
"""Name of an error that a training loop got -> reason; every other error is one that was raised."""


class EndedBy(Enum):
    BOXES = auto()
    NEWER_ATTEMPT = auto()
    OPERATOR = auto()
    SILENCE = auto()
    """Of all boxes, for too long."""


def decide(attempt: Attempt, by: EndedBy, why: str, wall_s: float) -> pb.RunEnd:
    """Return how the attempt ends. `why`: what happened, for people; `wall_s`: seconds since the Unix epoch."""
    boxes = [box for _, box in sorted(attempt.boxes.items())]
    failed = next(((box, error) for box in boxes if (error := _error(box)) is not None), None)
    if failed is not None:
        box, error = failed
        end = pb.RunEnd(reason=_BY_ERROR.get(error.name, RAISED), error=error.name, step=box.step, box=box.number)
        end.text = error.message[:_TEXT]
    else:
        step = min((box.step for box in boxes), default=0)
        end = pb.RunEnd(reason=_without_error(boxes, by), text=why, step=step)
    end.attempt, end.fault, end.wall_s = attempt.number, end.reason in FAULTS, wall_s
    return end


def _without_error(boxes: list[Box], by: EndedBy) -> str:
    if by is EndedBy.OPERATOR:
        return CLOSED
    if any(box.presence is BoxPresence.GONE for box in boxes):
        return CLIENT_LOST
    if by is EndedBy.BOXES and all(box.finished is not False for box in boxes):
        return FINISHED
    return SUPERSEDED if by is EndedBy.NEWER_ATTEMPT else CLOSED


def _error(box: Box) -> records_pb2.ErrorDetail | None:
    if box.error is not None or box.finished is not None:  # a box that has closed has said what it got
        return box.error
    return next((slot.error for slot in box.slots if slot.error is not None), None)
