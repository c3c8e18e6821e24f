"""Output of `penstock replay`: the batch as tables or JSON."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from penstock.deploy.console.peer import Peer
from penstock.deploy.console.tables import Table, show
from penstock.deploy.operations.state_values import brief
from penstock.deploy.replay.replay_batch import ReplayRequest, replay


def show_replay(request: ReplayRequest, peer: Peer, as_json: bool) -> None:
    with peer.client() if request.run is not None else contextlib.nullcontext() as client:
        found = replay(request, client)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    show(tables(found))
    print()
    print(found["verification"][0].upper() + found["verification"][1:] + ".")
    if found["out"]:
        print(f"Written to {found['out']}.")


def tables(found: dict[str, Any]) -> list[Table]:
    of_run = "" if found["run"] is None else f" of run {found['run']}, attempt {found['attempt']}"
    about = Table(
        f"Step {found['step']} of box {found['box']}{of_run}",
        ("what", "found"),
        [
            ("loader", found["input_fn"]),
            ("worker", f"slot {found['slot']} of {found['num_workers_per_box']}, its batch {found['worker_step']}"),
            ("epoch", str(found["epoch"])),
            ("digest", found["digest"]),
            ("replayed from", found["replayed_from"]["what"]),
        ],
    )
    if found["samples"]:
        numbers = ", ".join(f"{first} to {end - 1}" for first, end in found["samples"])
        about.rows.append(("samples", numbers))
    leaves = Table("Batch", ("leaf", "kind", "dtype", "shape", "min>", "max>", "mean>", "NaN>", "first values"))
    for leaf in found["leaves"]:
        shape = "" if leaf["shape"] is None else "[" + ", ".join(map(str, leaf["shape"])) + "]"
        figures = (_number(leaf.get(name)) for name in ("min", "max", "mean"))
        nan = str(leaf["nan"]) if "nan" in leaf else ""
        leaves.rows.append(
            (
                leaf["name"] or "batch",
                leaf["kind"],
                leaf["dtype"] or "",
                shape,
                *figures,
                nan,
                " ".join(map(_value, leaf["first"])),
            )
        )
    return [about, *_counts(found), leaves]


def _counts(found: dict[str, Any]) -> list[Table]:
    if found["counts"] is None:
        return []
    table = Table("Samples of the batch", ("source or key", "samples>", "tokens>", "truncated>", "skipped before>"))
    for what in ("sources", "keys"):
        for name, counts in found["counts"][what].items():
            numbers = (str(counts[field]) for field in ("samples", "tokens", "truncated", "skipped"))
            table.rows.append((f"{what[:-1]} {name or '-'}", *numbers))
    return [table]


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return str(value["value"])
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(item: Any) -> str:
    number = isinstance(item, int | float) or (isinstance(item, dict) and item.get("$") == "float")
    return _number(item) if number else brief(item)
