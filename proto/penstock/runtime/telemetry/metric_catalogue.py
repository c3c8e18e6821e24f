"""Catalogue of all metrics that Penstock exports: name, type, unit, labels, meaning, and process.

The values of a scrape are checked against this list (penstock.runtime.web.prometheus); the table of docs/metrics.md,
the Grafana dashboard and the alerts are tested against it.

Rules. Names are `penstock_<noun>_<unit>`, in base units; those of counters end in `_total`. Each name is exported by
one kind of process, so that a sum over all targets counts nothing twice; metrics of the training job begin with
`penstock_client_` or `penstock_checkpoint_`. No label has a value for each step, batch or state. Time series of a slot
are exported by its worker and not by the coordinator, which may have 10,000 slots. A value that may decrease, such as a
step after a resume, is a gauge. A counter counts from the start of its process or object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BY_NAME", "CATALOGUE", "Kind", "Metric", "Process"]

Process = Literal["coordinator", "worker", "client"]
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    """Metric that Penstock exports. `help`: its description in a scrape and in the documentation."""

    processes: tuple[Process, ...]
    name: str
    kind: Kind
    unit: str
    """Base unit of the values, such as "seconds"; "" for a count or another number without a unit."""
    labels: tuple[str, ...]
    help: str


_EVERY: tuple[Process, ...] = ("coordinator", "worker", "client")
_BOX = ("run", "box")
_SLOT = ("run", "box", "slot")
_SOURCE = ("run", "box", "source", "key")


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
        "penstock_run_attempt",
        "gauge",
        "",
        ("run",),
        "Number of the open attempt; it rises with each start of the job.",
    ),
    _coordinator("penstock_run_boxes", "gauge", "", ("run",), "Boxes of the run."),
    _coordinator(
        "penstock_run_recommended_workers_per_box",
        "gauge",
        "",
        ("run",),
        "Recommended slots of a box, limited by the workers' cores; 0: not known.",
    ),
    _coordinator(
        "penstock_run_slots", "gauge", "", ("run", "phase"), "Slots of the open attempt's live boxes, by phase."
    ),
    _coordinator(
        "penstock_run_recoveries_total",
        "counter",
        "",
        ("run",),
        "Times that a slot of the open attempt was taken from its runner; migrations do not count.",
    ),
    _coordinator(
        "penstock_run_skipped_batches_total",
        "counter",
        "batches",
        ("run",),
        "Batches that the open attempt skipped because they killed their runners.",
    ),
    _coordinator("penstock_box_live", "gauge", "", _BOX, "1 if the box's training process renews its lease, else 0."),
    _coordinator("penstock_box_step", "gauge", "", _BOX, "Last step that the box reported."),
    _coordinator("penstock_box_epoch", "gauge", "", _BOX, "Epoch that the box is in."),
    _coordinator(
        "penstock_box_steps_total", "counter", "", _BOX, "Steps since the attempt was opened: rate() of it is steps/s."
    ),
    _coordinator(
        "penstock_box_wait_seconds_total",
        "counter",
        "seconds",
        _BOX,
        "Time that the box's training loop waited for data.",
    ),
    _coordinator(
        "penstock_box_wait_ratio",
        "gauge",
        "ratio",
        _BOX,
        "Share of the box's recent time spent waiting for data, 0 to 1. A box that is not live has none.",
    ),
    _coordinator(
        "penstock_box_waiting_for_slot", "gauge", "", _BOX, "Slot that the box waits for now; -1: it does not wait."
    ),
    # ---- coordinator: the fleet
    _coordinator(
        "penstock_workers",
        "gauge",
        "",
        ("phase",),
        "Worker daemons, by phase: live, draining, or lost (not back since the coordinator's start).",
    ),
    _coordinator(
        "penstock_workers_recommended",
        "gauge",
        "",
        (),
        "Number of daemons like the present ones that the open runs need, by measured demand and supply; 0: not known.",
    ),
    _coordinator(
        "penstock_slots_capacity", "gauge", "", (), "Runners that all live workers that do not drain may run together."
    ),
    _coordinator(
        "penstock_slots_used", "gauge", "", (), "Slots that all workers hold; a slot in migration counts twice."
    ),
    # ---- coordinator: its own health
    _coordinator("penstock_coordinator_uptime_seconds", "gauge", "seconds", (), "Time since the start of the process."),
    _coordinator(
        "penstock_coordinator_certificate_expires_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "Unix time at which the process's certificate expires; 0: it has none.",
    ),
    _coordinator(
        "penstock_coordinator_snapshot_bytes",
        "gauge",
        "bytes",
        (),
        "Durable snapshots and blobs that the coordinator holds.",
    ),
    _coordinator(
        "penstock_coordinator_snapshot_limit_bytes",
        "gauge",
        "bytes",
        (),
        "Budget for durable snapshots and blobs.",
    ),
    _coordinator(
        "penstock_coordinator_commit_seconds",
        "histogram",
        "seconds",
        (),
        "Duration of commits to the journal, with the flush to disk.",
    ),
    _coordinator(
        "penstock_coordinator_calls_total", "counter", "", ("method", "status"), "Calls answered, by gRPC status."
    ),
    _coordinator(
        "penstock_coordinator_call_seconds",
        "histogram",
        "seconds",
        ("method",),
        "Duration of calls. Heartbeat and WatchRun are long polls, held until there is news; PutSnapshot and PutBlob "
        "last as long as their sender sends.",
    ),
    # ---- worker
    _worker("penstock_worker_info", "gauge", "", ("worker",), "1, with the worker's name at the coordinator."),
    _worker("penstock_worker_uptime_seconds", "gauge", "seconds", (), "Time since the start of the process."),
    _worker(
        "penstock_worker_certificate_expires_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "Unix time at which the process's certificate expires; 0: it has none.",
    ),
    _worker("penstock_worker_capacity", "gauge", "", (), "Runners that the worker may run at a time (--slots)."),
    _worker("penstock_worker_slots", "gauge", "", ("phase",), "Slots that the worker runs, by phase."),
    _worker(
        "penstock_worker_heartbeat_age_seconds",
        "gauge",
        "seconds",
        (),
        "Time since the coordinator's last answer; -1 before the first.",
    ),
    _worker(
        "penstock_worker_lease_seconds",
        "gauge",
        "seconds",
        (),
        "Silence after which the coordinator counts the worker as lost; 0: not known.",
    ),
    _worker(
        "penstock_worker_sent_bytes_total", "counter", "bytes", ("lane",), "Bytes that the worker sent to other hosts."
    ),
    _worker("penstock_worker_lanes", "gauge", "", ("lane",), "Lanes that the worker serves over TCP now."),
    _worker("penstock_worker_snapshots_total", "counter", "", (), "Snapshots received from the worker's runners."),
    _worker("penstock_worker_snapshots_sent_total", "counter", "", (), "Snapshots that the worker made durable."),
    _worker(
        "penstock_worker_snapshots_refused_total",
        "counter",
        "",
        (),
        "Snapshots that the coordinator refused: they are too large, or its budget is used up.",
    ),
    _worker(
        "penstock_worker_snapshot_sent_bytes_total",
        "counter",
        "bytes",
        (),
        "Bytes of the snapshots that the worker made durable.",
    ),
    _worker(
        "penstock_worker_recoveries_total", "counter", "", (), "Slots that the worker took over from another runner."
    ),
    _worker(
        "penstock_worker_losses_total",
        "counter",
        "",
        (),
        "Runners that the worker lost: killed, crashed, or replaced for their memory.",
    ),
    _worker(
        "penstock_worker_state_answers_total",
        "counter",
        "",
        ("status",),
        "Answers to state requests: ok, error, or dropped.",
    ),
    _worker(
        "penstock_slot_produced_batches_total", "counter", "batches", _SLOT, "Batches that the slot's runner made."
    ),
    _worker(
        "penstock_slot_delivered_batches_total",
        "counter",
        "batches",
        _SLOT,
        "Batches delivered to the training loop.",
    ),
    _worker(
        "penstock_slot_replayed_batches_total",
        "counter",
        "batches",
        _SLOT,
        "Batches made again and not delivered, to reach the slot's position.",
    ),
    _worker(
        "penstock_slot_queue_batches", "gauge", "batches", _SLOT, "Batches made and not yet delivered to the loop."
    ),
    _worker(
        "penstock_slot_busy_seconds_total",
        "counter",
        "seconds",
        _SLOT,
        "Time that the runner worked on batches, without waits for the loop: rate() of it is the share "
        "of the slot that is used up.",
    ),
    _worker(
        "penstock_runner_cpu_seconds_total",
        "counter",
        "seconds",
        _SLOT,
        "Processor time of the runner and its processes.",
    ),
    _worker(
        "penstock_runner_memory_bytes",
        "gauge",
        "bytes",
        _SLOT,
        "Anonymous memory of the runner and its processes; shared pages count in each process.",
    ),
    # ---- training job
    _client("penstock_client_step", "gauge", "", _BOX, "Last step that was delivered to the loop."),
    _client("penstock_client_steps_total", "counter", "", _BOX, "Steps since the loader was opened or loaded."),
    _client("penstock_client_wait_seconds_total", "counter", "seconds", _BOX, "Time that the loop waited for data."),
    _client(
        "penstock_client_slot_wait_seconds_total",
        "counter",
        "seconds",
        _SLOT,
        "Time that the loop waited, by the slot whose batch was due. Slots without waits have none.",
    ),
    _client(
        "penstock_client_worker_wait_seconds_total",
        "counter",
        "seconds",
        ("run", "box", "worker"),
        "Time that the loop waited, by the worker of the slot whose batch was due.",
    ),
    _client("penstock_client_copied_batches_total", "counter", "batches", _BOX, "Batches delivered as copies."),
    _client(
        "penstock_client_staged_batches_total",
        "counter",
        "batches",
        _BOX,
        "Batches whose copy to the device had begun before the loop requested them.",
    ),
    _client("penstock_client_recoveries_total", "counter", "", _BOX, "Slots that moved while the loop was reading."),
    _client(
        "penstock_client_skipped_batches_total",
        "counter",
        "batches",
        _BOX,
        "Batches that were skipped because they killed their runners.",
    ),
    _client(
        "penstock_client_corrupt_total",
        "counter",
        "",
        _BOX,
        "Number of times that damaged data arrived and were fetched again.",
    ),
    _client(
        "penstock_client_source_samples",
        "gauge",
        "samples",
        _SOURCE,
        "Samples delivered over the whole life of the run, by source and key, if the loader has counts=.",
    ),
    _client("penstock_client_source_tokens", "gauge", "tokens", _SOURCE, "Tokens of these samples."),
    _client("penstock_client_source_truncated_samples", "gauge", "samples", _SOURCE, "Samples that were truncated."),
    _client("penstock_client_source_skipped_samples", "gauge", "samples", _SOURCE, "Samples that were left out."),
    _client(
        "penstock_client_source_wanted_ratio",
        "gauge",
        "ratio",
        ("run", "box", "source", "of"),
        "Share that the mixture wants of this source, of samples or of tokens.",
    ),
    _client(
        "penstock_client_cost_imbalance_ratio",
        "gauge",
        "ratio",
        _BOX,
        "Cost of a step's most expensive box divided by the mean of all boxes, over the box's steps, if the loader has "
        "counts= and balance=.",
    ),
    _client("penstock_client_lanes", "gauge", "", ("run", "box", "lane"), "Lanes that are open, local or tcp."),
    _client("penstock_client_held_batches", "gauge", "batches", _BOX, "Batches of which the loop still holds views."),
    _client(
        "penstock_client_coordinator_away_seconds",
        "gauge",
        "seconds",
        _BOX,
        "Time for which the coordinator has not answered; 0: it answers.",
    ),
    _client(
        "penstock_client_receiver_cpu_seconds_total",
        "counter",
        "seconds",
        (),
        "Processor time of the receiver processes.",
    ),
    _client(
        "penstock_client_receiver_memory_bytes",
        "gauge",
        "bytes",
        (),
        "Resident memory of the receiver processes, rings included.",
    ),
    _client("penstock_checkpoint_saves_total", "counter", "", ("status",), "Saves that ended: ok or error."),
    _client("penstock_checkpoint_in_flight", "gauge", "", (), "Checkpoints that are being written."),
    _client(
        "penstock_checkpoint_stall_seconds_total",
        "counter",
        "seconds",
        (),
        "Time that save() stopped the training loop.",
    ),
    _client(
        "penstock_checkpoint_last_stall_seconds",
        "gauge",
        "seconds",
        (),
        "Time that the last save() stopped the training loop.",
    ),
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
