"""Implementation of `penstock state convert`: converts a saved state to other numbers of boxes and workers, and reports
the consequences.

Loading a state in a job with other numbers converts it automatically, and yields the same stream. The command reports
beforehand whether the conversion is possible, what is kept, and what starts anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.appliance.model.limits import Limits
from penstock.deploy.console.tables import Table, show
from penstock.deploy.operations.state_values import brief
from penstock.proto.errors import InvalidArgumentError, StateMismatchError

if TYPE_CHECKING:
    from penstock.client.states.saved_state import SavedState

__all__ = ["convert", "show_convert"]


def show_convert(source: Path, target: Path, boxes: int, workers: int, as_json: bool) -> None:
    """Convert the states in a file and print a report on each."""
    done = convert(source, target, boxes, workers)
    if as_json:
        print(json.dumps({"written": str(target), "states": done}, indent=2))
        return
    show(_table(found) for found in done)
    print()
    print(f"Written to {target}.")


def convert(source: Path, target: Path, boxes: int, workers: int) -> list[dict[str, Any]]:
    """Convert all states in a file, or none; return a report on each state.

    Raises InvalidArgumentError for a number of boxes and workers that no run can have, StateMismatchError if a state
    cannot be converted to these numbers, and the errors of SavedFile.
    """
    from penstock.deploy.operations.saved_file import SavedFile

    for name, value in (("--boxes", boxes), ("--workers", workers)):
        if value < 1:
            raise InvalidArgumentError(f"{name} must be at least 1, got {value}. Pass the numbers of the resumed job")
    if boxes * workers > (most := Limits().slots_max):
        raise InvalidArgumentError(
            f"--boxes times --workers must be at most {most}, the workers of a run, got {boxes} x {workers} = "
            f"{boxes * workers}. Pass smaller numbers"
        )
    file = SavedFile(source)
    done, states = [], {}
    for found in file.states:
        after = _converted(found.saved, boxes, workers)
        if after is not found.saved:
            states[found.path] = after.to_dict()
        done.append({"where": found.name, **_report(found.saved, after)})
    file.write(target, states)
    return done


def _converted(saved: SavedState, boxes: int, workers: int) -> SavedState:
    if not saved.positions or (boxes, workers) == (saved.num_boxes, saved.num_workers_per_box):
        return saved
    rows = _global_batch(saved.aggregated)
    if rows is not None and boxes > rows:
        raise StateMismatchError(
            f"--boxes must be at most {rows}, the rows of a global batch of {saved.input_fn}, because each box needs a "
            f"row, got {boxes}. Pass fewer boxes"
        )
    try:
        return saved.new_topology(boxes, workers)
    except StateMismatchError as error:
        raise StateMismatchError(
            f"{error.message}. Without a state, the next epoch can start on any topology"
        ) from error


def _global_batch(state: Any) -> int | None:
    """Return the global batch size in rows if the saved number of boxes does not divide it, such as 10 rows on 4 boxes.
    The resumed job then has the same global batch size on any number of boxes. Return None otherwise, and for a state
    of a loader that is not of penstock.data."""
    from penstock.data.ordering.order_states import OrderProgress

    try:
        topology = OrderProgress.parsed(state).topology
    except (IndexError, KeyError, TypeError, ValueError):  # the state of a user's own loader
        return None
    return topology.batch if topology.batch % topology.boxes else None


def _report(before: SavedState, after: SavedState) -> dict[str, Any]:
    kept, anew = _meaning(before, after)
    return {
        "input_fn": before.input_fn,
        "state_methods": before.methods,
        "step": before.step,
        "epoch": max((position.epoch for position in after.positions), default=0),
        "from": _topology(before),
        "to": _topology(after),
        "converted": after is not before,
        "kept": kept,
        "anew": anew,
        "uneven": _uneven(before),
        "state": brief(before.aggregated) if before.methods == 4 else None,
    }


def _topology(saved: SavedState) -> dict[str, int] | None:
    """Return the numbers of boxes and workers of a saved state; None if the state was saved before its run began, and
    so fits any numbers."""
    if not saved.positions:
        return None
    return {"boxes": saved.num_boxes, "workers": saved.num_workers_per_box}


def _uneven(saved: SavedState) -> list[str]:
    """Return the names of the workers whose input had ended in the epoch while others still had batches."""
    return [
        f"box {box} slot {slot}"
        for box, position in enumerate(saved.positions)
        for slot in range(saved.num_workers_per_box)
        if slot not in position.live
    ]


def _meaning(before: SavedState, after: SavedState) -> tuple[list[str], list[str]]:
    """Return the consequences of a conversion as two lists of texts: what is kept exactly, and what starts anew."""
    if after is before:
        return ["everything"], []
    kept = [
        "the step",
        "the seed",
        "the loader's own state: its deaggregate_state_dict decides which samples come next",
    ]
    anew = ["the generators of each worker, from (seed, box, slot, step)", "the batches of each worker in this epoch"]
    if all(position.chain is not None for position in after.positions):
        kept.append("the stream digest of each box")
    else:
        anew.append("the stream digest, because the boxes differ")
    return kept, anew


def _table(found: dict[str, Any]) -> Table:
    rows: list[Sequence[str]] = [
        ("step", f"{found['step']} (epoch {found['epoch']})"),
        ("from", _text(found["from"])),
        ("to", _text(found["to"])),
        ("kept", "; ".join(found["kept"])),
        ("starts anew", "; ".join(found["anew"])),
        ("state", found["state"] or ""),
    ]
    if found["uneven"] and found["converted"]:
        rows.append(
            ("ended before others", ", ".join(found["uneven"]) + ": their loaders decide the rest of the epoch")
        )
    if not found["converted"]:
        rows.append(("", "copied unchanged"))
    return Table(f"{found['input_fn']} ({found['where']})", ("what", "state"), rows)


def _text(topology: dict[str, int] | None) -> str:
    return "any topology" if topology is None else f"{topology['boxes']} x {topology['workers']} workers"
