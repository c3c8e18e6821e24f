"""Columns of the tables about a cluster in all displays. A ">" at the end of a heading marks a column of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from penstock.runtime.telemetry.cluster_view import (
    BoxView,
    EndView,
    EventView,
    RunView,
    SlotView,
    StateView,
    WorkerView,
)
from penstock.runtime.telemetry.units import clock, percent, rate, seconds, size

_View = TypeVar("_View")
Columns = Mapping[str, Callable[[_View], str]]
"""Heading of a column -> function that returns the text of a row's cell."""

RUNS: Columns[RunView] = {
    "run": lambda run: run.run,
    "attempt>": lambda run: str(run.attempt),
    "state": lambda run: run.state,
    "boxes>": lambda run: str(run.num_boxes),
    "workers a box>": lambda run: str(run.num_workers_per_box),
    "loader": lambda run: run.input_fn or "",
    "bottleneck": lambda run: run.finding.title,
    "finding": lambda run: run.finding.text,
}
ENDS: Columns[EndView] = {
    "when>": lambda end: end.when,
    "run": lambda end: end.run,
    "reason": lambda end: end.reason,
    "step>": lambda end: str(end.step),
    "why": lambda end: " ".join(end.said.split()),
}
BOXES: Columns[BoxView] = {
    "run": lambda box: box.run,
    "box>": lambda box: str(box.box),
    "box": lambda box: f"{box.run} {box.box}",
    "state": lambda box: box.state,
    "step>": lambda box: str(box.step),
    "epoch>": lambda box: str(box.epoch),
    "steps/s>": lambda box: rate(box.steps_per_s),
    "waits>": lambda box: percent(box.wait_share),
    "waits for": lambda box: box.waiting_for or "",
}
SLOTS: Columns[SlotView] = {
    "run": lambda slot: slot.run,
    "box>": lambda slot: str(slot.box),
    "slot>": lambda slot: str(slot.slot),
    "slot": lambda slot: f"{slot.run} {slot.box}.{slot.slot}",
    "waited for>": lambda slot: percent(slot.wait_share),
    "queued>": lambda slot: str(slot.queued),
    "batches/s>": lambda slot: rate(slot.batches_per_s),
    "phase": lambda slot: slot.state,
    "worker": lambda slot: slot.worker or "",
    "generation>": lambda slot: str(slot.generation),
    "restarts>": lambda slot: str(slot.restarts),
    "skipped>": lambda slot: str(slot.skipped),
    "saved>": lambda slot: slot.saved,
    "note": lambda slot: slot.remark,
}
WORKERS: Columns[WorkerView] = {
    "worker": lambda worker: worker.worker,
    "state": lambda worker: worker.state,
    "slots used>": lambda worker: f"{worker.slots_used}/{worker.slots}",
    "batches/s>": lambda worker: rate(worker.batches_per_s),
    "waited for>": lambda worker: percent(worker.wait_share),
    "heard of>": lambda worker: worker.heard_of,
    "lanes": lambda worker: worker.tcp_address or "",
}
EVENTS: Columns[EventView] = {
    "when>": lambda event: event.when,
    "event": lambda event: event.title,
    "what": lambda event: event.what,
}
STATES: Columns[StateView] = {
    "step>": lambda state: str(state.step),
    "asked by": lambda state: f"{state.askers} ranks" if state.askers > 1 else state.asker,
    "at": lambda state: clock(state.at),
    "took>": lambda state: seconds(state.seconds),
    "size>": lambda state: size(state.bytes),
    "result": lambda state: state.error or "done",
}


def cells(columns: Columns[_View], headings: Iterable[str], rows: Iterable[_View]) -> list[Sequence[str]]:
    of = [columns[heading] for heading in headings]
    return [tuple(cell(row) for cell in of) for row in rows]
