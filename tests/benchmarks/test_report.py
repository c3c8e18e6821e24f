"""Figures, verdicts, tables and a picture made from measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import PATH, SLOW, SNAPSHOTS
from benchmarks.figures import Figures, rate, ratio
from benchmarks.modes import DATALOADER, MODES, PENSTOCK, TCP
from benchmarks.report import BEGIN, END, between, markdown
from benchmarks.targets import TARGETS, judge

DOCUMENT = Path(__file__).parent.parent.parent / "benchmarks" / "README.md"


def record(batches: int, span_s: float = 1.0, **cpu_s: float) -> dict[str, Any]:
    return {"batches": batches, "span_s": span_s, "cpu_s": cpu_s}


# ---- figures


def test_a_ratio_is_the_median_of_round_ratios() -> None:
    figures: Figures = {"c": {"a": [record(100), record(40), record(12)], "b": [record(10), record(4), record(3)]}}
    assert ratio(figures, ("c", "a"), ("c", "b")) == 10  # of 10, 10 and 4
    assert rate(figures, ("c", "a")) == 40
    assert rate(figures, ("c", "b")) == 4
    figures["c"]["a"].reverse()
    assert ratio(figures, ("c", "a"), ("c", "b")) == 10  # of 1.2, 10 and 33


# ---- targets


def test_every_target_finds_its_figures(results: dict[str, Any]) -> None:
    verdicts = judge(results)
    assert len(verdicts) == len(TARGETS)
    assert [v.what for v in verdicts if v.met is None] == []


def test_verdicts_say_met_missed_and_not_measured(results: dict[str, Any]) -> None:
    path = results["path"]
    path["1 MiB"][PENSTOCK] = [{**r, "batches": 18_000} for r in path["1 MiB"][PENSTOCK]]
    path["4 KiB"][TCP] = [None, None, None]
    found = {v.what: v for v in judge(results)}
    assert found[f"{PENSTOCK}, 1 MiB"].met is True
    assert found[f"{PENSTOCK}, 1 MiB"].word == "met"
    assert found[f"{PENSTOCK}, 64 KiB"].word == "MISSED"
    assert found[f"{PENSTOCK}, 64 KiB"].found == "1,000/s"
    assert found[f"{TCP}, 4 KiB"].word == "not measured"
    assert found[f"{PENSTOCK}, 1 MiB, to {DATALOADER}"].found == "18.00x"


# ---- tables


def test_the_report_has_all_modes_cases_targets(results: dict[str, Any]) -> None:
    text = markdown(results)
    for case in (*PATH, *SLOW, *SNAPSHOTS):
        assert case.name in text
    for name in MODES:
        assert f"| {name}" in text
    for verdict in judge(results):
        assert f"| {verdict.what} | {verdict.wanted} | {verdict.found} | {verdict.word} |" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(" |" in line for line in lines)
    assert "not idle" not in text


# ---- the document


def test_only_text_between_the_markers_changes() -> None:
    before = f"head\n{BEGIN}\nold\n{END}\ntail\n"
    after = between(before, "new")
    assert after == f"head\n{BEGIN}\n\nnew\n\n{END}\ntail\n"
    assert between(after, "newer") == after.replace("new", "newer")


# ---- the program's arguments
