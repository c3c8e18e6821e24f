"""The talk with players: the floors' own, for they need neither torch nor daemons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.cases import Case, Times
from benchmarks.modes import MEMCPY, RAW_TCP, Stage

TIMES = Times(warm_s=0.01, span_s=0.05, latency_s=0.02, at_least=5, at_most_s=2.0)
CASE = Case("4 KiB", 4096)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "no-peers", tmp_path)
    yield stage
    stage.close()


def test_players_answer_in_turn(stage: Stage) -> None:
    stage.start([MEMCPY, RAW_TCP])
    assert stage.missing == {}
    for _ in range(2):
        for name, roles in ((MEMCPY, {"consumer"}), (RAW_TCP, {"consumer", "sender"})):
            found = stage.measure(name, CASE, TIMES)
            assert found is not None
            assert found["batches"] >= 5
            assert found["cpu_s"].keys() == roles
            assert found["memory"].keys() == roles
    assert stage.failures == []


def test_a_failure_is_told_and_the_player_goes_on(stage: Stage) -> None:
    stage.start([MEMCPY])
    assert stage.measure(MEMCPY, Case("nothing", 4096, slots=0), TIMES) is None
    assert len(stage.failures) == 1
    assert stage.failures[0].startswith(f"{MEMCPY}, nothing: ")
    assert stage.measure(MEMCPY, CASE, TIMES) is not None


def test_players_do_not_see_the_local_penstock(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_COORDINATOR", "elsewhere:1")
    stage.start([MEMCPY])
    pid = stage._players[MEMCPY]._process.pid
    assert b"PENSTOCK_" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert b"PATH=" in Path(f"/proc/{pid}/environ").read_bytes()
    assert "PENSTOCK_COORDINATOR" in os.environ
