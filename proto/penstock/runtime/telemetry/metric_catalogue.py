"""Catalogue of all metrics that Penstock exports: name, labels, meaning, and process.

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

Process = Literal["coordinator", "worker", "client"]
Kind = Literal["counter", "gauge", "histogram"]

_HISTOGRAMS = {"penstock_coordinator_commit_seconds", "penstock_coordinator_call_seconds"}


@dataclass(frozen=True)
class Metric:
    """Metric that Penstock exports. `help`: its description in a scrape and in the documentation."""

    processes: tuple[Process, ...]
    name: str
    labels: tuple[str, ...]
    help: str

    @property
    def kind(self) -> Kind:
        if self.name in _HISTOGRAMS:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


_ALL: tuple[Process, ...] = ("coordinator", "worker", "client")
_RUN = ("run",)
_BOX = ("run", "box")
_SLOT = ("run", "box", "slot")
_SOURCE = ("run", "box", "source", "key")
_Rows = tuple[tuple[str, tuple[str, ...], str], ...]

_COORDINATOR: _Rows = (
    # ---- runs and boxes
    ("penstock_runs", ("phase",), "Runs, by phase: open or closed."),
    ("penstock_runs_ended_total", ("reason",), "Runs that have ended or failed since the coordinator started."),
    ("penstock_run_attempt", _RUN, "Number of the open attempt; it rises with each start of the job."),
    ("penstock_run_boxes", _RUN, "Boxes of the run."),
    ("penstock_run_recommended_workers_per_box", _RUN, "Recommended slots of a box; 0: not known."),
    ("penstock_run_slots", ("run", "phase"), "Slots of the open attempt's live boxes, by phase."),
    ("penstock_run_recoveries_total", _RUN, "Times that a slot was taken from its runner; not migrations."),
    ("penstock_run_skipped_batches_total", _RUN, "Batches that were skipped because they killed their runners."),
    ("penstock_box_live", _BOX, "1 if the box's training process renews its lease, else 0."),
    ("penstock_box_step", _BOX, "Last step that the box reported."),
    ("penstock_box_epoch", _BOX, "Epoch that the box is in."),
    ("penstock_box_steps_total", _BOX, "Steps since the attempt was opened: rate() of it is steps/s."),
    ("penstock_box_wait_seconds_total", _BOX, "Time that the box's training loop waited for data."),
    ("penstock_box_wait_ratio", _BOX, "Share of its recent time that a live box waited for data, 0 to 1."),
    ("penstock_box_waiting_for_slot", _BOX, "Slot that the box waits for now; -1: it does not wait."),
    # ---- the fleet
    ("penstock_workers", ("phase",), "Worker daemons: live, draining, or lost (not back since a restart)."),
    ("penstock_workers_lost_total", (), "Workers that were silent for longer than their leases, without having left."),
    ("penstock_workers_recommended", (), "Number of daemons like these that the open runs need; 0: not known."),
    ("penstock_slots_capacity", (), "Runners that all live workers that do not drain may run together."),
    ("penstock_slots_used", (), "Slots that all workers hold; a slot in migration counts twice."),
    # ---- its own health
    ("penstock_coordinator_uptime_seconds", (), "Time since the start of the process."),
    ("penstock_coordinator_certificate_expires_timestamp_seconds", (), "Expiry of its certificate; 0: none."),
    ("penstock_coordinator_snapshot_bytes", (), "Durable snapshots and blobs that the coordinator holds."),
    ("penstock_coordinator_snapshot_limit_bytes", (), "Budget for durable snapshots and blobs."),
    ("penstock_coordinator_disk_free_bytes", (), "Free space for its state directory; absent if it keeps none."),
    ("penstock_coordinator_commit_seconds", (), "Duration of commits to the journal, with the flush to disk."),
    ("penstock_coordinator_calls_total", ("method", "status"), "Calls answered, by gRPC status."),
    ("penstock_coordinator_call_seconds", ("method",), "Duration of calls, with the holds of long polls."),
)
_WORKER: _Rows = (
    ("penstock_worker_info", ("worker",), "1, with the worker's name at the coordinator."),
    ("penstock_worker_uptime_seconds", (), "Time since the start of the process."),
    ("penstock_worker_certificate_expires_timestamp_seconds", (), "Expiry of its certificate; 0: none."),
    ("penstock_worker_capacity", (), "Runners that the worker may run at a time (--slots)."),
    ("penstock_worker_slots", ("phase",), "Slots that the worker runs, by phase."),
    ("penstock_worker_heartbeat_age_seconds", (), "Time since the coordinator's last answer; -1 before the first."),
    ("penstock_worker_lease_seconds", (), "Silence after which the worker counts as lost; 0: not known."),
    ("penstock_worker_sent_bytes_total", ("lane",), "Bytes that the worker sent to other hosts."),
    ("penstock_worker_lanes", ("lane",), "Lanes that the worker serves over TCP now."),
    ("penstock_worker_snapshots_total", (), "Snapshots received from the worker's runners."),
    ("penstock_worker_snapshots_sent_total", (), "Snapshots that the worker made durable."),
    ("penstock_worker_snapshots_refused_total", (), "Snapshots that the coordinator refused: too large."),
    ("penstock_worker_snapshot_sent_bytes_total", (), "Bytes of the snapshots that the worker made durable."),
    ("penstock_worker_recoveries_total", (), "Slots that the worker took over from another runner."),
    ("penstock_worker_losses_total", (), "Runners that were lost: killed, crashed, or replaced for memory."),
    ("penstock_worker_state_answers_total", ("status",), "Answers to state requests: ok, error, or dropped."),
    ("penstock_slot_produced_batches_total", _SLOT, "Batches that the slot's runner made."),
    ("penstock_slot_delivered_batches_total", _SLOT, "Batches delivered to the training loop."),
    ("penstock_slot_replayed_batches_total", _SLOT, "Batches made again to reach the slot's position."),
    ("penstock_slot_queue_batches", _SLOT, "Batches made and not yet delivered to the loop."),
    ("penstock_slot_busy_seconds_total", _SLOT, "Time that the runner worked on batches."),
    ("penstock_runner_cpu_seconds_total", _SLOT, "Processor time of the runner and its processes."),
    ("penstock_runner_memory_bytes", _SLOT, "Anonymous memory of the runner and its processes."),
)
_CLIENT: _Rows = (
    ("penstock_client_step", _BOX, "Last step that was delivered to the loop."),
    ("penstock_client_steps_total", _BOX, "Steps since the loader was opened or loaded."),
    ("penstock_client_wait_seconds_total", _BOX, "Time that the loop waited for data."),
    ("penstock_client_slot_wait_seconds_total", _SLOT, "Time that the loop waited, by slot."),
    ("penstock_client_worker_wait_seconds_total", ("run", "box", "worker"), "Time that the loop waited, by worker."),
    ("penstock_client_copied_batches_total", _BOX, "Batches delivered as copies."),
    ("penstock_client_staged_batches_total", _BOX, "Batches whose copy to the device began ahead."),
    ("penstock_client_recoveries_total", _BOX, "Slots that moved while the loop was reading."),
    ("penstock_client_skipped_batches_total", _BOX, "Batches that were skipped because they killed their runners."),
    ("penstock_client_corrupt_total", _BOX, "Number of times that damaged data arrived and were fetched again."),
    ("penstock_client_source_samples", _SOURCE, "Samples delivered over the life of the run, with counts=."),
    ("penstock_client_source_tokens", _SOURCE, "Tokens of these samples."),
    ("penstock_client_source_truncated_samples", _SOURCE, "Samples that were truncated."),
    ("penstock_client_source_skipped_samples", _SOURCE, "Samples that were left out."),
    ("penstock_client_source_wanted_ratio", ("run", "box", "source", "of"), "Share wanted of the source."),
    ("penstock_client_cost_imbalance_ratio", _BOX, "Cost of a step's most expensive box / mean of all boxes."),
    ("penstock_client_lanes", ("run", "box", "lane"), "Lanes that are open, local or tcp."),
    ("penstock_client_held_batches", _BOX, "Batches of which the loop still holds views."),
    ("penstock_client_coordinator_away_seconds", _BOX, "Time without an answer of the coordinator."),
    ("penstock_client_receiver_cpu_seconds_total", (), "Processor time of the receiver processes."),
    ("penstock_client_receiver_memory_bytes", (), "Resident memory of the receiver processes, rings included."),
    ("penstock_checkpoint_saves_total", ("status",), "Saves that ended: ok or error."),
    ("penstock_checkpoint_in_flight", (), "Checkpoints that are being written."),
    ("penstock_checkpoint_stall_seconds_total", (), "Time that save() stopped the training loop."),
    ("penstock_checkpoint_last_stall_seconds", (), "Time that the last save() stopped the training loop."),
    ("penstock_checkpoint_last_write_seconds", (), "Time from the end of the last save() to its commit."),
    ("penstock_checkpoint_written_bytes_total", (), "Bytes that this rank wrote."),
    ("penstock_checkpoint_last_step", (), "Step of the last complete checkpoint; -1: none."),
)

CATALOGUE: tuple[Metric, ...] = (
    Metric(_ALL, "penstock_build_info", ("process", "version"), "1, with the process and its release."),
    *(Metric(("coordinator",), *row) for row in _COORDINATOR),
    *(Metric(("worker",), *row) for row in _WORKER),
    *(Metric(("client",), *row) for row in _CLIENT),
)

BY_NAME = {metric.name: metric for metric in CATALOGUE}
