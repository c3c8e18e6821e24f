"""Implementation of `penstock replay --loss FILE --spikes N`: which samples were in the batches at which the loss
jumped, and the batches themselves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.deploy.console.coordinator_options import Peer
from penstock.deploy.console.tables import Table, show
from penstock.deploy.replay.loss_log import LEAST, Spike, read_losses, spikes_of
from penstock.deploy.replay.replay_batch import ReplayRequest, archive_of, replay
from penstock.deploy.replay.replay_processes import ReplayForker
from penstock.deploy.replay.replay_report import numbers_of, tables
from penstock.proto.errors import PenstockError

__all__ = ["SPIKES", "show_spikes"]

SPIKES = 5
"""Number of spikes to show, if the command has no --spikes."""


@dataclass(frozen=True)
class Found:
    """Spike with the batch that was delivered at its step, or with the error that prevents its replay."""

    spike: Spike
    batch: dict[str, Any] | None
    error: PenstockError | None = None


def show_spikes(request: ReplayRequest, log: Path, most: int, peer: Peer, as_json: bool) -> None:
    """Find the highest spikes of a loss log, recreate the batches at their steps, and print them as tables or JSON. The
    step of the request is not used.

    Raises InvalidArgumentError for a log with too few losses. A log without spikes is no error. A spike whose batch
    cannot be replayed is reported; if no batch can be replayed, the highest spike's error is raised.
    """
    spikes = spikes_of(read_losses(log), most)
    found: list[Found] = []
    with ExitStack() as closing:
        archive = archive_of(request, peer)
        if archive is not None:
            closing.enter_context(archive)
        forker = closing.enter_context(ReplayForker()) if spikes else None
        for spike in spikes:
            wanted = replace(request, step=spike.step, out=_out_of(request.out, spike.step))
            try:
                found.append(Found(spike, replay(wanted, archive, forker)))
            except PenstockError as error:
                print(f"penstock: step {spike.step} cannot be replayed: {error}", file=sys.stderr, flush=True)
                found.append(Found(spike, None, error))
    if found and all(one.batch is None for one in found):
        assert found[0].error is not None
        raise found[0].error
    if as_json:
        print(json.dumps(_as_dict(found), indent=2))
    else:
        _show(found, most)


def _out_of(out: Path | None, step: int) -> Path | None:
    return None if out is None else out.with_name(f"{out.stem}-{step}{out.suffix}")


def _skip_argument(found: Sequence[dict[str, Any]]) -> str:
    """Return the argument with which a loader of penstock.data leaves out the samples of these batches, such as
    "skip=[range(3, 8)]"; "" if the numbers of the samples are not known."""
    ranges = sorted({(first, end) for batch in found for first, end in batch["samples"] or ()})
    return f"skip=[{', '.join(f'range({first}, {end})' for first, end in ranges)}]" if ranges else ""


def _batches(found: Sequence[Found]) -> list[dict[str, Any]]:
    return [one.batch for one in found if one.batch is not None]


def _as_dict(found: Sequence[Found]) -> dict[str, Any]:
    spikes = [
        {**one.spike.plain(), "error": None if one.error is None else str(one.error), "batch": one.batch}
        for one in found
    ]
    return {"spikes": spikes, "skip": _skip_argument(_batches(found)) or None}


def _show(found: Sequence[Found], most: int) -> None:
    overview = Table(
        "Loss spikes",
        ("step>", "loss>", "median>", "height>", "spike", "samples", "sources", "keys"),
        empty=f"No loss lies more than {LEAST:g} robust standard deviations above the running median.",
        note=""
        if len(found) == most
        else f"Only {len(found)} of {most}: no other spike lies more than {LEAST:g} robust "
        "standard deviations above the running median.",
    )
    for one in found:
        spike, batch = one.spike, one.batch
        overview.rows.append(
            (
                str(spike.step),
                f"{spike.loss:.6g}",
                f"{spike.median:.6g}",
                f"{spike.height:.3g}",
                f"steps {spike.first} to {spike.last}" if spike.first < spike.last else f"step {spike.first}",
                "not replayed" if batch is None else numbers_of(batch["samples"]),
                "" if batch is None else _counted(batch, "sources"),
                "" if batch is None else _counted(batch, "keys"),
            )
        )
    show([overview, *(table for batch in _batches(found) for table in tables(batch))])
    batches = _batches(found)
    for batch in batches:
        print()
        print(f"Step {batch['step']}: {batch['verification']}.{' Written to ' + batch['out'] if batch['out'] else ''}")
    skip = _skip_argument(batches)
    if skip:
        print()
        print(f"To leave out these samples, resume from a state before step {min(b['step'] for b in batches)} with")
        print(skip)
    elif batches:
        print()
        print("This loader has no skip=. Leave the samples out by a Filtered, or by their restore keys (keys=).")


def _counted(batch: dict[str, Any], what: str) -> str:
    counts = batch["counts"]
    if counts is None:
        return ""
    return ", ".join(f"{name or '-'}: {own['samples']}" for name, own in counts[what].items())
