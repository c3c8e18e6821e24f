"""The benchmark of the sources: all of it once with little data, and what its report says of given figures."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.sources import Amounts, figures, sizes
from benchmarks.sources_cases import Rows, documents
from benchmarks.sources_report import judge, markdown

SETTING = {
    "machine": dict.fromkeys(("cores", "processor", "caches", "memory_gib", "kernel", "python"), "?"),
    "noise": {"busy_before": 0.0, "load_before": 0.0, "others": 0.0},
    "command": "",
    "date": "",
    "commit": "",
    "took_s": 1.0,
}
FEW = Amounts(rows=2_000, documents=200, batches=10, lengths=(10_000, 10**9), theirs=10_000, processes=(0,))


def test_everybody_has_a_turn() -> None:
    rows, texts = Rows(FEW.rows), documents(FEW.documents)
    found = figures(rows, texts, FEW)
    names = {"Penstock", "Penstock, reseeded", "DataLoader", "DataLoader, DistributedSampler", "StatefulDataLoader"}
    assert set(found["read"]["0"]) == names
    assert {name: set(by) for name, by in found["seek"].items()} == {
        "10000": {"Penstock", "StatefulDataLoader"},
        str(10**9): {"Penstock"},
    }
    assert set(found["packed"]) == {"1", "64", "by hand"}
    results = {**SETTING, "rounds": [found], "sizes": sizes(rows, texts, 0)}
    text = markdown(results)
    assert "| DataLoader, 0 processes |" in text
    assert "| 1,000,000,000 |" in text
    assert [verdict.met for verdict in judge(results)].count(None) == 0


def _results(seek: float, cost: float) -> dict[str, Any]:
    one = {"Penstock": 100.0, "DataLoader": 200.0}
    rounds = [
        {
            "read": {"0": one, "2": one},
            "saved": {processes: {"Penstock": {"rate": 90.0, "cost": cost}} for processes in ("0", "2")},
            "seek": {str(10**9): {"Penstock": seek}},
            "packed": {"1": {"plain": 100.0, "saved": {"rate": 90.0, "cost": cost}}, "by hand": {"plain": 100.0}},
        }
    ]
    return {**SETTING, "rounds": rounds, "sizes": {}}


@pytest.mark.parametrize(("seek", "cost", "met"), [(0.0099, 0.05, True), (0.0101, 0.051, False)])
def test_what_is_missed_is_said(seek: float, cost: float, met: bool) -> None:
    results = _results(seek, cost)
    verdicts = judge(results)
    assert len(verdicts) == 4
    assert {verdict.met for verdict in verdicts} == {met}
    assert "0.50x" in markdown(results)
