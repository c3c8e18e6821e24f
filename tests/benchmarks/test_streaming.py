"""The benchmark of streaming datasets: our own side of it in one small run, and its pure parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.streaming import Players, Size, figures
from benchmarks.streaming_data import KINDS, TINY
from benchmarks.streaming_ours import Floor, Ours
from benchmarks.streaming_player import answer_of
from benchmarks.streaming_report import FLOORS, OURS, judge, markdown

KEPT = ("1 KiB", "JPEG", "cold")
SMALL = Size(tuple(KINDS[name].fewer(500) for name in KEPT), TINY.fewer(200), 5, 4000, (), 10, 300, 0.0)


class InProcess(Players):
    """Our own readers, asked without a process of theirs. They raise what goes wrong."""

    def __init__(self) -> None:
        self._readers = {OURS: Ours(), **{name: Floor(name) for name in FLOORS}}
        self.versions: dict[str, dict[str, str]] = {name: {} for name in self._readers}
        self.failures: list[str] = []
        self.missing: dict[str, str] = {}

    def ask(self, name: str, **request: Any) -> dict[str, Any] | None:
        return answer_of(self._readers[name], request) if name in self._readers else None

    ask_fresh = ask


def test_all_suites_of_penstock_in_a_small_run(tmp_path: Path) -> None:
    found = figures(SMALL, 1, InProcess(), tmp_path)
    assert not found["failures"]
    assert len(found["warm"]) == 2 * 2 * 3
    assert all(by_reader[OURS][0]["seconds"] > 0 for by_reader in found["warm"].values())
    samples = next(kind.samples for kind in SMALL.kinds if kind.name == "cold")
    assert [by_reader[OURS][0]["samples"] for by_reader in found["cold"].values()] == [samples] * 3
    setting = {"machine": dict.fromkeys(("cores", "processor", "caches", "memory_gib", "kernel", "python"), "?")}
    noise = {"busy_before": 0.0, "load_before": 0.0, "others": 0.0}
    text = markdown({**found, **setting, "noise": noise, "command": "", "date": "", "commit": "", "took_s": 1.0})
    assert "1 KiB, shuffled" in text
    verdicts = judge(found)
    assert [verdict.met for verdict in verdicts if "mosaicml" in verdict.what] == [None] * 8
    assert all(verdict.met for verdict in verdicts if "order kept" in verdict.what)
