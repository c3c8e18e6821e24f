"""`penstock state`: the position of each box, and each worker's DataLoaderCheckpoint; nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.deploy.console.count_tables import count_tables, counts_as_dict, rows_of_workers
from penstock.deploy.console.peer import Peer
from penstock.deploy.console.tables import Table, show
from penstock.deploy.operations.state_values import as_json as plain
from penstock.deploy.operations.state_values import brief
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.counts import rows_of
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.units import size, topology

if TYPE_CHECKING:
    from penstock.deploy.operations.saved_file import FoundState


def show_state(run: str, step: int | None, deadline_s: float, peer: Peer, as_json: bool) -> None:
    """Fetch and print the state of a run at a step; None: the newest."""
    name = run_name(run)
    request = pb.FetchStateRequest(run=name, step=step or 0, newest=step is None, deadline_s=deadline_s)
    with peer.client() as client:
        fetched = client.fetch_state(request)
    found = as_dict(name, fetched)
    if as_json:
        for worker in found["workers"]:
            worker["user_state_dict"] = plain(worker["user_state_dict"])
        print(json.dumps(found, indent=2))
    else:
        show(tables(found))


def run_name(run: str) -> str:
    """Return a run's name as "JOB/ORDINAL"; "JOB" alone is JOB/0."""
    job, slash, ordinal = run.partition("/")
    if not job or (slash and not (ordinal.isascii() and ordinal.isdigit())):
        raise InvalidArgumentError(
            f"a run must be JOB or JOB/NUMBER, as `penstock status` shows it, got {run!r}. Correct the name"
        )
    return run if slash else f"{job}/0"


def as_dict(run: str, fetched: FetchedState) -> dict[str, Any]:
    workers = [_worker(record, data) for record, data in fetched.records]
    first = fetched.records[0][0] if fetched.records else pb.WorkerRecord()
    rows = rows_of_workers(worker["user_state_dict"] for worker in workers)
    return {
        "run": run,
        "step": first.step,
        "num_boxes": first.num_boxes,
        "num_workers_per_box": first.num_workers_per_box,
        "boxes": [_box(box, position) for box, position in sorted(fetched.positions.items())],
        "workers": workers,
        "counts": counts_as_dict(rows) if rows else None,
    }


def _box(box: int, position: records_pb2.BoxPosition) -> dict[str, Any]:
    return {
        "box": box,
        "step": position.step,
        "epoch": position.epoch,
        "live_slots": list(position.live),
        "next_slot": position.live[position.cursor] if position.cursor < len(position.live) else None,
        "slots": [{"delivered": slot.delivered, "total": slot.total} for slot in position.slots],
        "digest": f"{position.chain:016x}" if position.HasField("chain") else None,
    }


def _worker(record: pb.WorkerRecord, data: bytes) -> dict[str, Any]:
    capabilities = record.capabilities
    return {
        "global_worker_id": record.box * record.num_workers_per_box + record.local_worker_id,
        "box": record.box,
        "slot": record.local_worker_id,
        "step": record.step,
        "worker_step": record.worker_step,
        "samples_streamed": record.samples_streamed,
        "epoch": record.epoch,
        "digest": f"{record.digest:016x}" if record.digest else None,
        "state_bytes": record.state_bytes,
        "state_methods": capabilities.state_methods,
        "length": capabilities.length if capabilities.length >= 0 else None,
        "own_workers": capabilities.own_workers,
        "user_state_dict": _user_state(data),
    }


def _user_state(data: bytes) -> Any:
    if not data:
        return None
    from penstock.proto.state.codec import decode_state  # imports torch: only where a state is decoded

    return cast(dict[str, Any], decode_state(data))["user"]


def tables(found: dict[str, Any]) -> list[Table]:
    boxes = Table(
        f"Run {found['run']} at step {found['step']}: {topology(found['num_boxes'], found['num_workers_per_box'])}",
        ("box>", "step>", "epoch>", "next slot>", "live slots", "batches of each slot (this epoch / in all)", "digest"),
    )
    for box in found["boxes"]:
        counts = ", ".join(f"{slot['delivered']}/{slot['total']}" for slot in box["slots"])
        live = " ".join(map(str, box["live_slots"]))
        nxt = "" if box["next_slot"] is None else str(box["next_slot"])
        boxes.rows.append(
            (str(box["box"]), str(box["step"]), str(box["epoch"]), nxt, live, counts, box["digest"] or "")
        )
    columns = ("worker", "box", "slot", "step", "worker_step", "samples", "epoch")
    workers = Table(
        "DataLoaderCheckpoint records",
        (*(f"{name}>" for name in columns), "last digest", "state>", "user_state_dict"),
    )
    for worker in found["workers"]:
        numbers = ("global_worker_id", "box", "slot", "step", "worker_step", "samples_streamed", "epoch")
        workers.rows.append(
            (
                *(str(worker[name]) for name in numbers),
                worker["digest"] or "",
                size(worker["state_bytes"]),
                "" if worker["state_methods"] == 0 else brief(worker["user_state_dict"]),
            )
        )
    rows = rows_of_workers(worker["user_state_dict"] for worker in found["workers"])
    return [boxes, workers, *(count_tables(rows) if rows else ())]


# ---- files


def show_state_file(path: Path, as_json: bool) -> None:
    from penstock.deploy.operations.saved_file import read_states

    states = read_states(path)
    if as_json:
        print(json.dumps({"file": str(path), "states": [_file_state(found) for found in states]}, indent=2))
        return
    show(table for found in states for table in _file_tables(found))


def _file_state(found: FoundState) -> dict[str, Any]:
    saved = found.saved
    rows = rows_of(saved.aggregated)
    return {
        "where": found.name,
        "input_fn": saved.input_fn,
        "step": saved.step,
        "num_boxes": saved.num_boxes,
        "num_workers_per_box": saved.num_workers_per_box,
        "seed": saved.seed,
        "counts": None if rows is None else counts_as_dict(rows),
    }


def _file_tables(found: FoundState) -> list[Table]:
    saved = found.saved
    size = topology(saved.num_boxes, saved.num_workers_per_box) if saved.num_boxes else "any"
    rows = rows_of(saved.aggregated)
    about = Table(
        f"State at step {saved.step}: {found.name}",
        ("what", "found"),
        [("loader", saved.label), ("topology", size), ("seed", "" if saved.seed is None else str(saved.seed))],
        note="" if rows is not None else "No counts: the loader was made without counts= (docs/counts.md).",
    )
    return [about, *([] if rows is None else count_tables(rows))]
