"""Output of `penstock doctor` about a loader: tables or JSON, and the exit code."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from penstock.deploy.console.tables import Table, show
from penstock.deploy.doctor.loader_check import (
    METHODS,
    REPLAY,
    STATE,
    LoaderCheck,
    LoaderReport,
    LoaderRequest,
    examine,
)
from penstock.proto.errors import PenstockError
from penstock.runtime.telemetry.units import size

_METHODS = {
    4: "4: state_dict, load_state_dict, aggregate_state_dict, deaggregate_state_dict",
    2: "2: state_dict, load_state_dict",
    0: "none",
}


_SAVED_BY = {
    STATE: "its own state",
    METHODS: "aggregate and deaggregate, and counted replay",
    REPLAY: "counted replay",
    None: "cannot be saved",
}


_RECOVERS_FROM = "the launch's start, or the newest saved step that the workers of a box divide"


_WORKER_INFO = {
    "not_asked": "not asked",
    "of_run": "the worker's number in the run",
    "of_box": "the worker's number in its box",
    "none": "None",
}


def show_doctor(request: LoaderRequest, as_json: bool) -> int:
    try:
        diagnosis = examine(request)
    except PenstockError as error:
        _show_traceback(error.remote_traceback)
        raise
    for text in dict.fromkeys(check.traceback for examined in diagnosis.loaders for check in examined.checks):
        _show_traceback(text)
    if as_json:
        print(json.dumps(as_dict(diagnosis), indent=2))
    else:
        show(tables(diagnosis))
        print()
        for warning in diagnosis.warnings:
            print(f"Warning: {warning}.")
        print(f"{request.input_fn} {diagnosis.verdict.rstrip('.')}{'' if diagnosis.verdict.endswith('?') else '.'}")
    return diagnosis.code


def _show_traceback(text: str) -> None:
    if text:
        print(text.rstrip(), file=sys.stderr)


def as_dict(diagnosis: LoaderReport) -> dict[str, Any]:
    """Return the findings as plain values, whose names are stable for scripts."""
    request = diagnosis.request
    return {
        "input_fn": request.input_fn,
        "ok": diagnosis.code == 0,
        "exit_code": diagnosis.code,
        "verdict": diagnosis.verdict,
        "saved_by": diagnosis.saved_by,
        "warnings": diagnosis.warnings,
        "workers": [
            {
                "slot": examined.slot,
                "state_methods": examined.capabilities["state_methods"],
                "takes_strict": examined.capabilities["takes_strict"],
                "not_restartable": examined.capabilities["not_restartable"] or None,
                "unsaved": examined.streamed["unsaved"] or None,
                "length": examined.capabilities["length"] if examined.capabilities["length"] >= 0 else None,
                "own_iterator": examined.capabilities["is_iterator"],
                "own_workers": examined.capabilities["own_workers"],
                "looked_at_assignment": examined.streamed["looked_at"],
                "worker_info": examined.streamed["worker_info"],
                "generators": examined.capabilities["generators"] or None,
                "batches": examined.batches,
                "epochs_ended": examined.epochs_ended,
                "samples": examined.streamed["samples"],
                "state_bytes": examined.streamed["state_bytes"] or None,
                "checks": [_check(check) for check in examined.checks],
            }
            for examined in diagnosis.loaders
        ],
    }


def _check(check: LoaderCheck) -> dict[str, Any]:
    return {name: value for name, value in asdict(check).items() if name != "traceback"}


def tables(diagnosis: LoaderReport) -> list[Table]:
    request, loaders = diagnosis.request, diagnosis.loaders
    capabilities = loaders[0].capabilities
    workers = "1 worker" if request.workers == 1 else f"{request.workers} workers"
    about = Table(
        f"{request.input_fn}: {workers}, {request.batches} batches each",
        ("looked at", "found"),
        [
            ("state methods", _METHODS[capabilities["state_methods"]]),
            ("strict", "taken" if capabilities["takes_strict"] else "not taken"),
            ("length", str(capabilities["length"]) if capabilities["length"] >= 0 else "none"),
            ("its own iterator", "yes: input_fn is called for each epoch" if capabilities["is_iterator"] else "no"),
            ("own worker processes", str(capabilities["own_workers"])),
            ("persistent_workers", "yes" if "persistent_workers" in capabilities["not_restartable"] else "no"),
            ("read its assignment", "yes" if any(p.streamed["looked_at"] for p in loaders) else "no"),
            ("get_worker_info()", _WORKER_INFO[loaders[0].streamed["worker_info"]]),
            ("random generators", capabilities["generators"] or "none found"),
            ("saved by", _SAVED_BY[diagnosis.saved_by]),
            *([("recovers from", _RECOVERS_FROM)] if diagnosis.saved_by == METHODS else []),
        ],
    )
    stream = Table("Streaming", ("worker>", "batches>", "samples>", "epochs ended>", "state>"))
    checks = Table("Restored in a fresh process", ("worker>", "where", "next batches", "what differs"))
    for examined in loaders:
        state = examined.streamed["state_bytes"]
        counts = (examined.slot, examined.batches, examined.streamed["samples"], examined.epochs_ended)
        stream.rows.append((*map(str, counts), size(state) if state else ""))
        for check in sorted(examined.checks, key=lambda check: check.total):
            verdict = "exact" if check.exact else "failed" if check.differs is None else "differ"
            checks.rows.append((str(examined.slot), check.where, verdict, " ".join(check.what.split())))
    return [about, stream, checks]
