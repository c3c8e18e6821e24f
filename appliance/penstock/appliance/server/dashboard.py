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
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, TypeVar

from penstock.appliance.core.entities import Attempt, Box, BoxPresence
from penstock.appliance.server import metrics
from penstock.appliance.server.service import Service
from penstock.proto.errors import PortTakenError
from penstock.proto.rpc.addresses import is_local
from penstock.proto.rpc.tls import Renewing, Tls
from penstock.runtime.telemetry.cluster_columns import BOXES, STATES, WORKERS, Columns, cells
from penstock.runtime.telemetry.cluster_view import BoxView, ClusterView, Finding, RunView, SlotView, as_dict, view
from penstock.runtime.telemetry.counters import CallCounters
from penstock.runtime.telemetry.units import INPUT_BOUND, percent, rate, topology
from penstock.runtime.web.http_server import Page, Route, WebServer
from penstock.runtime.web.prometheus import MetricReadings, in_loop

log = logging.getLogger("penstock.appliance")

FRESH_S = 0.5
"""Largest age of a page that is sent again, in seconds."""
LOOP_S = 10.0
"""Longest wait of a route for the event loop in seconds; on an overloaded machine an error is then shown."""
SAMPLE_S = 1.0
"""Seconds between two samples of the runs' speed."""
JSON = "application/json"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
}
_Result = TypeVar("_Result")


class DashboardPages:
    """Routes of the dashboard and its data. `address`: the coordinator's, "" until it listens."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, address: Callable[[], str]) -> None:
        self._service, self._loop, self._address = service, loop, address
        self._series = RunSeries()
        self.routes: dict[str, Route] = {
            **{path: _file(name, content_type) for path, (name, content_type) in FILES.items()},
            "/api/status.json": SharedPage(lambda: self._status_page(as_dict)),
            "/api/dashboard.json": SharedPage(lambda: self._status_page(self._dashboard)),
            "/api/history.json": SharedPage(self._history),
        }

    def on_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the event loop, from another thread. Raises TimeoutError if it is too busy or over."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            try:
                return future.result(LOOP_S)
            finally:
                future.cancel()
        except (RuntimeError, CancelledError) as error:
            work.close()
            raise TimeoutError("the coordinator's event loop has ended: start the coordinator again") from error

    async def sample(self) -> None:
        """Record the speed of the runs once a second, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            for _ in self._series.sample(self._service.attempts(), time.time()):
                await asyncio.sleep(0)

    def _status_page(self, show: Callable[[ClusterView], dict[str, Any]]) -> Page:
        found = view(self.on_loop(self._service.snapshot()), self._address())
        return Page(JSON, json.dumps(show(found) | {"at": time.time()}, default=as_dict).encode())

    def _dashboard(self, found: ClusterView) -> dict[str, Any]:
        return {**dashboard(found), "shares": self._series.newest_shares()}

    def _history(self) -> Page:
        return Page(JSON, json.dumps(in_loop(self._loop, self._series.as_dict)).encode())


class SharedPage:
    """Route that makes its page once for all requests within FRESH_S seconds."""

    def __init__(self, make: Callable[[], Page]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._made_at = 0.0

    def __call__(self) -> Page:
        with self._lock:  # a waiting request gets the page that is being made
            if self._page is None or time.monotonic() - self._made_at > FRESH_S:
                try:
                    self._page = self._make()
                except TimeoutError:
                    text = b"503 the coordinator is overloaded or is ending: reload the page\n"
                    return Page("text/plain; charset=utf-8", text, 503)
                self._made_at = time.monotonic()
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

    def readings() -> MetricReadings:
        counters = in_loop(loop, lambda: service.counters(calls))
        return metrics.readings(pages.on_loop(service.snapshot()), counters, tls_files())

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
    closing.callback(loop.create_task(pages.sample()).cancel)
    return web.url


# ---- data of the page

MOST_BOXES = 100
"""Most boxes shown per run: those with the longest waits."""
MOST_STATES = 6
"""Answered state queries shown per run: the latest ones."""
STATE_CHARACTERS = {"ready": "", "starting": "\u2026", "waiting": "\u2013", "failed": "\u2715"}
ALARM_CHARACTERS = {"": "\u2713", "info": "\u2026", "warn": "\u25b2", "bad": "\u25b2"}
"""Alarm level -> the character before a finding's title."""
STATE_COLOURS = {"live": "live", "done": "live", "epoch ended": "idle", "draining": "idle"}
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


# ---- series of the last ten minutes, and of the last day

SECONDS = 600
"""Points of a run, one a second: the last ten minutes."""
MINUTES = 24 * 60
"""Points of a run, one a minute: the last day."""
RUNS = 64
"""Runs whose series are kept: the latest ones."""
BOXES_AT_ONCE = 64
"""Boxes read before a sample pauses, so that other tasks run."""

Point = tuple[float, float, float, float]
"""Unix seconds; mean steps/s of the boxes; largest share of waiting of a box, 0 to 1; batches/s of all slots."""
COLUMNS = ("at", "steps_per_s", "waited_share", "batches_per_s")


SHARE_S = 30.0
"""Seconds over which the share of a source is measured."""
SOURCES = 6
"""Sources of a run shown one by one: those with the most samples when counting began."""
REST = "others"


@dataclass
class ShareSeries:
    """Delivered and wanted shares of data sources over time, of tokens if any weight counts them, else samples."""

    names: list[str] = field(default_factory=list)
    """Sources in the newest point, with REST last if there are more than SOURCES; older points may have fewer."""
    of_tokens: bool = False
    imbalance: float = 0.0
    """Cost of the most expensive box's batch, divided by the mean over all boxes; 0 = not measured."""
    seconds: deque[tuple[float, array[float]]] = field(default_factory=lambda: deque(maxlen=SECONDS))
    """Seconds since the Unix epoch; each name's delivered share; each name's wanted share."""
    minutes: deque[tuple[float, array[float]]] = field(default_factory=lambda: deque(maxlen=MINUTES))
    """The last point of each minute of the last day."""
    _counted: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)

    def add(self, at: float, boxes: Iterable[Box]) -> None:
        """Add a point from the boxes' counts, unless no sample was delivered in the last SHARE_S seconds."""
        counts: dict[str, int] = {}
        wanted: dict[str, float] = {}
        self.imbalance = 0.0
        boxes = list(boxes)
        if not self.of_tokens and any(count.wanted_of_tokens for box in boxes for count in box.sources.values()):
            self.of_tokens = True
            self._counted.clear()  # they are numbers of samples
        for box in boxes:
            self.imbalance = max(self.imbalance, box.imbalance)
            for name, count in box.sources.items():
                counts[name] = counts.get(name, 0) + (count.tokens if self.of_tokens else count.samples)
                wanted[name] = max(wanted.get(name, 0.0), count.wanted)
        if not counts:
            return
        while self._counted and self._counted[0][0] < at - SHARE_S:
            self._counted.popleft()
        before = self._counted[0][1] if self._counted else {}
        if any(counts.get(name, 0) < count for name, count in before.items()):  # resumed from an earlier state
            self._counted.clear()
            before = {}
        self._counted.append((at, counts))
        fresh = {name: count - before.get(name, 0) for name, count in counts.items()}
        total = sum(fresh.values())
        if total:
            self._name(counts)
            self._put(at, {name: count / total for name, count in fresh.items()}, wanted)

    def _name(self, counts: dict[str, int]) -> None:
        for name in sorted(counts, key=lambda name: (-counts[name], name)):
            if name not in self.names and REST not in self.names:
                self.names.append(name if len(self.names) < SOURCES else REST)

    def _put(self, at: float, shares: dict[str, float], wanted: dict[str, float]) -> None:
        point = array("f")
        for of in (shares, wanted):
            own = [of.get(name, 0.0) for name in self.names if name != REST]
            rest = [max(0.0, sum(of.values()) - sum(own))] if REST in self.names else []
            point.extend((*own, *rest))
        if self.seconds and int(at // 60) != int(self.seconds[-1][0] // 60):
            self.minutes.append(self.seconds[-1])
        self.seconds.append((at, point))

    def caption(self) -> dict[str, Any]:
        return {"unit": "tokens" if self.of_tokens else "samples", "imbalance": round(self.imbalance, 3)}

    def as_dict(self) -> dict[str, Any]:
        """Return the series; a point is [time, delivered shares ..., wanted shares ...]."""
        return {
            "names": self.names,
            **self.caption(),
            "seconds": [_shares(point) for point in self.seconds],
            "minutes": [_shares(point) for point in self.minutes],
        }


def _shares(point: tuple[float, array[float]]) -> list[float]:
    return [round(point[0], 1), *(round(share, 4) for share in point[1])]


@dataclass
class OneRunSeries:
    seconds: deque[Point] = field(default_factory=lambda: deque(maxlen=SECONDS))
    minutes: deque[Point] = field(default_factory=lambda: deque(maxlen=MINUTES))
    shares: ShareSeries = field(default_factory=ShareSeries)
    _minute: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        self.seconds.append(point)
        if self._minute and int(point[0] // 60) != int(self._minute[0][0] // 60):
            count, first = len(self._minute), self._minute[0][0]
            means = [sum(column) / count for column in zip(*(one[1:] for one in self._minute), strict=True)]
            self.minutes.append((first // 60 * 60, means[0], means[1], means[2]))
            self._minute = []
        self._minute.append(point)


class RunSeries:
    """Time series of the latest RUNS runs: speed, waits, and shares of data sources."""

    def __init__(self) -> None:
        self._tracks: OrderedDict[str, OneRunSeries] = OrderedDict()

    def add(self, run: str, point: Point) -> None:
        track = self._tracks.setdefault(run, OneRunSeries())
        self._tracks.move_to_end(run)
        track.add(point)
        while len(self._tracks) > RUNS:
            self._tracks.popitem(last=False)

    def sample(self, attempts: Iterable[Attempt], wall_s: float) -> Iterator[None]:
        """Add a point to each series, in steps of BOXES_AT_ONCE boxes, between which other tasks run."""
        looked = 0
        for attempt in attempts:
            steps_per_s = waited = batches_per_s = 0.0
            going = [box for box in attempt.boxes.values() if box.presence is BoxPresence.LIVE and not box.epoch_ended]
            for box in going:
                steps_per_s += box.steps_per_s / len(going)
                waited = max(waited, box.waited_share)
                batches_per_s += _made(box)
                looked += 1
                if looked % BOXES_AT_ONCE == 0:
                    yield
            self.add(attempt.run, (wall_s, steps_per_s, waited, batches_per_s))
            self._tracks[attempt.run].shares.add(wall_s, attempt.boxes.values())

    def newest_shares(self) -> dict[str, dict[str, Any]]:
        """Return the newest shares by run: `names` of sources, `unit` (tokens or samples), `point`. For any thread."""
        found = {}
        for run, track in list(self._tracks.items()):
            shares, points = track.shares, list(track.shares.seconds)[-1:]
            if points:
                found[run] = {"names": list(shares.names), **shares.caption(), "point": _shares(points[0])}
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the series: rows with the columns COLUMNS, oldest first."""
        return {
            "columns": COLUMNS,
            "runs": {
                run: {
                    "seconds": _rows(track.seconds),
                    "minutes": _rows(track.minutes),
                    **({"shares": track.shares.as_dict()} if track.shares.names else {}),
                }
                for run, track in self._tracks.items()
            },
        }


def _made(box: Box) -> float:
    return sum(slot.batches_per_s for slot in box.slots)


def _rows(points: Iterable[Point]) -> list[list[float]]:
    return [[round(at, 1), round(steps, 3), round(waited, 4), round(made, 3)] for at, steps, waited, made in points]
