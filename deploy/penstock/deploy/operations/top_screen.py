"""What `penstock top` shows, as lines that fit a terminal: pure, from the values of
penstock.runtime.telemetry.cluster_status.

A fleet has more slots than a terminal has lines. So each table is sorted by how much there is to see, slots by how long
boxes wait for them, and is cut where the room ends; the sentence that names the bottleneck is never cut away.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.deploy.console.tables import seconds
from penstock.runtime.telemetry.logs import printable

__all__ = ["Line", "plain", "screen"]

LEAST_ROWS = 3
"""Of each table, before any gets more."""
Line = tuple[str, str]
"""A style of rich's, and the text."""


@dataclass
class Section:
    """A table. A heading that ends with ">" stands over numbers. Each row has the style that it is drawn in."""

    headings: Sequence[str]
    rows: list[tuple[str, Sequence[str]]]

    def lines(self, count: int, width: int) -> list[Line]:
        """The first `count` rows below the head."""
        shown = self.rows[:count]
        cells = [[printable(cell) or "-" for cell in row] for _, row in shown]
        heads = [heading.rstrip(">") for heading in self.headings]
        widths = [max(len(row[column]) for row in [heads, *cells]) for column in range(len(heads))]
        left = "" if count >= len(self.rows) else f"  ({len(self.rows) - count} more)"

        def aligned(row: Sequence[str]) -> str:
            pairs = zip(self.headings, row, widths, strict=True)
            return "  ".join(
                cell.rjust(wide) if heading.endswith(">") else cell.ljust(wide) for heading, cell, wide in pairs
            )

        lines = [("bold", f"{aligned(heads)}{left}"[:width])]
        return lines + [(style, aligned(row)[:width].rstrip()) for (style, _), row in zip(shown, cells, strict=True)]


def screen(found: dict[str, Any], width: int, height: int, away: str = "") -> list[Line]:
    """At most `height` lines of at most `width` characters. `away`: why what is shown is old; "" = it is not."""
    coordinator = found["coordinator"]
    about = f"Penstock {coordinator['version']}  {coordinator['address']}  up {seconds(coordinator['uptime_s'])}"
    if coordinator["dashboard"]:
        about += f"  dashboard {coordinator['dashboard']}"
    lines: list[Line] = [("bold reverse", about[:width].ljust(width))]
    if away:
        lines.append(("bold red", printable(away)[:width]))
    runs = [run for run in found["runs"] if run["open"]]
    for run in runs[: max(1, (height - len(lines)) // 4)]:
        lines += _run_lines(run, width)
    if not runs:
        lines.append(("", "No run is open."))
    sections = [section for section in _sections(runs, found) if section.rows]
    counts = fit([len(section.rows) for section in sections], height - len(lines))
    for section, count in zip(sections, counts, strict=True):
        if count:
            lines += [("", ""), *section.lines(count, width)]
    return lines[:height]


def fit(rows: Sequence[int], height: int) -> list[int]:
    """How many rows of each table to show in so many lines; the first ones matter most. Each that is shown takes two
    lines more: its head, and a blank."""
    counts = [0] * len(rows)
    for index, count in enumerate(rows):
        least = min(count, LEAST_ROWS)
        if height >= least + 2:
            counts[index] = least
            height -= least + 2
    for index, count in enumerate(rows):
        if counts[index]:
            more = min(count - counts[index], height)
            counts[index] += more
            height -= more
    return counts


def _run_lines(run: dict[str, Any], width: int) -> list[Line]:
    step = min((box["step"] for box in run["boxes"]), default=0)
    figures = (
        f"{run['run']}  step {step}  {run['steps_per_s']:.1f} steps/s  waits {_percent(run['wait_share'])}  "
        f"makes {run['batches_per_s']:.1f} batches/s  queued {_queued(run):.1f}  recoveries {run['recoveries']}"
    )
    bottleneck = run["bottleneck"]
    style, text = "dim", "No box of it is live."
    if bottleneck is not None:
        style = "yellow" if bottleneck["input_bound"] else "cyan" if bottleneck["kind"] == "starting" else "green"
        text = bottleneck["text"]
    return [("bold", printable(figures)[:width]), *((style, part) for part in _wrapped(printable(text), width))]


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(20, width - 2), initial_indent="  ", subsequent_indent="  ", max_lines=3)


def _sections(runs: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[Section]:
    boxes = [(run, box) for run in runs for box in run["boxes"]]
    slots = [(run, box, slot) for run, box in boxes for slot in box["slots"]]
    slots.sort(key=lambda one: (-_trouble(one[2]), -one[2]["wait_share"]))
    boxes.sort(key=lambda one: -one[1]["wait_share"])
    events = [event for event in reversed(found["events"]) if event["fault"]]
    events += [event for event in reversed(found["events"]) if not event["fault"]]
    workers = sorted(found["workers"], key=lambda worker: -worker["wait_share"])
    return [
        Section(
            ("slot", "waited for>", "queued>", "batches/s>", "worker", "phase", "restarts>", "saved>", "note"),
            [_slot_row(*one) for one in slots],
        ),
        Section(("when>", "event", "what"), [_event_row(event) for event in events]),
        Section(
            ("box", "state", "step>", "epoch>", "steps/s>", "waits>", "waits for"), [_box_row(*one) for one in boxes]
        ),
        Section(
            ("worker", "state", "slots>", "batches/s>", "waited for>", "heard of>"),
            [_worker_row(worker) for worker in workers],
        ),
    ]


def _trouble(slot: dict[str, Any]) -> int:
    return {"FAILED": 2, "WAITING": 1, "STARTING": 1}.get(slot["phase"], 0)


def _slot_row(run: dict[str, Any], box: dict[str, Any], slot: dict[str, Any]) -> tuple[str, Sequence[str]]:
    error = slot["error"]
    note = f"{error['name']}: {error['message']}" if error else slot["doing"] or slot["note"] or ""
    style = "red" if error else "yellow" if slot["wait_share"] > 0.05 or _trouble(slot) else ""
    return style, (
        f"{run['run']} {box['box']}.{slot['slot']}",
        _percent(slot["wait_share"]),
        str(slot["queued"]),
        f"{slot['batches_per_s']:.1f}",
        slot["worker"] or "",
        slot["phase"].lower(),
        str(slot["restarts"]),
        "" if slot["snapshot_age_s"] is None else seconds(slot["snapshot_age_s"]),
        note,
    )


def _box_row(run: dict[str, Any], box: dict[str, Any]) -> tuple[str, Sequence[str]]:
    state = "lost" if not box["live"] else "epoch ended" if box["epoch_ended"] else "live"
    style = "red" if state == "lost" else "yellow" if box["wait_share"] > 0.05 else ""
    return style, (
        f"{run['run']} {box['box']}",
        state,
        str(box["step"]),
        str(box["epoch"]),
        f"{box['steps_per_s']:.1f}",
        _percent(box["wait_share"]),
        box["waiting_for"] or "",
    )


def _worker_row(worker: dict[str, Any]) -> tuple[str, Sequence[str]]:
    state = "draining" if worker["draining"] else "live" if worker["live"] else "lost"
    return "" if state == "live" else "yellow", (
        worker["worker"],
        state,
        f"{worker['slots_used']}/{worker['slots']}",
        f"{worker['batches_per_s']:.1f}",
        _percent(worker["wait_share"]),
        f"{seconds(worker['seen_s_ago'])} ago",
    )


def _event_row(event: dict[str, Any]) -> tuple[str, Sequence[str]]:
    kind = f"{event['kind']} x{event['count']}" if event["count"] > 1 else event["kind"]
    text = f"{event['run']}: {event['text']}" if event["run"] else event["text"]
    return "red" if event["fault"] else "dim", (f"{seconds(event['age_s'])} ago", kind, text)


def _queued(run: dict[str, Any]) -> float:
    """Batches that lie ready at a slot, on average."""
    slots = [slot for box in run["boxes"] for slot in box["slots"]]
    return float(sum(slot["queued"] for slot in slots)) / max(1, len(slots))


def plain(found: dict[str, Any], since: float) -> Iterable[str]:
    """Lines for a file or a pipe: one a run, and one for each event since `since` (seconds since the epoch)."""
    for event in found["events"]:
        if event["at"] > since:
            _, (_, kind, text) = _event_row(event)
            yield printable(f"{_clock(event['at'])} {'fault' if event['fault'] else 'event'}: {kind}: {text}")
    now = _clock(time.time())
    for run in found["runs"]:
        if run["open"]:
            (_, figures), *finding = _run_lines(run, 1000)
            yield f"{now} {figures}  {''.join(text for _, text in finding).strip()}"
    if not any(run["open"] for run in found["runs"]):
        live = sum(worker["live"] for worker in found["workers"])
        yield f"{now} no run is open, {live} workers are there"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
