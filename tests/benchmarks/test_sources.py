"""The benchmark of the sources: all of it once with little data, and what its report says of given figures."""

from __future__ import annotations

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
