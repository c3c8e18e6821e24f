"""What the dashboard draws: words and figures of penstock.runtime.telemetry.cluster_view, laid out for its script.

The script knows no state, unit or threshold: it sets texts, and marks them by the names of states beside them. It
says by itself only what belongs to the browser: the time of day there, and the scales of its charts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.runtime.telemetry.cluster_columns import BOXES, STATES, WORKERS, Columns, cells
from penstock.runtime.telemetry.cluster_view import (
    INPUT_BOUND,
    BoxView,
    ClusterView,
    EventView,
    Finding,
    RunView,
    SlotView,
    StateView,
    WorkerView,
)
from penstock.runtime.telemetry.units import percent, rate, topology

__all__ = ["dashboard"]

MOST_BOXES = 100
"""Of a run, that are drawn: those that wait most."""
MOST_STATES = 6
SIGNS = {"ready": "", "starting": "\u2026", "waiting": "\u2013", "failed": "\u2715"}
MARKS = {"": "\u2713", "info": "\u2026", "warn": "\u25b2", "bad": "\u25b2"}
"""Before the title of a finding."""

Cell = str | Mapping[str, Any]
"""A text; or `text` with `state` (live, idle or lost), `share` (0 to 1, drawn as a bar; `hot`: it is too long), or `at`
(seconds since the epoch) for a text."""


def dashboard(found: ClusterView) -> dict[str, Any]:
    """All that the page shows."""
    return {
        "about": found.coordinator.about,
        "input_bound": INPUT_BOUND,
        "tiles": [{"what": what, "count": count, "of": of, "alarm": alarm} for what, count, of, alarm in found.totals],
        "runs": [_run(run) for run in found.open_runs],
        "workers": _table(WORKERS, tuple(WORKERS), found.workers, [_worker(worker) for worker in found.workers]),
        "events": [_event(event) for event in reversed(found.events)],
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
            "title": f"{MARKS[run.finding.alarm]} {run.finding.title}",
            "text": run.finding.text,
        },
        "point": [run.steps_per_s, max(going, default=0.0), run.batches_per_s],
        "map": [
            {"name": f"box {box.box}", "slots": [_slot(slot, box, run.finding) for slot in box.slots]} for box in boxes
        ],
        "more": f"The {len(boxes)} of {len(run.boxes)} boxes that wait most." if len(boxes) < len(run.boxes) else "",
        "boxes": _table(BOXES, headings, boxes, [_box(box) for box in boxes]),
        "states": _table(STATES, tuple(STATES), states, [_state(state) for state in states]),
    }


def _slot(slot: SlotView, box: BoxView, found: Finding) -> dict[str, str]:
    kind = slot.state
    if kind == "ready":
        blamed = found.input_bound and (found.box, found.slot) == (slot.box, slot.slot)
        hot = slot.wait_share > INPUT_BOUND and slot.wait_share > 0.5 * box.wait_share
        kind = "hot" if blamed or hot else "ahead" if slot.queued else "dry"
    sign = SIGNS[slot.state] or f"{MARKS['warn'] if kind == 'hot' else ''}{slot.queued}"
    said = [
        slot.state,
        f"worker {slot.worker}" if slot.worker else "no worker",
        f"{slot.queued} batches ready",
        f"{rate(slot.batches_per_s)} batches/s",
        f"its box waits {percent(slot.wait_share)} of the time for it",
        f"durable snapshot {slot.saved}" if slot.saved else "no durable snapshot since the coordinator started",
        f"{slot.restarts} recoveries" if slot.restarts else "",
        f"{slot.skipped} batches left out" if slot.skipped else "",
        slot.remark,
    ]
    text = f"Box {slot.box} slot {slot.slot}: {', '.join(filter(None, said))}"
    return {"slot": f"{slot.box}.{slot.slot}", "state": kind, "sign": sign, "text": text}


def _box(box: BoxView) -> dict[str, dict[str, Any]]:
    return {
        "state": {"state": "live" if box.going else "idle" if box.live else "lost"},
        "waits>": _waits(box.wait_share),
    }


def _worker(worker: WorkerView) -> dict[str, dict[str, Any]]:
    return {
        "state": {"state": "idle" if worker.state == "draining" else worker.state},
        "slots used>": {"share": worker.slots_used / max(1, worker.slots)},
        "waited for>": _waits(worker.wait_share),
    }


def _state(state: StateView) -> dict[str, dict[str, Any]]:
    return {"result": {"state": "lost" if state.error else "live"}, "at": {"at": state.at}}


def _waits(share: float) -> dict[str, Any]:
    return {"share": min(1.0, share), "hot": share > INPUT_BOUND}


def _event(event: EventView) -> dict[str, Any]:
    return {"at": event.at, "fault": event.fault, "title": event.title, "what": event.what}


def _table(
    columns: Columns[Any], headings: Sequence[str], rows: Sequence[Any], marks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """`marks`: of each row, by heading, what a cell has besides its text. Heads of rows and bars stand at the left."""
    left = {headings[0], *(heading for mark in marks for heading in mark)}
    drawn: list[list[Cell]] = [
        [
            {"text": text, **mark[heading]} if heading in mark else text
            for heading, text in zip(headings, row, strict=True)
        ]
        for row, mark in zip(cells(columns, headings, rows), marks, strict=True)
    ]
    return {"headings": [h.rstrip(">") if h in left else h for h in headings], "rows": drawn}
