"""A coordinator's status as plain values: what `penstock status --json`, `penstock top --json` and the dashboard tell.

It is built name by name, and not by protobuf: the names are a promise to scripts (docs/cli.md), and protobuf would
write every 64-bit number as a string.
"""

from __future__ import annotations

from typing import Any

from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["as_dict"]


def as_dict(reply: pb.StatusReply, address: str) -> dict[str, Any]:
    """The reply as plain values."""
    return {
        "coordinator": {
            "address": address,
            "version": reply.version,
            "uptime_s": round(reply.uptime_s, 3),
            "dashboard": reply.dashboard or None,
        },
        "recommended_workers": reply.recommended_workers,
        "runs": [_run(run) for run in reply.runs],
        "workers": [_worker(worker) for worker in reply.workers],
        "events": [_event(event) for event in reply.events],
    }


def _run(run: pb.RunStatus) -> dict[str, Any]:
    return {
        "run": run.run,
        "attempt": run.attempt,
        "open": run.open,
        "input_fn": run.input_fn or None,
        "num_boxes": run.num_boxes,
        "num_workers_per_box": run.num_workers_per_box,
        "recommended_workers_per_box": run.recommended_workers_per_box or None,
        "recoveries": run.recoveries,
        "steps_per_s": round(run.steps_per_s, 3),
        "batches_per_s": round(run.batches_per_s, 3),
        "wait_share": round(run.wait_share, 4),
        "bottleneck": _bottleneck(run.bottleneck) if run.HasField("bottleneck") else None,
        "boxes": [_box(box) for box in run.boxes],
        "states": [_state(state) for state in run.states],
    }


def _bottleneck(found: pb.Bottleneck) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "input_bound": found.input_bound,
        "text": found.text,
        "wait_share": round(found.wait_share, 4),
        "box": found.box if found.HasField("box") else None,
        "slot": found.slot if found.HasField("slot") else None,
        "worker": found.worker or None,
        "blame": round(found.blame, 4),
    }


def _state(state: pb.StateFetch) -> dict[str, Any]:
    return {
        "step": state.step,
        "asker": state.asker,
        "askers": state.askers,
        "at": round(state.wall_s, 3),
        "seconds": round(state.seconds, 4),
        "bytes": state.bytes,
        "error": state.error or None,
    }


def _event(event: pb.Event) -> dict[str, Any]:
    return {
        "kind": event.kind,
        "fault": event.fault,
        "at": round(event.wall_s, 3),
        "age_s": round(event.age_s, 3),
        "text": event.text,
        "run": event.run or None,
        "worker": event.worker or None,
        "count": event.count,
    }


def _box(box: pb.BoxStatus) -> dict[str, Any]:
    return {
        "box": box.box,
        "live": box.live,
        "step": box.step,
        "epoch": box.epoch,
        "epoch_ended": box.epoch_ended,
        "steps_per_s": round(box.steps_per_s, 3),
        "waited_s": round(box.waited_s, 3),
        "waited_share": round(box.waited_share, 4),
        "wait_share": round(box.wait_share, 4),
        "waiting_for": box.waiting_for or None,
        "slots": [_slot(slot) for slot in box.slots],
    }


def _slot(slot: pb.SlotView) -> dict[str, Any]:
    error = {"name": slot.error.name, "message": slot.error.message} if slot.HasField("error") else None
    return {
        "slot": slot.slot,
        "worker": slot.worker or None,
        "successor": slot.successor or None,
        "generation": slot.generation,
        "phase": pb.SlotPhase.Name(slot.phase),
        "queued": slot.queued,
        "batches_per_s": round(slot.batches_per_s, 3),
        "batch_s": round(slot.batch_s, 6) or None,
        "wait_share": round(slot.wait_share, 4),
        "snapshot_age_s": round(slot.snapshot_age_s, 3) if slot.HasField("snapshot_age_s") else None,
        "restarts": slot.restarts,
        "note": slot.note or None,
        "doing": slot.doing or _start(slot) or None,
        "skipped": slot.skipped,
        "error": error if error is not None and error["name"] else None,
    }


def _start(slot: pb.SlotView) -> str:
    """Of a runner that waits to be started, what for."""
    return (
        f"number {slot.start_queue_position} of {slot.start_queue_length} that wait to be started there"
        if slot.start_queue_position
        else ""
    )


def _worker(worker: pb.WorkerStatus) -> dict[str, Any]:
    return {
        "worker": worker.worker,
        "live": worker.live,
        "draining": worker.draining,
        "slots": worker.slots,
        "slots_used": worker.slots_used,
        "seen_s_ago": round(worker.seen_s_ago, 3),
        "batches_per_s": round(worker.batches_per_s, 3),
        "wait_share": round(worker.wait_share, 4),
        "host_id": worker.host_id,
        "tcp_address": worker.tcp_address or None,
        "version": worker.version or None,
        "allow": list(worker.allow),
    }
