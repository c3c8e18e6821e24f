"""Implementation of `penstock state FILE`: shows the saved states in a file, with their counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.deploy.console.tables import Table, show
from penstock.deploy.training_data.count_tables import count_tables, counts_as_dict
from penstock.proto.state.counts import rows_of
from penstock.runtime.telemetry.units import topology

if TYPE_CHECKING:
    from penstock.deploy.operations.saved_file import FoundState

__all__ = ["show_state_file"]


def show_state_file(path: Path, as_json: bool) -> None:
    """Print the saved states in a file, as tables or JSON. Raises the errors of SavedFile."""
    from penstock.deploy.operations.saved_file import SavedFile

    file = SavedFile(path)
    if as_json:
        print(json.dumps({"file": str(path), "states": [_as_dict(found) for found in file.states]}, indent=2))
        return
    show(table for found in file.states for table in _tables(found))


def _as_dict(found: FoundState) -> dict[str, Any]:
    saved = found.saved
    rows = rows_of(saved.aggregated)
    return {
        "where": found.name,
        "input_fn": saved.input_fn,
        "step": saved.step,
        "num_boxes": saved.num_boxes,
        "num_workers_per_box": saved.num_workers_per_box,
        "seed": saved.seed,
        "counts": None if rows is None else counts_as_dict(rows),
    }


def _tables(found: FoundState) -> list[Table]:
    saved = found.saved
    size = topology(saved.num_boxes, saved.num_workers_per_box) if saved.num_boxes else "any"
    rows = rows_of(saved.aggregated)
    about = Table(
        f"State at step {saved.step}: {found.name}",
        ("what", "found"),
        [("input_fn", saved.input_fn), ("topology", size), ("seed", "" if saved.seed is None else str(saved.seed))],
        note="" if rows is not None else "It has no counts: its loader was made without counts= (docs/counts.md).",
    )
    return [about, *([] if rows is None else count_tables(rows))]
