"""Figures, verdicts, tables and a picture made from measurements."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import PATH, SLOW, SNAPSHOTS
from benchmarks.modes import MODES
from benchmarks.report import markdown
from benchmarks.targets import judge

# ---- figures


# ---- targets


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


# ---- the program's arguments
