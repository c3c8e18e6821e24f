"""What a coordinator shows to Prometheus, made of a status and of the coordinator's own vitals.

No series is of a slot or of a worker: of 10,000 of them there are counts by phase here, and the workers show their own.
What is left grows with the boxes of open runs. Where /metrics is on the dashboard's server nobody need want it, so a
missing prometheus-client is an answer to whoever asks, and no error at the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.tls import Renewing
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.counters import CallCounters, Histogram
from penstock.runtime.web.http_server import Page, Route
from penstock.runtime.web.prometheus import Collector, MetricReadings, metrics_route

__all__ = ["CoordinatorCounters", "readings", "route"]

_PHASES = ("waiting", "starting", "ready", "failed")


@dataclass(frozen=True)
class CoordinatorCounters:
    """What no status holds."""

    calls: CallCounters
    commits: Histogram
    snapshot_bytes: int
    snapshot_limit: int
    boxes: dict[tuple[str, int], tuple[int, int]]
    """(run, box) -> the step that its attempt began at, and the slot that it waits for + 1."""


def readings(status: pb.StatusReply, vitals: CoordinatorCounters, files: Renewing | None = None) -> MetricReadings:
    """All metrics. `files`: the certificate that the coordinator shows."""
    found = MetricReadings("coordinator")
    found.add("penstock_runs", sum(run.open for run in status.runs), phase="open")
    found.add("penstock_runs", sum(not run.open for run in status.runs), phase="closed")
    for run in status.runs:
        if run.open:
            _read_run(found, run, vitals)
    workers = Counter("lost" if not w.live else "draining" if w.draining else "live" for w in status.workers)
    for phase in ("live", "draining", "lost"):
        found.add("penstock_workers", workers[phase], phase=phase)
    found.add("penstock_workers_recommended", status.recommended_workers)
    found.add("penstock_slots_capacity", sum(w.slots for w in status.workers if w.live and not w.draining))
    found.add("penstock_slots_used", sum(w.slots_used for w in status.workers))
    found.add("penstock_coordinator_uptime_seconds", status.uptime_s)
    found.add("penstock_coordinator_certificate_expires_timestamp_seconds", files.expires_at if files else 0)
    found.add("penstock_coordinator_snapshot_bytes", vitals.snapshot_bytes)
    found.add("penstock_coordinator_snapshot_limit_bytes", vitals.snapshot_limit)
    found.add("penstock_coordinator_commit_seconds", vitals.commits)
    for (method, code), count in sorted(vitals.calls.answered.copy().items()):
        found.add("penstock_coordinator_calls_total", count, method=method, status=code)
    for method, seconds in sorted(vitals.calls.seconds.copy().items()):
        found.add("penstock_coordinator_call_seconds", seconds, method=method)
    return found


def _read_run(found: MetricReadings, run: pb.RunStatus, vitals: CoordinatorCounters) -> None:
    found.add("penstock_run_attempt", run.attempt, run=run.run)
    found.add("penstock_run_boxes", run.num_boxes, run=run.run)
    found.add("penstock_run_recommended_workers_per_box", run.recommended_workers_per_box, run=run.run)
    slots = [slot for box in run.boxes for slot in box.slots]
    # A box whose training process is gone has its slots until the job opens anew or the run is given up: they wait for
    # no worker.
    living = [slot for box in run.boxes if box.live for slot in box.slots]
    phases = Counter(pb.SlotPhase.Name(slot.phase).lower() for slot in living)
    for phase in _PHASES:
        found.add("penstock_run_slots", phases[phase], run=run.run, phase=phase)
    found.add("penstock_run_recoveries_total", sum(slot.restarts for slot in slots), run=run.run)
    found.add("penstock_run_skipped_batches_total", sum(slot.skipped for slot in slots), run=run.run)
    for box in run.boxes:
        of = {"run": run.run, "box": box.box}
        # The status may be of a moment before the vitals, and its run opened anew since.
        first, waiting_for = vitals.boxes.get((run.run, box.box), (box.step, 0))
        found.add("penstock_box_live", int(box.live), **of)
        found.add("penstock_box_step", box.step, **of)
        found.add("penstock_box_epoch", box.epoch, **of)
        found.add("penstock_box_steps_total", max(0, box.step - first), **of)
        found.add("penstock_box_wait_seconds_total", box.waited_s, **of)
        if box.live:
            found.add("penstock_box_wait_ratio", box.waited_share, **of)
        found.add("penstock_box_waiting_for_slot", waiting_for - 1 if box.live else -1, **of)


def route(read: Callable[[], MetricReadings]) -> Route:
    """The page /metrics; `read` is called on the thread of a request."""
    made: list[Route] = []

    def page() -> Page:
        if not made:
            try:
                made.append(metrics_route(Collector(read)))
            except InvalidArgumentError as error:
                return Page("text/plain; charset=utf-8", f"{error.message}\n".encode(), 501)
        return made[0]()

    return page
