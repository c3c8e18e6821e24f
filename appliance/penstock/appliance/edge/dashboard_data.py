"""Data of the dashboard: texts and figures of penstock.runtime.telemetry.cluster_view, arranged for the page's script.

The script knows no states, units or thresholds: it shows the given texts, each in the colour of the state that comes
with the text. The script computes only the time of day and the scales of its charts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.runtime.telemetry.cluster_columns import BOXES, STATES, WORKERS, Columns, cells
from penstock.runtime.telemetry.cluster_view import (
    BoxView,
    ClusterView,
    Finding,
    RunView,
    SlotView,
)
from penstock.runtime.telemetry.units import INPUT_BOUND, percent, rate, topology

__all__ = ["dashboard"]

MOST_BOXES = 100
"""Largest number of boxes shown per run: the boxes with the longest waits."""
MOST_STATES = 6
"""Largest number of answered state queries shown per run: the latest ones."""
STATE_CHARACTERS = {"ready": "", "starting": "\u2026", "waiting": "\u2013", "failed": "\u2715"}
ALARM_CHARACTERS = {"": "\u2713", "info": "\u2026", "warn": "\u25b2", "bad": "\u25b2"}
"""Alarm level -> the character before the title of a finding of this level."""
STATE_COLOURS = {"live": "live", "done": "live", "epoch ended": "idle", "draining": "idle"}
"""State -> the colour in which the page draws the state. All other states are drawn as lost."""
BARS = ("slots used>", "waits>", "waited for>")
"""Headings of the columns that the page draws as bars. A final ">" in a heading marks a column of numbers."""

Cell = str | Mapping[str, Any]
"""Cell of a table of the page: a text, or a dict of one of three kinds. `text` with `state` (live, idle or lost);
`text` with `share` (0 to 1, drawn as a bar) and `hot` (true if the share is above INPUT_BOUND); `text` with `at` (a
time, in seconds since the Unix epoch)."""


def dashboard(found: ClusterView) -> dict[str, Any]:
    """Return all data of the dashboard page, as a dict to be sent as JSON."""
    return {
        "about": found.coordinator.about,
        "input_bound": INPUT_BOUND,
        "tiles": found.totals,
        "runs": [_run(run) for run in found.open_runs],
        "ended": f"{found.ended}." if found.ended else "",
        "workers": _table(WORKERS, tuple(WORKERS), found.workers),
        "events": [
            {"at": event.at, "fault": event.fault, "title": event.title, "what": event.what}
            for event in reversed(found.events)
        ],
    }


def _run(run: RunView) -> dict[str, Any]:
    waiting = sorted(run.boxes, key=lambda box: -box.wait_share)[:MOST_BOXES]
    boxes = sorted(waiting, key=lambda box: box.box)
    states = run.states[-MOST_STATES:][::-1]
    headings = ("box>", "state", "step>", "epoch>", "steps/s>", "waits>", "waits for")
    size = topology(run.num_boxes, run.num_workers_per_box)
    going = [box.waited_share for box in run.boxes if box.going]
    return {
        "run": run.run,
        "about": " \u00b7 ".join((run.input_fn or "?", size, f"attempt {run.attempt}", *run.figures)),
        "finding": {
            "alarm": run.finding.alarm,
            "title": f"{ALARM_CHARACTERS[run.finding.alarm]} {run.finding.title}",
            "text": run.finding.text,
        },
        "point": [run.steps_per_s, max(going, default=0.0), run.batches_per_s],
        "map": [
            {"name": f"box {box.box}", "slots": [_slot(slot, box, run.finding) for slot in box.slots]} for box in boxes
        ],
        "more": f"The {len(boxes)} of {len(run.boxes)} boxes that wait most." if len(boxes) < len(run.boxes) else "",
        "boxes": _table(BOXES, headings, boxes),
        "states": _table(STATES, tuple(STATES), states),
    }


def _slot(slot: SlotView, box: BoxView, found: Finding) -> dict[str, str]:
    kind = slot.state
    if kind == "ready":
        blamed = found.input_bound and (found.box, found.slot) == (slot.box, slot.slot)
        hot = slot.wait_share > INPUT_BOUND and slot.wait_share > 0.5 * box.wait_share
        kind = "hot" if blamed or hot else "ahead" if slot.queued else "dry"
    sign = STATE_CHARACTERS[slot.state] or f"{ALARM_CHARACTERS['warn'] if kind == 'hot' else ''}{slot.queued}"
    said = [
        slot.state,
        f"worker {slot.worker}" if slot.worker else "no worker",
        f"{slot.queued} batches ready",
        f"{rate(slot.batches_per_s)} batches/s",
        f"the box waits {percent(slot.wait_share)} of its time for this slot",
        f"durable snapshot {slot.saved}" if slot.saved else "no durable snapshot since the coordinator started",
        f"{slot.restarts} recoveries" if slot.restarts else "",
        f"{slot.skipped} batches skipped" if slot.skipped else "",
        slot.remark,
    ]
    text = f"Box {slot.box} slot {slot.slot}: {', '.join(filter(None, said))}"
    return {"slot": f"{slot.box}.{slot.slot}", "state": kind, "sign": sign, "text": text}


def _table(columns: Columns[Any], headings: Sequence[str], rows: Sequence[Any]) -> dict[str, Any]:
    shown = [
        [_cell(heading, text, row) for heading, text in zip(headings, texts, strict=True)]
        for row, texts in zip(rows, cells(columns, headings, rows), strict=True)
    ]
    left = {headings[0], *BARS}  # headings of rows, and bars, are left-aligned
    return {"headings": [one.rstrip(">") if one in left else one for one in headings], "rows": shown}


def _cell(heading: str, text: str, row: Any) -> Cell:
    if heading in ("state", "result"):
        return {"text": text, "state": STATE_COLOURS.get(text, "lost")}
    if heading == "at":
        return {"text": text, "at": row.at}
    if heading == "slots used>":
        return {"text": text, "share": row.slots_used / max(1, row.slots)}
    if heading in BARS:
        return {"text": text, "share": min(1.0, row.wait_share), "hot": row.wait_share > INPUT_BOUND}
    return text
