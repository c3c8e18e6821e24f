"""The benchmarks are a package of the clone and of no distribution, so they are found from its root."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.cases import PATH, SLOW, SNAPSHOTS
from benchmarks.modes import ALONE, MODES, PENSTOCK, STATEFUL, TCP


def record(rate: float, cpu_s: dict[str, float] | None = None, states: int = 0) -> dict[str, Any]:
    """Return the answer of a player that took `rate` batches in a second."""
    cpu_s = cpu_s or {"consumer": 0.5, "worker": 0.25}
    return {
        "batches": rate,
        "span_s": 1.0,
        "thread_s": 0.4,
        "cpu_s": cpu_s,
        "states": states,
        "memory": {role: {"processes": 1, "pss": 100.0, "files": 10.0} for role in cpu_s},
        "rings": [1 << 20],
        "latency_us": {"p50": 7.0, "p99": 70.0, "samples": 1000},
        "open_s": 1.5,
    }


def slots_record(slots: int, share: float) -> dict[str, Any]:
    return {
        "slots": slots,
        "rate": 50 * slots * share,
        "share": share,
        "appliance_s": 0.01,
        "first_batch_s": 1.5,
        "last_slot_s": 2.5,
        "second_loader_s": 1.0,
        "memory": {"runner": {"processes": slots, "pss": 10.0 * slots, "files": 1.0}},
        "rings": [131072] * slots,
        "ready": 30.0 * slots,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """A run of all suites in which every mode takes 1000 batches a second, three rounds each."""
    names = [name for name in MODES if name != ALONE]
    path = {case.name: {name: [record(1000.0) for _ in range(3)] for name in names} for case in PATH}
    return {
        "date": "2026-01-01",
        "command": "python -m benchmarks.full_path",
        "commit": "0123456789ab",
        "machine": {
            "processor": "Test",
            "cores": 2,
            "caches": "L1 48K",
            "memory_gib": 8.0,
            "kernel": "6.0",
            "python": "3.11",
        },
        "versions": {"penstock": {"torch": "2.13.0"}},
        "settings": {"rounds": 3, "state_rounds": 5, "times": {"span_s": 0.8}},
        "noise": {"busy_before": 0.0, "load_before": 0.0, "others": 0.0, "steal": 0.0},
        "sizes": {case.name: case.nbytes for case in PATH},
        "took_s": 600.0,
        "missing": {},
        "failures": [],
        "path": path,
        "slow": {
            case.name: {name: [record(500.0) for _ in range(3)] for name in (ALONE, PENSTOCK, TCP)} for case in SLOW
        },
        "snapshots": {
            case.name: {mode: [record(1000.0, states=500)] for mode in (PENSTOCK, STATEFUL)} for case in SNAPSHOTS
        },
        "slots": {count: [slots_record(int(count), 0.99)] for count in ("16", "64", "1")},
    }
