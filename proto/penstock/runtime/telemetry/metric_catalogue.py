"""Catalogue of all metrics that Penstock exports: name, type, unit, labels, meaning, and process.

Readings of a scrape are checked against this list (penstock.runtime.web.prometheus);
the table of docs/metrics.md, the Grafana dashboard and the alerts are tested against it.

Rules. `penstock_<noun>_<unit>`, in base units; a counter ends in `_total`. A name belongs to one process, or a sum over
all targets would count things twice: metrics of the training job begin with `penstock_client_`. No label has a value
for each step, batch or state, and the coordinator has no series for a slot: with 10,000 slots those are spread over the
workers that run them, a few dozen each. A value that may decrease (a step, after a resume) is a gauge; counters count
from the start of their subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BY_NAME", "CATALOGUE", "Kind", "Metric", "Process"]

Process = Literal["coordinator", "worker", "client"]
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    """Metric of the catalogue. `help`: the text in a scrape and in the documentation."""

    processes: tuple[Process, ...]
    name: str
    kind: Kind
    unit: str
    """Base unit; "" for a count or a number without a unit."""
    labels: tuple[str, ...]
    help: str


_EVERY: tuple[Process, ...] = ("coordinator", "worker", "client")
_BOX = ("run", "box")
_SLOT = ("run", "box", "slot")


def _coordinator(name: str, kind: Kind, unit: str, labels: tuple[str, ...], help: str) -> Metric:
    return Metric(("coordinator",), name, kind, unit, labels, help)


def _worker(name: str, kind: Kind, unit: str, labels: tuple[str, ...], help: str) -> Metric:
    return Metric(("worker",), name, kind, unit, labels, help)


def _client(name: str, kind: Kind, unit: str, labels: tuple[str, ...], help: str) -> Metric:
    return Metric(("client",), name, kind, unit, labels, help)


CATALOGUE: tuple[Metric, ...] = (
    Metric(_EVERY, "penstock_build_info", "gauge", "", ("process", "version"), "1, with the process and its release."),
    # ---- coordinator: runs and boxes
    _coordinator("penstock_runs", "gauge", "", ("phase",), "Runs, by phase: open or closed."),
    _coordinator(
        "penstock_run_attempt", "gauge", "", ("run",), "The attempt that is open: higher each time the job is started."
    ),
    _coordinator("penstock_run_boxes", "gauge", "", ("run",), "Boxes that the run has in all."),
    _coordinator(
        "penstock_run_recommended_workers_per_box",
        "gauge",
        "",
        ("run",),
        "Recommended slots of a box, at most as many as the cores carry; 0: not known.",
    ),
    _coordinator(
        "penstock_run_slots", "gauge", "", ("run", "phase"), "Slots of the open attempt's live boxes, by phase."
    ),
    _coordinator(
        "penstock_run_recoveries_total",
        "counter",
        "",
        ("run",),
        "Times that a slot of the open attempt was moved to another runner.",
    ),
    _coordinator(
        "penstock_run_skipped_batches_total",
        "counter",
        "batches",
        ("run",),
        "Batches that the open attempt left out because they killed their runners.",
    ),
    _coordinator("penstock_box_live", "gauge", "", _BOX, "1 if the box's training process renews its lease, else 0."),
    _coordinator("penstock_box_step", "gauge", "", _BOX, "Last step that the box reported."),
    _coordinator("penstock_box_epoch", "gauge", "", _BOX, "Epoch that it is in."),
    _coordinator(
        "penstock_box_steps_total", "counter", "", _BOX, "Steps since the attempt was opened: rate() of it is steps/s."
    ),
    _coordinator(
        "penstock_box_wait_seconds_total",
        "counter",
        "seconds",
        _BOX,
        "Time that its training loop waited for data.",
    ),
    _coordinator(
        "penstock_box_wait_ratio",
        "gauge",
        "ratio",
        _BOX,
        "Share of its latest time that it waited, 0 to 1. A box that is not live has none.",
    ),
    _coordinator(
        "penstock_box_waiting_for_slot", "gauge", "", _BOX, "Slot that it waits for right now; -1: it does not wait."
    ),
    # ---- coordinator: the fleet
    _coordinator(
        "penstock_workers", "gauge", "", ("phase",), "Worker daemons, by phase: live, draining, or lost (silent)."
    ),
    _coordinator(
        "penstock_workers_recommended",
        "gauge",
        "",
        (),
        "Daemons like those that are there that the open runs need, by measured demand and supply; 0: not known.",
    ),
    _coordinator("penstock_slots_capacity", "gauge", "", (), "Runners that the live workers may run together."),
    _coordinator("penstock_slots_used", "gauge", "", (), "Those of them that are assigned to runs."),
    # ---- coordinator: its own health
    _coordinator("penstock_coordinator_uptime_seconds", "gauge", "seconds", (), "Time since it was started."),
    _coordinator(
        "penstock_coordinator_certificate_expires_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "Unix time until when its certificate is valid; 0: it shows none.",
    ),
    _coordinator(
        "penstock_coordinator_snapshot_bytes", "gauge", "bytes", (), "Durable snapshots and blobs that it holds."
    ),
    _coordinator(
        "penstock_coordinator_snapshot_limit_bytes",
        "gauge",
        "bytes",
        (),
        "Largest number of bytes that it may hold of them: the budget.",
    ),
    _coordinator(
        "penstock_coordinator_commit_seconds",
        "histogram",
        "seconds",
        (),
        "Commits of the journal, with the flush.",
    ),
    _coordinator(
        "penstock_coordinator_calls_total", "counter", "", ("method", "status"), "Calls answered, by gRPC status."
    ),
    _coordinator(
        "penstock_coordinator_call_seconds",
        "histogram",
        "seconds",
        ("method",),
        "Time that calls took. Heartbeat and WatchRun are held on purpose until there is news; PutSnapshot and PutBlob "
        "last as long as their sender sends.",
    ),
    # ---- worker
    _worker("penstock_worker_info", "gauge", "", ("worker",), "1, with the worker's name at the coordinator."),
    _worker("penstock_worker_uptime_seconds", "gauge", "seconds", (), "Time since it was started."),
    _worker(
        "penstock_worker_certificate_expires_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "Unix time until when its certificate is valid; 0: it shows none.",
    ),
    _worker("penstock_worker_capacity", "gauge", "", (), "Runners that it may run at a time (--slots)."),
    _worker("penstock_worker_slots", "gauge", "", ("phase",), "Slots that it runs, by phase."),
    _worker(
        "penstock_worker_heartbeat_age_seconds",
        "gauge",
        "seconds",
        (),
        "Time since the coordinator last answered; -1 before it did.",
    ),
    _worker(
        "penstock_worker_lease_seconds",
        "gauge",
        "seconds",
        (),
        "Silence after which it is taken for dead; 0: none.",
    ),
    _worker("penstock_worker_sent_bytes_total", "counter", "bytes", ("lane",), "Bytes that it sent to other hosts."),
    _worker("penstock_worker_lanes", "gauge", "", ("lane",), "Lanes that it serves over TCP now."),
    _worker("penstock_worker_snapshots_total", "counter", "", (), "Snapshots that its runners sent to it."),
    _worker("penstock_worker_snapshots_sent_total", "counter", "", (), "Of them, those made durable."),
    _worker("penstock_worker_snapshots_refused_total", "counter", "", (), "Snapshots refused for lack of budget."),
    _worker("penstock_worker_snapshot_sent_bytes_total", "counter", "bytes", (), "Bytes of those made durable."),
    _worker("penstock_worker_recoveries_total", "counter", "", (), "Slots that it took over from another runner."),
    _worker("penstock_worker_losses_total", "counter", "", (), "Runners that it lost: killed, crashed, recycled."),
    _worker("penstock_worker_state_answers_total", "counter", "", ("status",), "Its answers: ok, error, or dropped."),
    _worker("penstock_slot_produced_batches_total", "counter", "batches", _SLOT, "Batches that its runner made."),
    _worker(
        "penstock_slot_delivered_batches_total",
        "counter",
        "batches",
        _SLOT,
        "Of them, those that the training loop was handed.",
    ),
    _worker(
        "penstock_slot_replayed_batches_total",
        "counter",
        "batches",
        _SLOT,
        "Batches made again and not delivered, to reach the slot's position.",
    ),
    _worker("penstock_slot_queue_batches", "gauge", "batches", _SLOT, "Batches made and not yet handed to the loop."),
    _worker(
        "penstock_slot_busy_seconds_total",
        "counter",
        "seconds",
        _SLOT,
        "Time that the runner worked on batches, and did not wait for the loop to take them: rate() of it is the share "
        "of the slot that is used up.",
    ),
    _worker("penstock_runner_cpu_seconds_total", "counter", "seconds", _SLOT, "Processor time of its processes."),
    _worker(
        "penstock_runner_memory_bytes",
        "gauge",
        "bytes",
        _SLOT,
        "Anonymous memory of the runner and of what it started; shared pages count in each process.",
    ),
    # ---- training job
    _client("penstock_client_step", "gauge", "", _BOX, "Last step that the loop was handed."),
    _client("penstock_client_steps_total", "counter", "", _BOX, "Steps since the loader was opened or loaded."),
    _client("penstock_client_wait_seconds_total", "counter", "seconds", _BOX, "Time that the loop waited for data."),
    _client(
        "penstock_client_slot_wait_seconds_total",
        "counter",
        "seconds",
        _SLOT,
        "The same by slot: whose batch was due. Slots that were never waited for have none.",
    ),
    _client(
        "penstock_client_worker_wait_seconds_total",
        "counter",
        "seconds",
        ("run", "box", "worker"),
        "The same by the worker that had the slot then.",
    ),
    _client("penstock_client_copied_batches_total", "counter", "batches", _BOX, "Batches handed out as copies."),
    _client(
        "penstock_client_staged_batches_total",
        "counter",
        "batches",
        _BOX,
        "Batches whose copy to the device had begun before the loop asked.",
    ),
    _client("penstock_client_recoveries_total", "counter", "", _BOX, "Slots that moved while the loop was reading."),
    _client(
        "penstock_client_skipped_batches_total", "counter", "batches", _BOX, "Batches that were left out as poisonous."
    ),
    _client(
        "penstock_client_corrupt_total", "counter", "", _BOX, "Times that damaged data arrived and were fetched again."
    ),
    _client("penstock_client_lanes", "gauge", "", ("run", "box", "lane"), "Lanes that are open, local or tcp."),
    _client("penstock_client_held_batches", "gauge", "batches", _BOX, "Batches of which the loop still holds views."),
    _client(
        "penstock_client_coordinator_away_seconds",
        "gauge",
        "seconds",
        _BOX,
        "Time since which the coordinator has not answered; 0: it does.",
    ),
    _client(
        "penstock_client_receiver_cpu_seconds_total",
        "counter",
        "seconds",
        (),
        "Processor time of the processes that receive from other hosts.",
    ),
    _client("penstock_client_receiver_memory_bytes", "gauge", "bytes", (), "Their resident memory, rings included."),
    _client("penstock_checkpoint_saves_total", "counter", "", ("status",), "Saves that ended: ok or error."),
    _client("penstock_checkpoint_in_flight", "gauge", "", (), "Checkpoints that are being written."),
    _client(
        "penstock_checkpoint_stall_seconds_total",
        "counter",
        "seconds",
        (),
        "Time that save() stopped the training loop.",
    ),
    _client("penstock_checkpoint_last_stall_seconds", "gauge", "seconds", (), "Time that the last save() stopped it."),
    _client(
        "penstock_checkpoint_last_write_seconds",
        "gauge",
        "seconds",
        (),
        "Time from the end of the last save() to its commit.",
    ),
    _client("penstock_checkpoint_written_bytes_total", "counter", "bytes", (), "Bytes that this rank wrote."),
    _client("penstock_checkpoint_last_step", "gauge", "", (), "Step of the last complete checkpoint; -1: none."),
)

BY_NAME = {metric.name: metric for metric in CATALOGUE}
