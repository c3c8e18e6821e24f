"""HTTP pages of a worker daemon: /metrics for Prometheus, /healthz for orchestrators.

Only the event loop may read the daemon's state. So a thread that answers a request for /metrics lets the event loop
copy the needed figures. The thread itself reads /proc, which takes longer. Nothing is kept between requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.proto.errors import PenstockError
from penstock.proto.rpc.addresses import is_local
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.web.http_server import Page, WebServer
from penstock.runtime.web.prometheus import Collector, MetricReadings, cpu_seconds, in_loop, metrics_route
from penstock.worker.daemon.listeners import LaneListeners
from penstock.worker.daemon.worker_settings import DaemonSettings
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.resources.memory_use import family, held_by
from penstock.worker.slots.slot_interfaces import DaemonCounters

__all__ = ["health", "open_web"]

MANY = 1 << 62
"""Argument for `held_by`, in bytes, larger than the memory of any runner. It makes `held_by` add up the memory of a
runner's processes, which is fast, and not divide shared memory among them, which the kernel computes slowly."""
_PLAIN = "text/plain; charset=utf-8"


class MeasuredSlot(Protocol):
    """Attributes of a slot that metrics read."""

    assignment: records_pb2.WorkerAssignment
    phase: pb.SlotPhase.ValueType
    progress_page: ProgressPage

    @property
    def runner(self) -> int:
        """Process id of the slot's runner, 0 if it has none."""


class MeasuredDaemon(Protocol):
    """Attributes of a daemon that metrics read. `name`, `settings` and `started_at` may be read in any thread, the
    others only on the daemon's event loop."""

    name: str
    settings: DaemonSettings
    started_at: float
    counters: DaemonCounters
    state_answers: Counter[str]
    answered_at: float | None
    stopping: asyncio.Event

    @property
    def slots(self) -> Sequence[MeasuredSlot]: ...
    @property
    def listeners(self) -> LaneListeners: ...
    @property
    def lease_s(self) -> float: ...


@dataclass(frozen=True)
class _SlotNow:
    labels: dict[str, str | int]
    produced: int
    delivered: int
    replayed: int
    queue: int
    busy_s: float
    runner: int


@dataclass(frozen=True)
class _Now:
    slots: list[_SlotNow]
    phases: Counter[str]
    answers: Counter[str]
    counters: DaemonCounters
    sent_bytes: int
    lanes: int
    answered_at: float | None
    lease_s: float
    certificate_expires_at: float


def _look(daemon: MeasuredDaemon) -> _Now:
    """Copy the figures of a daemon for the pages. Must run on the daemon's event loop."""
    slots, phases = [], Counter[str]()
    for slot in daemon.slots:
        slot.progress_page.refresh()
        produced, delivered, replayed = slot.progress_page.counts()
        a = slot.assignment
        slots.append(
            _SlotNow(
                {"run": a.run, "box": a.box, "slot": a.slot},
                produced,
                delivered,
                replayed,
                max(0, slot.progress_page.total - slot.progress_page.delivered),
                slot.progress_page.working_s,
                slot.runner,
            )
        )
        phases[pb.SlotPhase.Name(slot.phase).lower()] += 1
    return _Now(
        slots,
        phases,
        Counter(daemon.state_answers),
        daemon.counters,
        daemon.listeners.sent_bytes,
        daemon.listeners.remote,
        daemon.answered_at,
        daemon.lease_s,
        daemon.listeners.certificate_expires_at,
    )


def _readings(daemon: MeasuredDaemon, loop: asyncio.AbstractEventLoop) -> MetricReadings:
    at = in_loop(loop, lambda: _look(daemon))
    now, found = time.monotonic(), MetricReadings("worker")
    found.add("penstock_worker_info", 1, worker=daemon.name)
    found.add("penstock_worker_uptime_seconds", now - daemon.started_at)
    found.add("penstock_worker_certificate_expires_timestamp_seconds", at.certificate_expires_at)
    found.add("penstock_worker_capacity", daemon.settings.slots)
    for phase in ("starting", "ready", "failed"):
        found.add("penstock_worker_slots", at.phases[phase], phase=phase)
    found.add("penstock_worker_heartbeat_age_seconds", -1 if at.answered_at is None else now - at.answered_at)
    found.add("penstock_worker_lease_seconds", at.lease_s)
    found.add("penstock_worker_sent_bytes_total", at.sent_bytes, lane="tcp")
    found.add("penstock_worker_lanes", at.lanes, lane="tcp")
    found.add("penstock_worker_snapshots_total", at.counters.snapshots)
    found.add("penstock_worker_snapshots_sent_total", at.counters.snapshots_sent)
    found.add("penstock_worker_snapshots_refused_total", at.counters.snapshots_refused)
    found.add("penstock_worker_snapshot_sent_bytes_total", at.counters.snapshot_sent_bytes)
    found.add("penstock_worker_recoveries_total", at.counters.recoveries)
    found.add("penstock_worker_losses_total", at.counters.losses)
    for status in ("ok", "error", "dropped"):
        found.add("penstock_worker_state_answers_total", at.answers[status], status=status)
    for slot in at.slots:
        found.add("penstock_slot_produced_batches_total", slot.produced, **slot.labels)
        found.add("penstock_slot_delivered_batches_total", slot.delivered, **slot.labels)
        found.add("penstock_slot_replayed_batches_total", slot.replayed, **slot.labels)
        found.add("penstock_slot_queue_batches", slot.queue, **slot.labels)
        found.add("penstock_slot_busy_seconds_total", slot.busy_s, **slot.labels)
        if slot.runner:
            found.add("penstock_runner_cpu_seconds_total", cpu_seconds(family(slot.runner)), **slot.labels)
            found.add("penstock_runner_memory_bytes", held_by(slot.runner, MANY), **slot.labels)
    return found


def health(answered_at: float | None, lease_s: float, stopping: bool, now: float) -> tuple[int, str]:
    """Return the HTTP status of /healthz and its reason. A worker is healthy if its coordinator has answered within the
    lease, and if it is not stopping.

    answered_at, now: monotonic time in seconds; answered_at is None before the first answer.
    """
    if stopping:
        return 503, "the worker is stopping"
    if answered_at is None:
        return 503, "the coordinator has not answered yet"
    if now - answered_at > lease_s:
        return 503, f"the coordinator has not answered for {now - answered_at:.1f} s; it must within {lease_s:g} s"
    return 200, "ok"


def open_web(daemon: MeasuredDaemon, loop: asyncio.AbstractEventLoop) -> WebServer:
    """Start the web server of a daemon that runs in `loop`, listening at `settings.http`.

    Raises InvalidArgumentError if prometheus-client is missing, and any error that `WebServer` raises.
    """

    def well() -> Page:
        try:
            found = in_loop(loop, lambda: (daemon.answered_at, daemon.lease_s, daemon.stopping.is_set()))
        except PenstockError as error:
            return Page(_PLAIN, f"{error.message}\n".encode(), 503)
        status, why = health(*found, time.monotonic())
        return Page(_PLAIN, f"{why}\n".encode(), status)

    settings = daemon.settings
    routes = {"/metrics": metrics_route(Collector(lambda: _readings(daemon, loop))), "/healthz": well}
    # No TLS on loopback, because clients there do not have the cluster's CA. No TLS without a certificate either.
    tls = None if is_local(settings.http) or settings.tls is None or not settings.tls.cert else settings.tls
    return WebServer(settings.http, routes, tokens=settings.http_tokens, tls=tls, insecure=settings.insecure)
