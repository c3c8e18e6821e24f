"""`penstock status`: what the coordinator knows now, as tables or as one JSON object (see
penstock.runtime.telemetry.cluster_status)."""

from __future__ import annotations

import json
from typing import Any

from penstock.deploy.console.coordinator_options import Peer
from penstock.deploy.console.tables import Table, seconds, show
from penstock.runtime.telemetry.cluster_status import as_dict

__all__ = ["show_status", "tables"]


def show_status(peer: Peer, as_json: bool) -> None:
    """Ask the coordinator and print."""
    with peer.client() as client:
        reply = client.status()
    found = as_dict(reply, peer.address)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(tables(found))


def tables(found: dict[str, Any]) -> list[Table]:
    """The same for people."""
    coordinator = found["coordinator"]
    about = f"{coordinator['address']} (Penstock {coordinator['version']}, up {seconds(coordinator['uptime_s'])})"
    runs = Table(
        f"Runs at {about}",
        ("run", "attempt>", "state", "boxes>", "workers a box>", "input_fn"),
        empty=f"No runs at {about}.",
    )
    findings = Table("Bottlenecks", ("run", "kind", "finding"))
    boxes = Table("Boxes", ("run", "box>", "state", "step>", "epoch>", "steps/s>", "waited>", "waits for"))
    slots = Table("Slots", ("run", "box>", "slot>", "phase", "worker", "generation>", "restarts>", "skipped>", "note"))
    workers = Table(
        "Workers",
        ("worker", "state", "slots used>", "seen ago>", "batches/s>", "lanes"),
        empty="No workers: start some with `penstock worker`.",
    )
    for run in found["runs"]:
        runs.rows.append(
            (
                run["run"],
                str(run["attempt"]),
                "open" if run["open"] else "closed",
                str(run["num_boxes"]),
                str(run["num_workers_per_box"]),
                run["input_fn"] or "",
            )
        )
        if run["bottleneck"] is not None:
            findings.rows.append((run["run"], run["bottleneck"]["kind"], run["bottleneck"]["text"]))
        for box in run["boxes"]:
            boxes.rows.append(_box_row(run["run"], box))
            slots.rows.extend(_slot_row(run["run"], box["box"], slot) for slot in box["slots"])
    for worker in found["workers"]:
        workers.rows.append(
            (
                worker["worker"],
                "draining" if worker["draining"] else "live" if worker["live"] else "lost",
                f"{worker['slots_used']}/{worker['slots']}",
                seconds(worker["seen_s_ago"]),
                f"{worker['batches_per_s']:.1f}",
                worker["tcp_address"] or "",
            )
        )
    return [runs, findings, boxes, slots, workers]


def _box_row(run: str, box: dict[str, Any]) -> tuple[str, ...]:
    state = "lost" if not box["live"] else "epoch ended" if box["epoch_ended"] else "live"
    return (
        run,
        str(box["box"]),
        state,
        str(box["step"]),
        str(box["epoch"]),
        f"{box['steps_per_s']:.1f}",
        f"{100 * box['waited_share']:.0f}%",
        box["waiting_for"] or "",
    )


def _slot_row(run: str, box: int, slot: dict[str, Any]) -> tuple[str, ...]:
    note = f"{slot['error']['name']}: {slot['error']['message']}" if slot["error"] else slot["note"] or ""
    note = slot["doing"] or note
    return (
        run,
        str(box),
        str(slot["slot"]),
        slot["phase"],
        slot["worker"] or "",
        str(slot["generation"]),
        str(slot["restarts"]),
        str(slot["skipped"]),
        " ".join(note.split()),
    )
