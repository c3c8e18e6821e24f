"""The examples are killed with SIGKILL and started again: every step is there, and those of both lives are equal to the
last bit. All scripts train one model on one stream, so the batches are compared with one training that nobody kills.

That Accelerate's loader and Lightning's may be ahead, and that this is handled at every step, is in test_lookahead.py
and test_lightning.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cluster import TOKEN, Cluster, running
from interpreters import EXAMPLES
from kill_and_resume import Lines, Training

pytestmark = pytest.mark.timeout(300)  # up to five starts, of up to four ranks each

KILLED_AT, STEPS = 7, 33
"""Step at which the job is killed, in the first epoch of 32 steps, and the last step, in the second epoch."""
OPTIONS = ("--checkpoint-every", "5")
SEED = {"PENSTOCK_SEED": "1"}
"""Seed of all jobs: the same, so that all runners are forked from one interpreter."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running(tmp_path_factory.mktemp("state"), PYTHONPATH=path) as cluster:
        cluster.add_worker(4, allow="integrations")
        yield cluster


def through(cluster: Cluster, job: str) -> dict[str, str]:
    """Return the variables by which a training job finds these daemons."""
    return {"PENSTOCK_COORDINATOR": cluster.address, "PENSTOCK_TOKEN": TOKEN, "PENSTOCK_JOB": job, **SEED}


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of a training in one process that nobody kills."""
    training = Training("integrations.plain", tmp_path_factory.mktemp("whole") / "out", through(cluster, "whole"))
    return training.to_the_end(1, *OPTIONS, steps=STEPS + 4)["rank0.jsonl"]


def check(killed: Lines, resumed: Lines, whole: list[dict[str, Any]], boxes: Sequence[Sequence[int]]) -> None:
    """Both lives of a training are parts of the one that was not killed, and together all of it. `boxes`: the ranks
    that have a global batch together."""
    assert killed.keys() == resumed.keys()
    first = resumed["rank0.jsonl"][0]["step"]
    for rank, lines in killed.items():
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert [line["step"] for line in resumed[rank]] == list(range(first, STEPS + 1))
        assert 1 < first <= len(lines) + 1, "it goes on from a checkpoint, and leaves out nothing"
        again = lines[first - 1 :]
        assert again == resumed[rank][: len(again)]
    length = min(map(len, killed.values()))  # the kill comes to ranks at different lines
    expected = rows(whole)
    for ranks in boxes:
        names = [f"rank{rank}.jsonl" for rank in ranks]
        assert rows(*(killed[name][:length] for name in names)) == expected[:length]
        assert rows(*(resumed[name] for name in names)) == expected[first - 1 : STEPS]


def test_a_plain_loop_with_everything_embedded(cluster: Cluster, tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    """Resume through a coordinator elsewhere; neither batches nor losses show it."""
    training = Training("integrations.plain", tmp_path / "killed", SEED)
    killed = training.killed(1, *OPTIONS, steps=STEPS, at=KILLED_AT)
    training.environment = through(cluster, "plain-resumed")
    resumed = training.to_the_end(1, *OPTIONS, steps=STEPS)
    check(killed, resumed, whole, [[0]])
    assert resumed["rank0.jsonl"] == whole[STEPS - len(resumed["rank0.jsonl"]) : STEPS]


@pytest.mark.parametrize(
    ("module", "boxes"),
    [
        pytest.param("integrations.fsdp2", [[0, 1]], id="FSDP2"),
        pytest.param("integrations.titan_style", [[0, 1]], id="torchtitan-style"),
        pytest.param("integrations.pipeline_parallel", [[0], [1]], id="pipeline parallel"),
        pytest.param("integrations.accelerate_loop", [[0, 1]], id="Accelerate"),
        pytest.param("integrations.lightning_loop", [[0]], id="Lightning"),
        pytest.param("integrations.hf_trainer", [[0]], id="Hugging Face Trainer"),
    ],
)
def test_a_script(
    cluster: Cluster, tmp_path: Path, whole: list[dict[str, Any]], module: str, boxes: list[list[int]]
) -> None:
    """Set torchrun's variables; torchrun itself, which starts in seconds, is in tests/system/test_embedded.py."""
    training, ranks = Training(module, tmp_path / "killed", through(cluster, f"{module}-killed")), sum(map(len, boxes))
    killed = training.killed(ranks, *OPTIONS, steps=STEPS, at=KILLED_AT)
    check(killed, training.to_the_end(ranks, *OPTIONS, steps=STEPS), whole, boxes)


def test_tensor_parallel(cluster: Cluster, tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    """Two boxes of two ranks; then what they saved goes on with one box of two, and that with two of one."""
    training = Training("integrations.tensor_parallel", tmp_path / "killed", through(cluster, "tp-killed"))
    killed = training.killed(4, *OPTIONS, steps=STEPS, at=KILLED_AT)
    resumed = training.to_the_end(4, *OPTIONS, steps=STEPS)
    one_box = training.to_the_end(2, *OPTIONS, "--tp", "2", steps=STEPS + 2)
    two_boxes = training.to_the_end(2, *OPTIONS, "--tp", "1", steps=STEPS + 4)

    for first, other in (("rank0.jsonl", "rank1.jsonl"), ("rank2.jsonl", "rank3.jsonl")):
        assert resumed[first] == resumed[other], "the ranks of a group had other batches, or another loss"
    check(killed, resumed, whole, [[0, 2], [1, 3]])
    assert rows(one_box["rank0.jsonl"]) == rows(whole)[STEPS : STEPS + 2]
    assert rows(two_boxes["rank0.jsonl"], two_boxes["rank1.jsonl"]) == rows(whole)[STEPS + 2 :]
    found = losses(resumed["rank0.jsonl"], resumed["rank2.jsonl"]) + losses(one_box["rank0.jsonl"])
    found += losses(two_boxes["rank0.jsonl"], two_boxes["rank1.jsonl"])
    assert found == pytest.approx(losses(whole)[-len(found) :], rel=1e-3)


def rows(*boxes: list[dict[str, Any]]) -> list[list[int]]:
    """The pieces of each global batch, in its order: boxes have its rows in turn."""
    return [list(chain(*zip(*(line["pieces"] for line in step), strict=True))) for step in zip(*boxes, strict=True)]


def losses(*boxes: list[dict[str, Any]]) -> list[float]:
    """The mean over the boxes. Sums are made in another order on another topology, so it is not the same to the bit."""
    return [sum(float.fromhex(line["loss"]) for line in step) / len(boxes) for step in zip(*boxes, strict=True)]
