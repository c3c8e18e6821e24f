"""Prometheus metrics of the coordinator, from a status reply and its own counters.

No slot or worker has a time series here (each worker exports its own), so their number grows only with the boxes of
open runs. Without prometheus-client the coordinator starts nevertheless, and /metrics shows an error to the scraper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.appliance.server.service import CoordinatorCounters
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.tls import Renewing
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_view import PHASES, RunView, view
from penstock.runtime.web.http_server import Page, Route
from penstock.runtime.web.prometheus import Collector, MetricReadings, metrics_route


def readings(status: pb.StatusReply, counters: CoordinatorCounters, files: Renewing | None = None) -> MetricReadings:
    """Return all metrics of the coordinator. `files`: its TLS files, whose expiry is exported."""
    found, shown = MetricReadings("coordinator"), view(status)
    open_runs = len(shown.open_runs)
    found.add("penstock_runs", open_runs, phase="open")
    found.add("penstock_runs", len(shown.runs) - open_runs, phase="closed")
    for reason, count in counters.run_ends.items():
        found.add("penstock_runs_ended_total", count, reason=reason)
    for run in shown.open_runs:
        _read_run(found, run, counters)
    for phase in ("live", "draining", "lost"):
        found.add("penstock_workers", shown.workers_by_state[phase], phase=phase)
    found.add("penstock_workers_lost_total", counters.workers_lost)
    found.add("penstock_workers_recommended", shown.recommended_workers)
    found.add("penstock_slots_capacity", sum(w.slots for w in shown.workers if w.state == "live"))
    found.add("penstock_slots_used", sum(w.slots_used for w in shown.workers))
    found.add("penstock_coordinator_uptime_seconds", shown.coordinator.uptime_s)
    found.add("penstock_coordinator_certificate_expires_timestamp_seconds", files.expires_at if files else 0)
    found.add("penstock_coordinator_snapshot_bytes", counters.snapshot_bytes)
    found.add("penstock_coordinator_snapshot_limit_bytes", counters.snapshot_limit)
    if counters.free_bytes is not None:
        found.add("penstock_coordinator_disk_free_bytes", counters.free_bytes)
    found.add("penstock_coordinator_commit_seconds", counters.commits)
    for (method, code), count in sorted(counters.calls.answered.copy().items()):
        found.add("penstock_coordinator_calls_total", count, method=method, status=code)
    for method, seconds in sorted(counters.calls.seconds.copy().items()):
        found.add("penstock_coordinator_call_seconds", seconds, method=method)
    return found


def _read_run(found: MetricReadings, run: RunView, counters: CoordinatorCounters) -> None:
    found.add("penstock_run_attempt", run.attempt, run=run.run)
    found.add("penstock_run_boxes", run.num_boxes, run=run.run)
    found.add("penstock_run_recommended_workers_per_box", run.recommended_workers_per_box or 0, run=run.run)
    # The slots of a box whose training process is gone are not counted as waiting: they need no worker until the job
    # opens the run again.
    phases = Counter(slot.state for box in run.boxes if box.live for slot in box.slots)
    for phase in PHASES:
        found.add("penstock_run_slots", phases[phase], run=run.run, phase=phase)
    found.add("penstock_run_recoveries_total", sum(slot.restarts for slot in run.slots), run=run.run)
    found.add("penstock_run_skipped_batches_total", sum(slot.skipped for slot in run.slots), run=run.run)
    for box in run.boxes:
        of = {"run": run.run, "box": box.box}
        # The status may be slightly older than the counters, and the run may have been opened again since.
        first, waiting_for = counters.boxes.get((run.run, box.box), (box.step, 0))
        found.add("penstock_box_live", int(box.live), **of)
        found.add("penstock_box_step", box.step, **of)
        found.add("penstock_box_epoch", box.epoch, **of)
        found.add("penstock_box_steps_total", max(0, box.step - first), **of)
        found.add("penstock_box_wait_seconds_total", box.waited_s, **of)
        if box.live:
            found.add("penstock_box_wait_ratio", box.waited_share, **of)
        found.add("penstock_box_waiting_for_slot", waiting_for - 1 if box.live else -1, **of)


def route(read: Callable[[], MetricReadings]) -> Route:
    """Return the route of /metrics. `read`: called on the thread of a request."""
    try:
        return metrics_route(Collector(read))
    except InvalidArgumentError as error:
        page = Page("text/plain; charset=utf-8", f"{error.message}\n".encode(), 501)
        return lambda: page
