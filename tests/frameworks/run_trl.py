"""TRL's SFTTrainer, killed with SIGKILL, started again, and resumed on other numbers of ranks: `make frameworks`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from framework_runs import check, daemons, in_turn, started
from kill_and_resume import Training

pytestmark = pytest.mark.timeout(600)

OPTIONS = ("integrations.sft_trainer", "--checkpoint-every", "3")
STEPS, KILLED_AT = 70, 5
"""In the first epoch, which has 64 steps, and in the second."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with daemons(tmp_path_factory.mktemp("state")) as found:
        yield found


def training(cluster: Cluster, job: str, out: Path) -> Training:
    return started(cluster, "late_import", job, out)


def test_killed_and_resumed(cluster: Cluster, tmp_path: Path) -> None:
    killed_one = training(cluster, "killed", tmp_path / "killed")
    killed = killed_one.killed(2, *OPTIONS, steps=STEPS, at=KILLED_AT)
    resumed = killed_one.to_the_end(2, *OPTIONS, steps=STEPS)
    whole = training(cluster, "whole", tmp_path / "whole").to_the_end(2, *OPTIONS, steps=STEPS)
    check(killed, resumed, whole, STEPS)


def test_other_numbers_of_ranks(cluster: Cluster, tmp_path: Path) -> None:
    whole = training(cluster, "one", tmp_path / "whole").to_the_end(1, *OPTIONS, steps=12)
    moved = training(cluster, "moved", tmp_path / "moved")
    found = in_turn(*moved.to_the_end(2, *OPTIONS, steps=4).values())
    found += in_turn(*moved.to_the_end(1, *OPTIONS, steps=8).values())
    found += in_turn(*moved.to_the_end(2, *OPTIONS, steps=12).values())
    assert found == in_turn(whole["rank0.jsonl"])
