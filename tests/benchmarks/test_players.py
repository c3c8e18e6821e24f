"""The talk with players: the floors' own, for they need neither torch nor daemons."""

from __future__ import annotations

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
