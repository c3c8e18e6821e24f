"""Figures, verdicts, tables and a picture made from measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.cases import PATH, SLOW, SNAPSHOTS
from benchmarks.figures import RECEIVING, Figures, cpu_us, loss, median, rate, ratio
from benchmarks.full_path import QUICK, _shown, arguments, plan_of
from benchmarks.modes import DATALOADER, MODES, PENSTOCK, RAW_TCP, TCP, TF
from benchmarks.report import BEGIN, END, between, markdown
from benchmarks.suites import Plan, turns
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


def test_rounds_without_a_figure_are_left_out() -> None:
    figures = {"c": {"a": [record(100), None, record(90)], "b": [record(50), record(1), None]}}
    assert ratio(figures, ("c", "a"), ("c", "b")) == 2
    assert ratio(figures, ("c", "a"), ("c", "nobody")) is None
    assert rate(figures, ("d", "a")) is None
    assert median([None, None]) is None


def test_loss_is_what_is_missing_of_the_base() -> None:
    figures: Figures = {"with": {"a": [record(95)]}, "without": {"a": [record(100)]}}
    assert loss(figures, ("with", "a"), ("without", "a")) == pytest.approx(0.05)
    assert loss(figures, ("without", "a"), ("with", "a")) == pytest.approx(1 - 100 / 95)


def test_the_receiver_is_on_the_receiving_side() -> None:
    found = record(1000, consumer=0.1, receiver=0.2, daemon=0.3, runner=0.4)
    assert cpu_us(RECEIVING)(found) == pytest.approx(300)
    assert cpu_us(None)(found) == pytest.approx(700)
    assert cpu_us(["runner"])(found) == pytest.approx(400)


def test_each_round_begins_with_another() -> None:
    assert [turns(n, ["a", "b", "c"]) for n in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


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


def test_a_bound_from_above_is_missed_by_more(results: dict[str, Any]) -> None:
    what = f"{PENSTOCK}, 64 KiB, the training thread's processor time a batch"
    of_case = results["path"]["64 KiB"][PENSTOCK]
    for microseconds, met in ((15.0, True), (15.5, False)):
        for entry in of_case:
            entry["thread_s"] = microseconds * 1e-6 * entry["batches"]
        (verdict,) = [v for v in judge(results) if v.what == what]
        assert verdict.met is met
        assert verdict.wanted == "at most 15.0 us"


def test_only_suites_that_were_run_are_judged(results: dict[str, Any]) -> None:
    del results["path"], results["slow"], results["snapshots"]
    assert {v.suite for v in judge(results)} == {"slots"}


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


def test_rows_have_as_many_cells_as_their_head(results: dict[str, Any]) -> None:
    results["path"]["4 KiB"][TF] = [None, None, None]
    cells = None
    for line in markdown(results).splitlines():
        found = line.count("|") if line.startswith("|") else None
        assert cells is None or found is None or found == cells, line
        cells = found


def test_what_is_missing_is_told(results: dict[str, Any]) -> None:
    for case in results["path"].values():
        case[TF] = [None, None, None]
    results["missing"] = {TF: "run make bench-peers"}
    results["failures"] = ["64 slots: no result within 120 s"]
    text = markdown(results)
    assert f"- Not measured: {TF} (run make bench-peers)." in text
    assert "- Failed: 64 slots: no result within 120 s." in text
    assert text.count("not measured: run make bench-peers") == len(PATH)
    assert "3 not measured" in text  # the three targets that are times of the tf.data service


def test_a_busy_machine_is_told(results: dict[str, Any]) -> None:
    results["noise"]["others"] = 1.5
    assert "**The machine was not idle" in markdown(results)


def test_a_suite_alone_has_its_table_alone(results: dict[str, Any]) -> None:
    for suite in ("path", "slow", "slots"):
        del results[suite]
    text = markdown(results)
    assert "Snapshots" in text
    assert "Ready batches" not in text


def test_a_picture_is_drawn(results: dict[str, Any], tmp_path: Path) -> None:
    from benchmarks.plot import draw

    results["path"]["8 MiB"]["Ray Data"] = [None]
    results["path"]["1 MiB"][RAW_TCP] = [None]
    draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# ---- the document


def test_only_text_between_the_markers_changes() -> None:
    before = f"head\n{BEGIN}\nold\n{END}\ntail\n"
    after = between(before, "new")
    assert after == f"head\n{BEGIN}\n\nnew\n\n{END}\ntail\n"
    assert between(after, "newer") == after.replace("new", "newer")


@pytest.mark.parametrize("document", ["", BEGIN, END, f"{END}{BEGIN}"])
def test_a_document_without_markers_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="must contain the markers"):
        between(document, "new")


def test_our_document_has_them() -> None:
    assert "marked" in between(DOCUMENT.read_text(), "marked")


# ---- the program's arguments


def test_a_quick_run_is_one_short_round() -> None:
    assert plan_of(arguments(["--quick"])) == QUICK
    assert plan_of(arguments([])) == Plan()
    plan = plan_of(arguments(["--rounds", "7", "--seconds", "0.5"]))
    assert (plan.rounds, plan.state_rounds, plan.times.span_s) == (7, 7, 0.5)


def test_the_command_is_shown_without_folders() -> None:
    given = ["--quick", "--suite", "slow", "--rounds", "2", "--peers", "/secret", "--out", "/secret"]
    assert " ".join(_shown(arguments(given))) == "--quick --suite slow --rounds 2"
