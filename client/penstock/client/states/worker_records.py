"""Conversion of WorkerRecords (each worker's counts and state) to a saved state, and to DataLoaderCheckpoints."""

from __future__ import annotations

from typing import Any, cast

from penstock.client.states.saved_state import SavedState, WorkerPart
from penstock.proto.errors import StateUnavailableError
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.codec import decode_state
from penstock.proto.state.position import Position
from penstock.proto.state.restartable import DataLoaderCheckpoint, is_pure


def saved_of(
    fetched: FetchedState, step: int, name: str, methods: int, seed: int, *, full_digest: bool
) -> tuple[SavedState, list[Any]]:
    """Return the saved state without its aggregated part, and the states for aggregate_state_dict in order."""
    first = fetched.records[0][0]
    positions = [Position.received(fetched.positions[box]) for box in sorted(fetched.positions)]
    saved = SavedState(step, name, methods, first.num_boxes, first.num_workers_per_box, seed, positions, full_digest)
    saved.is_pure = is_pure(first.capabilities)
    values = [_decoded(envelope) for _, envelope in fetched.records]
    for (record, _), value in zip(fetched.records, values, strict=True):
        saved.parts.append(
            WorkerPart(
                record.box,
                record.local_worker_id,
                record.worker_step,
                record.samples_streamed,
                record.digest,
                value["restart"],
                None if methods == 4 else value["user"],
                record.next_digest,
                record.next_epoch,
                record.chain,
            )
        )
    return saved, _by_worker(saved, values)


def _decoded(envelope: bytes) -> dict[str, Any]:
    """Return a slot's state; an earlier one, which the worker has added, becomes the one to restore."""
    value = cast(dict[str, Any], decode_state(envelope))
    if "earlier" in value:
        added = value.pop("earlier")
        value["restart"]["epoch_start"] = _as_start(cast(dict[str, Any], decode_state(added))) if added else None
    return value


def _as_start(value: dict[str, Any]) -> dict[str, Any]:
    restart = value["restart"]
    start = restart["epoch_start"] or {}
    if "state" in start:  # it is itself reached from that one
        return cast(dict[str, Any], start)
    kept = {name: restart[name] for name in ("at", "rng") if name in restart}
    return {**start, **kept, "state": value["user"]}


def _by_worker(saved: SavedState, values: list[dict[str, Any]]) -> list[Any]:
    """Order states by worker numbers. These are the slots', except after a resume by the loader's own methods: worker 0
    is then the slot whose batch was due first."""
    launches = [value["launch"] for value in values if "launch" in value]
    if len(launches) < len(values):
        return [value["user"] for value in values]
    owners = {(part.box, launch["worker"]) for part, launch in zip(saved.parts, launches, strict=True)}
    if len(owners) < len(values):
        raise StateUnavailableError(
            f"the state of {saved.label} at step {saved.step} is not available: when the launch resumed, its next "
            "batches did not show which slot is which worker. Resume from a step that the number of workers divides"
        )
    users = [None] * len(values)
    for part, launch, value in zip(saved.parts, launches, values, strict=True):
        users[part.box * saved.num_workers_per_box + launch["worker"]] = value["user"]
    return users


def checkpoints_of(fetched: FetchedState, loaded: SavedState | None, step: int) -> list[DataLoaderCheckpoint]:
    """Return a DataLoaderCheckpoint for each worker. `loaded`: state from which this launch resumed; on another
    topology all workers began with counts of 0."""
    began = loaded.step if loaded is not None else 0
    before = {(part.box, part.slot): part for part in loaded.parts} if loaded is not None else {}
    checkpoints = []
    for record, envelope in fetched.records:
        topology = record.num_boxes, record.num_workers_per_box
        same = loaded is not None and topology == (loaded.num_boxes, loaded.num_workers_per_box)
        part = before.get((record.box, record.local_worker_id)) if same else None
        value = cast(dict[str, Any], decode_state(envelope))
        counts = (began, part.worker_step, part.samples) if part is not None else (began, 0, 0)
        if "launch" in value:  # all slots may have been restarted within the launch
            counts = value["restart"]["history"]["launch"][:3]
        step_before, batches_before, samples_before = counts
        checkpoints.append(
            DataLoaderCheckpoint(
                record.local_worker_id,
                record.num_workers_per_box,
                record.num_boxes,
                record.box,
                step - step_before,
                record.worker_step - batches_before,
                record.samples_streamed - samples_before,
                value["user"],
                lifetime_appliance_step=step,
                lifetime_worker_step=record.worker_step,
                lifetime_samples_streamed=record.samples_streamed,
            )
        )
    return checkpoints
