"""NeMo Automodel's recipes, killed with SIGKILL, started again, and resumed on other ranks: `make frameworks`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from framework_runs import check, daemons, started
from kill_and_resume import Line, Training

pytestmark = pytest.mark.timeout(600)

OPTIONS = ("integrations.automodel_recipe", "--checkpoint-every", "3")
EPOCH = 64
"""Steps of an epoch."""
STEPS, KILLED_AT = EPOCH + 3, 5


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
    at_the_end = training(cluster, "epoch", tmp_path / "epoch")
    at_the_end.to_the_end(2, *OPTIONS, steps=EPOCH)
    after = at_the_end.to_the_end(2, *OPTIONS, steps=STEPS)
    assert after == {rank: lines[EPOCH:] for rank, lines in whole.items()}


def test_other_numbers_of_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """From two ranks with two microbatches to four ranks with one, and back."""
    whole = training(cluster, "two", tmp_path / "whole").to_the_end(2, *OPTIONS, steps=9)
    moved = training(cluster, "moved", tmp_path / "moved")
    found = [
        samples(*moved.to_the_end(ranks, *OPTIONS, steps=steps).values()) for ranks, steps in ((2, 3), (4, 6), (2, 9))
    ]
    assert [step for part in found for step in part] == samples(*whole.values())


def samples(*boxes: list[Line]) -> list[list[int]]:
    """The samples of each step, in any order: microbatches deal them to boxes."""
    return [sorted(piece for line in step for piece in line["pieces"]) for step in zip(*boxes, strict=True)]
