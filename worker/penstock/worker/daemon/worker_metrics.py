"""Metrics of a worker daemon, for Prometheus. The event loop copies the daemon's figures, as only it may read them; the
thread that answers reads /proc, which takes longer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from penstock.proto.rpc.addresses import is_local
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.web.http_server import WebServer
from penstock.runtime.web.prometheus import Collector, MetricReadings, cpu_seconds, in_loop, metrics_route
from penstock.worker.daemon.daemon import Daemon
from penstock.worker.processes.process_use import family, held_by

MANY = 1 << 62
"""Lets `held_by` add up memory, which is fast; the kernel divides shared memory among processes slowly."""


async def _look(daemon: Daemon) -> tuple[MetricReadings, list[tuple[int, dict[str, str | int]]]]:
    """Read on the daemon's event loop: async, so that it runs nowhere else."""
    readings, now = MetricReadings("worker"), time.monotonic()
    listeners, answered_at = daemon.listeners, daemon.answered_at
    readings.add("penstock_worker_info", 1, worker=daemon.host.name)
    readings.add("penstock_worker_uptime_seconds", now - daemon.started_at)
    readings.add("penstock_worker_certificate_expires_timestamp_seconds", listeners.certificate_expires_at)
    readings.add("penstock_worker_capacity", daemon.settings.slots)
    phases = Counter(pb.SlotPhase.Name(slot.record.phase).lower() for slot in daemon.slots)
    for phase in ("starting", "ready", "failed"):
        readings.add("penstock_worker_slots", phases[phase], phase=phase)
    readings.add("penstock_worker_heartbeat_age_seconds", -1 if answered_at is None else now - answered_at)
    readings.add("penstock_worker_lease_seconds", daemon.lease_s)
    readings.add("penstock_worker_sent_bytes_total", listeners.sent_bytes, lane="tcp")
    readings.add("penstock_worker_lanes", listeners.remote, lane="tcp")
    for name, count in vars(daemon.host.counters).items():
        readings.add(f"penstock_worker_{name}_total", count)
    for status in ("ok", "error", "dropped"):
        readings.add("penstock_worker_state_answers_total", daemon.state_answers[status], status=status)
    runners = []
    for slot in daemon.slots:
        a, page = slot.record.assignment, slot.record.progress_page
        labels: dict[str, str | int] = {"run": a.run, "box": a.box, "slot": a.slot}
        page.refresh()
        produced, delivered, replayed = page.counts()
        readings.add("penstock_slot_produced_batches_total", produced, **labels)
        readings.add("penstock_slot_delivered_batches_total", delivered, **labels)
        readings.add("penstock_slot_replayed_batches_total", replayed, **labels)
        readings.add("penstock_slot_queue_batches", max(0, page.total - page.delivered), **labels)
        readings.add("penstock_slot_busy_seconds_total", page.working_s, **labels)
        if slot.runner:
            runners.append((slot.runner, labels))
    return readings, runners


def _readings(daemon: Daemon, loop: asyncio.AbstractEventLoop) -> MetricReadings:
    readings, runners = in_loop(loop, _look(daemon))
    for pid, labels in runners:
        readings.add("penstock_runner_cpu_seconds_total", cpu_seconds(family(pid)), **labels)
        readings.add("penstock_runner_memory_bytes", held_by(pid, MANY), **labels)
    return readings


def open_web(daemon: Daemon, loop: asyncio.AbstractEventLoop) -> WebServer:
    """Start the web server at `settings.http`. Raises InvalidArgumentError without prometheus-client, and WebServer's
    errors."""
    settings = daemon.settings
    routes = {"/metrics": metrics_route(Collector(lambda: _readings(daemon, loop)))}
    # No TLS on loopback, because clients there do not have the cluster's CA. No TLS without a certificate either.
    tls = None if is_local(settings.http) or settings.tls is None or not settings.tls.cert else settings.tls
    return WebServer(settings.http, routes, tokens=settings.http_tokens, tls=tls, insecure=settings.insecure)
