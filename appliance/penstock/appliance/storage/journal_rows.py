"""Rows of the journal, made from the entities by pure functions. recovery.py makes the entities from the rows again."""

from __future__ import annotations

from collections.abc import Callable

from penstock.appliance.model.entities import Attempt, AttemptState, Box, Run, Slot

Row = dict[str, object]


def run_row(run: Run) -> Row:
    row: Row = {"run": run.name, "seed": str(run.seed), "num_boxes": run.num_boxes, "num_workers": run.num_workers}
    return row | {"attempt": run.attempt, "generation": run.generation}


def attempt_row(attempt: Attempt) -> Row:
    row: Row = {"run": attempt.run, "attempt": attempt.number, "key": attempt.key, "opened_by": attempt.opened_by}
    return row | {"state": attempt.state.value, "why": attempt.why}


def box_row(attempt: Attempt, box: Box) -> Row:
    still = attempt.state is AttemptState.OPEN
    opening = box.opening.SerializeToString() if still else None
    return _box(attempt, box) | {"client_id": box.client, "place": box.presence.value, "opening": opening}


def slot_row(slot: Slot) -> Row:
    row: Row = dict(slot.key._asdict())
    row |= {"generation": slot.generation, "phase": int(slot.phase), "worker": slot.worker, "session": slot.session}
    row |= {"ever_ready": slot.ever_ready, "recovery": slot.recovery, "restarts": slot.restarts, "note": slot.note}
    row["capabilities"] = None if slot.capabilities is None else slot.capabilities.SerializeToString()
    row["error"] = None if slot.error is None else slot.error.SerializeToString()
    return row


def skip_row(slot: Slot, epoch: int, total: int) -> Row:
    row: Row = dict(slot.key._asdict()) | {"epoch": epoch, "total": total}
    return row | {"count": slot.skips[epoch, total], "own": slot.skipped[epoch, total]}


def abandoned_row(attempt: Attempt, box: Box, epoch: int) -> Row:
    return _box(attempt, box) | {"epoch": epoch, "step": box.abandoned[epoch]}


def history_row(attempt: Attempt, box: Box, history: Callable[[], bytes]) -> Row:
    """Return the row of a box's history. `history`: returns the history as bytes; it is called when the row is
    written."""
    return _box(attempt, box) | {"over": attempt.state is not AttemptState.OPEN, "history": history}


def _box(attempt: Attempt, box: Box) -> Row:
    return {"run": attempt.run, "attempt": attempt.number, "box": box.number}
