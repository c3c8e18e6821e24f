"""The examples of plain torch are killed with SIGKILL and started again: every step is there, equal to the last bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import TOKEN, Cluster, running
from kill_and_resume import EXAMPLES, Lines, Training

KILLED_AT = 14
MORE = 6
"""Steps that it goes on for."""
OPTIONS = ("--checkpoint-every", "5")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running(tmp_path_factory.mktemp("state"), PYTHONPATH=path) as cluster:
        cluster.add_worker(8, "--allow", "train_lm", allow="integrations")
        yield cluster


def through(cluster: Cluster, job: str) -> dict[str, str]:
    """What tells a training job of these daemons. One seed, so that all runners are forked from one interpreter."""
    return {
        "PENSTOCK_COORDINATOR": cluster.address,
        "PENSTOCK_TOKEN": TOKEN,
        "PENSTOCK_JOB": job,
        "PENSTOCK_SEED": "1",
    }


def check(killed: Lines, resumed: Lines, whole: Lines) -> None:
    """Both lives of a training are parts of the one that was not killed, and together all of it."""
    assert killed.keys() == resumed.keys() == whole.keys()
    for rank, lines in whole.items():
        steps = [line["step"] for line in lines]
        assert steps == list(range(1, len(steps) + 1))
        first = resumed[rank][0]["step"]
        assert 1 < first <= len(killed[rank]) + 1, "it goes on from a checkpoint, and leaves out nothing"
        for life, at in ((killed[rank], 0), (resumed[rank], first - 1)):
            assert [same(line) for line in life] == [same(line) for line in lines[at : at + len(life)]]
        assert len(resumed[rank]) == len(lines) - first + 1


def same(line: dict[str, object]) -> dict[str, object]:
    """What of a line may not differ between two lives."""
    return {name: value for name, value in line.items() if name not in ("time", "waited_s")}


@pytest.mark.parametrize(
    ("module", "ranks"),
    [
        pytest.param("train_lm.train", 2, id="DDP"),
        pytest.param("integrations.fsdp2", 2, id="FSDP2"),
        pytest.param("integrations.titan_style", 2, id="torchtitan-style"),
        pytest.param("integrations.tensor_parallel", 4, id="tensor parallel"),
    ],
)
def test_killed_and_started_again(cluster: Cluster, tmp_path: Path, module: str, ranks: int) -> None:
    training = Training(module, tmp_path / "killed", through(cluster, f"{module}-killed"))
    killed = training.killed(ranks, *OPTIONS, at=KILLED_AT)
    steps = max(log[-1]["step"] for log in killed.values()) + MORE
    resumed = training.to_the_end(ranks, *OPTIONS, steps=steps)
    whole = Training(module, tmp_path / "whole", through(cluster, f"{module}-whole"))
    check(killed, resumed, whole.to_the_end(ranks, *OPTIONS, steps=steps))
