"""Conversion of the workers' records of a step to a saved state, and to the DataLoaderCheckpoints that users get."""

from __future__ import annotations

from typing import Any, cast

from penstock.client.states.saved_state import SavedState, WorkerPart
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.codec import decode_state
from penstock.proto.state.position import Position
from penstock.proto.state.restartable import DataLoaderCheckpoint

__all__ = ["checkpoints_of", "saved_of"]


def saved_of(
    fetched: FetchedState, step: int, name: str, methods: int, seed: int, *, full_digest: bool
) -> tuple[SavedState, list[Any]]:
    """Return the saved state without its aggregated part, and the states of the workers' loaders by
    global_worker_id."""
    first = fetched.records[0][0]
    positions = [Position.received(fetched.positions[box]) for box in sorted(fetched.positions)]
    saved = SavedState(step, name, methods, first.num_boxes, first.num_workers_per_box, seed, positions, full_digest)
    values = [cast(dict[str, Any], decode_state(envelope)) for _, envelope in fetched.records]
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
            )
        )
    return saved, _by_worker(saved, values)


def _by_worker(saved: SavedState, values: list[dict[str, Any]]) -> list[Any]:
    """Return the states of the workers' loaders by worker number, and set `saved.is_mixed` if some loaders resumed from
    their saved state and others were replayed, because their counts then have different starts. After a resume by the
    loader's own methods, worker 0 is the slot whose batch was due first, which may be any slot."""
    launches = [value["launch"] for value in values if "launch" in value]
    if len(launches) < len(values):
        return [value["user"] for value in values]
    places = {(part.box, launch["worker"]) for part, launch in zip(saved.parts, launches, strict=True)}
    saved.is_mixed = len({launch["step"] for launch in launches}) > 1 or len(places) < len(values)
    if saved.is_mixed:
        return [value["user"] for value in values]
    users = [None] * len(values)
    for part, launch, value in zip(saved.parts, launches, values, strict=True):
        users[part.box * saved.num_workers_per_box + launch["worker"]] = value["user"]
    return users


def checkpoints_of(fetched: FetchedState, loaded: SavedState | None, step: int) -> list[DataLoaderCheckpoint]:
    """Return the workers' records, with the counts of this launch and the counts of all launches.

    `loaded`: state from which this launch began; None: no state. After a change of topology all workers began with
    counts of 0.
    """
    began = loaded.step if loaded is not None else 0
    before = {(part.box, part.slot): part for part in loaded.parts} if loaded is not None else {}
    checkpoints = []
    for record, envelope in fetched.records:
        part = before.get((record.box, record.local_worker_id))
        if loaded is None or (record.num_boxes, record.num_workers_per_box) != (
            loaded.num_boxes,
            loaded.num_workers_per_box,
        ):
            part = None
        checkpoints.append(
            DataLoaderCheckpoint(
                record.local_worker_id,
                record.num_workers_per_box,
                record.num_boxes,
                record.box,
                step - began,
                record.worker_step - (part.worker_step if part is not None else 0),
                record.samples_streamed - (part.samples if part is not None else 0),
                cast(dict[str, Any], decode_state(envelope))["user"],
                lifetime_appliance_step=step,
                lifetime_worker_step=record.worker_step,
                lifetime_samples_streamed=record.samples_streamed,
            )
        )
    return checkpoints
