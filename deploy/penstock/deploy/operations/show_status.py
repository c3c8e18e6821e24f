"""`penstock status`: the coordinator's state (penstock.runtime.telemetry.cluster_view) as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.deploy.console.peer import Peer
from penstock.deploy.console.tables import Table, show
from penstock.runtime.telemetry.cluster_columns import BOXES, ENDS, RUNS, SLOTS, WORKERS, Columns, cells
from penstock.runtime.telemetry.cluster_view import LATELY_S, ClusterView, as_dict, view


def show_status(run: str | None, peer: Peer, *, show_all: bool, as_json: bool) -> None:
    with peer.client() as client:
        found = view(client.status(), peer.address)
    if run is not None:
        found, show_all = found.only(run), True
    if as_json:
        print(json.dumps(found, default=as_dict, indent=2))
    else:
        show(tables(found, show_all=show_all))


def tables(found: ClusterView, *, show_all: bool = False) -> list[Table]:
    """Return the cluster view as tables. Runs that have ended are one line, or rows with `show_all`."""
    about, runs = found.coordinator.about, found.runs if show_all else found.open_runs
    folded = f"{found.ended}: `penstock status --all` shows them." if found.ended and not show_all else ""
    empty = f"No run is open at {about}. {folded}" if folded else f"No runs at {about}."
    boxes = [box for run in runs for box in run.boxes]
    slots = [slot for box in boxes for slot in box.slots]
    of_runs = ("run", "attempt>", "state", "boxes>", "workers a box>", "loader")
    of_boxes = ("run", "box>", "state", "step>", "epoch>", "steps/s>", "waits>", "waits for")
    of_slots = ("run", "box>", "slot>", "phase", "worker", "generation>", "restarts>", "skipped>", "note")
    of_workers = ("worker", "state", "slots used>", "heard of>", "batches/s>", "lanes")
    ends = [end for end in found.ends if show_all or (end.fault and end.age_s < LATELY_S)]
    return [
        _table(f"Runs at {about}", RUNS, of_runs, runs, empty, folded),
        _table("Ended runs" if show_all else "Failed lately", ENDS, tuple(ENDS), ends),
        _table("Bottlenecks", RUNS, ("run", "bottleneck", "finding"), found.open_runs),
        _table("Boxes", BOXES, of_boxes, boxes),
        _table("Slots", SLOTS, of_slots, slots),
        _table("Workers", WORKERS, of_workers, found.workers, "No workers: start some with `penstock worker`."),
    ]


def _table(
    title: str, columns: Columns[Any], headings: Sequence[str], rows: Iterable[Any], empty: str = "", note: str = ""
) -> Table:
    return Table(title, headings, cells(columns, headings, rows), empty, note)
