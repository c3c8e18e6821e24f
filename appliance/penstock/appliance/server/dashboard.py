"""Web pages of a coordinator: the dashboard, its data, and the metrics.

Routes run on threads of the web server and ask the event loop, which owns the cluster state, for a status. Requests at
the same time share one, and a page younger than FRESH_S is sent again: the cost does not grow with the viewers. The
dashboard is three static files in ../dashboard: no build step, no framework. Its script knows no states, units or
thresholds: it shows the given texts, each in the colour of its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.resources import files
from typing import Any

from penstock.appliance.core.entities import Box
from penstock.appliance.server import metrics
from penstock.appliance.server.service import CoordinatorCounters, Service
from penstock.proto.errors import DeadlineError, PortTakenError
from penstock.proto.rpc.addresses import is_local
from penstock.proto.rpc.tls import Renewing, Tls
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_columns import BOXES, ENDS, STATES, WORKERS, Columns, cells
from penstock.runtime.telemetry.cluster_view import BoxView, ClusterView, Finding, RunView, SlotView, as_dict, view
from penstock.runtime.telemetry.counters import CallCounters
from penstock.runtime.telemetry.units import INPUT_BOUND, percent, rate, topology
from penstock.runtime.web.http_server import Page, Route, WebServer
from penstock.runtime.web.prometheus import MetricReadings, in_loop

log = logging.getLogger("penstock.appliance")

FRESH_S = 0.5
"""Largest age of a page that is sent again, in seconds."""
JSON = "application/json"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
}


class DashboardPages:
    """Routes of the dashboard and its data. `address`: the coordinator's, "" until it listens."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, address: Callable[[], str]) -> None:
        self._service, self._loop, self._address = service, loop, address
        self.routes: dict[str, Route] = {
            **{path: _file(name, content_type) for path, (name, content_type) in FILES.items()},
            "/api/status.json": SharedPage(self._status),
            "/api/dashboard.json": SharedPage(self._dashboard),
        }

    def _status(self) -> dict[str, Any]:
        return as_dict(self._view(in_loop(self._loop, self._service.snapshot())))

    def _dashboard(self) -> dict[str, Any]:
        async def look() -> tuple[pb.StatusReply, dict[str, list[Box]]]:
            reply = await self._service.snapshot()
            return reply, {attempt.run: list(attempt.boxes.values()) for attempt in self._service.attempts()}

        reply, boxes = in_loop(self._loop, look())
        sources = {run: source_counts(of_run) for run, of_run in boxes.items()}
        return dashboard(self._view(reply)) | {"sources": sources}

    def _view(self, reply: pb.StatusReply) -> ClusterView:
        return view(reply, self._address())


class SharedPage:
    """Route that makes its page, an object of JSON, once for all requests within FRESH_S seconds."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._made_at = 0.0

    def __call__(self) -> Page:
        with self._lock:  # a waiting request gets the page that is being made
            if self._page is None or time.monotonic() - self._made_at > FRESH_S:
                try:
                    found = self._make() | {"at": time.time()}
                except DeadlineError:
                    text = b"503 the coordinator is overloaded or is ending: reload the page\n"
                    return Page("text/plain; charset=utf-8", text, 503)
                self._page, self._made_at = Page(JSON, json.dumps(found, default=as_dict).encode()), time.monotonic()
            return self._page


def _file(name: str, content_type: str) -> Route:
    page = Page(content_type, files("penstock.appliance").joinpath("dashboard", name).read_bytes())
    return lambda: page


def serve_dashboard(
    service: Service,
    listen: str,
    tokens: str,
    *,
    any_port: bool,
    tls: Tls | None,
    insecure: bool,
    calls: CallCounters,
    address: Callable[[], str],
    tls_files: Callable[[], Renewing | None],
    closing: contextlib.ExitStack,
) -> str:
    """Start the dashboard and return its URL. Raises the errors of WebServer. `any_port`: use a free port if that of
    `listen` is taken; `address`: "" until the coordinator listens; `closing`: its end closes the dashboard."""
    loop = asyncio.get_running_loop()
    pages = DashboardPages(service, loop, address)

    async def look() -> tuple[pb.StatusReply, CoordinatorCounters]:
        return await service.snapshot(), service.counters(calls)

    def readings() -> MetricReadings:
        return metrics.readings(*in_loop(loop, look()), tls_files())

    pages.routes["/metrics"] = metrics.route(readings)
    # On loopback only root of this machine could impersonate the server, and a browser does not have the cluster's CA.
    tls = None if is_local(listen) else tls
    try:
        web = WebServer(listen, pages.routes, tokens=tokens, tls=tls, insecure=insecure)
    except PortTakenError:
        if not any_port:
            raise
        free = f"{listen.rpartition(':')[0]}:0"
        web = WebServer(free, pages.routes, tokens=tokens, tls=tls, insecure=insecure)
        log.info("the dashboard's address %s is in use, so the dashboard takes a free port", listen)
    log.info("the coordinator serves its dashboard at %s", web.url)
    closing.callback(web.close)
    return web.url


# ---- data of the page

MOST_BOXES = 100
"""Most boxes shown per run: those with the longest waits."""
MOST_ENDS = 8
"""Ended runs shown: the latest ones."""
MOST_STATES = 6
"""Answered state queries shown per run: the latest ones."""
STATE_CHARACTERS = {"ready": "", "starting": "\u2026", "waiting": "\u2013", "failed": "\u2715"}
ALARM_CHARACTERS = {"": "\u2713", "info": "\u2026", "warn": "\u25b2", "bad": "\u25b2"}
"""Alarm level -> the character before a finding's title."""
STATE_COLOURS = {"live": "live", "done": "live", "epoch ended": "idle", "closed": "idle", "draining": "idle"}
"""State -> its colour; all others are drawn as lost."""
BARS = ("slots used>", "waits>", "waited for>")
"""Columns drawn as bars. A final ">" marks a column of numbers."""

Cell = str | Mapping[str, Any]
"""Cell of a table: a text, or `text` with `state` (live, idle, lost), with `share` (0 to 1, a bar) and `hot` (above
INPUT_BOUND), or with `at` (seconds since the Unix epoch)."""


def dashboard(found: ClusterView) -> dict[str, Any]:
    """Return all data of the dashboard page, to be sent as JSON."""
    return {
        "about": found.coordinator.about,
        "input_bound": INPUT_BOUND,
        "tiles": found.totals,
        "runs": [_run(run) for run in found.open_runs],
        "ended": f"{found.ended}." if found.ended else "",
        "ends": _table(ENDS, tuple(ENDS), found.ends[:MOST_ENDS]),
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
        "point": [run.steps_per_s, max(going, default=0.0)],
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
    if heading == "reason":
        return {"text": text, "state": "lost" if row.fault else "idle"}
    if heading == "at":
        return {"text": text, "at": row.at}
    if heading == "slots used>":
        return {"text": text, "share": row.slots_used / max(1, row.slots)}
    if heading in BARS:
        return {"text": text, "share": min(1.0, row.wait_share), "hot": row.wait_share > INPUT_BOUND}
    return text


# ---- counts of data sources

MOST_SOURCES = 6
"""Sources of a run shown one by one: those with the largest wanted shares, then with the most samples."""
REST = "others"


def source_counts(boxes: Collection[Box]) -> dict[str, Any] | None:
    """Return what the page needs to draw the shares of a run's data sources, or None if nothing was counted.

    `names` of sources, REST last; their `counts` so far, of tokens if any weight counts them, else of samples (`unit`);
    their `wanted` shares; `imbalance`: cost of the most expensive box's batch / mean of all boxes, 0 = not measured."""
    of_tokens = any(count.wanted_of_tokens for box in boxes for count in box.sources.values())
    counts: Counter[str] = Counter()
    wanted: dict[str, float] = {}
    for box in boxes:
        for name, count in box.sources.items():
            counts[name] += count.tokens if of_tokens else count.samples
            wanted[name] = max(wanted.get(name, 0.0), count.wanted)
    if not counts:
        return None
    names = sorted(counts, key=lambda name: (-wanted[name], -counts[name], name))
    shown, others = names[:MOST_SOURCES], names[MOST_SOURCES:]
    rest = [REST] if others else []
    return {
        "names": shown + rest,
        "counts": [counts[name] for name in shown] + [sum(counts[name] for name in others) for _ in rest],
        "wanted": [wanted[name] for name in shown] + [sum(wanted[name] for name in others) for _ in rest],
        "unit": "tokens" if of_tokens else "samples",
        "imbalance": max(box.imbalance for box in boxes),
    }
