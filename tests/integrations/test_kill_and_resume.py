"""The examples are killed with SIGKILL and started again: every step is there, equal to the last bit.

That Accelerate's loader and Lightning's may be ahead, and that this is handled at every step, is in test_lookahead.py
and test_lightning.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
        cluster.add_worker(4, "--allow", "train_lm", allow="integrations")
        yield cluster


def through(cluster: Cluster, job: str) -> dict[str, str]:
    """Return the variables by which a training job finds these daemons."""
    return {"PENSTOCK_COORDINATOR": cluster.address, "PENSTOCK_TOKEN": TOKEN, "PENSTOCK_JOB": job, **SEED}


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


def same(line: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a line that may not differ between two lives of a job."""
    return {name: value for name, value in line.items() if name not in ("time", "waited_s")}


def test_a_plain_loop_with_everything_embedded(cluster: Cluster, tmp_path: Path) -> None:
    """Resume through a coordinator elsewhere; the batches do not show it."""
    training = Training("integrations.plain", tmp_path / "killed", SEED)
    killed = training.killed(1, *OPTIONS, steps=STEPS, at=KILLED_AT)
    training.environment = through(cluster, "plain-resumed")
    resumed = training.to_the_end(1, *OPTIONS, steps=STEPS)
    whole = Training("integrations.plain", tmp_path / "whole", through(cluster, "plain-whole"))
    check(killed, resumed, whole.to_the_end(1, *OPTIONS, steps=STEPS))


@pytest.mark.parametrize(
    ("module", "ranks"),
    [
        pytest.param("train_lm.train", 2, id="DDP"),
        pytest.param("integrations.fsdp2", 2, id="FSDP2"),
        pytest.param("integrations.titan_style", 2, id="torchtitan-style"),
        pytest.param("integrations.pipeline_parallel", 2, id="pipeline parallel"),
        pytest.param("integrations.accelerate_loop", 2, id="Accelerate"),
        pytest.param("integrations.lightning_loop", 1, id="Lightning"),
        pytest.param("integrations.hf_trainer", 1, id="Hugging Face Trainer"),
    ],
)
def test_a_script(cluster: Cluster, tmp_path: Path, module: str, ranks: int) -> None:
    """Set torchrun's variables; torchrun itself, which starts in seconds, is in tests/system/test_embedded.py."""
    training = Training(module, tmp_path / "killed", through(cluster, f"{module}-killed"))
    killed = training.killed(ranks, *OPTIONS, steps=STEPS, at=KILLED_AT)
    resumed = training.to_the_end(ranks, *OPTIONS, steps=STEPS)
    whole = Training(module, tmp_path / "whole", through(cluster, f"{module}-whole"))
    check(killed, resumed, whole.to_the_end(ranks, *OPTIONS, steps=STEPS))


def test_tensor_parallel(cluster: Cluster, tmp_path: Path) -> None:
    """Two boxes of two ranks; then what they saved goes on with one box of two, and that with two of one."""
    module = "integrations.tensor_parallel"
    training = Training(module, tmp_path / "killed", through(cluster, "tp-killed"))
    killed = training.killed(4, *OPTIONS, steps=STEPS, at=KILLED_AT)
    resumed = training.to_the_end(4, *OPTIONS, steps=STEPS)
    one_box = training.to_the_end(2, *OPTIONS, "--tp", "2", steps=STEPS + 2)
    two_boxes = training.to_the_end(2, *OPTIONS, "--tp", "1", steps=STEPS + 4)

    whole = Training(module, tmp_path / "whole", through(cluster, "tp-whole")).to_the_end(4, *OPTIONS, steps=STEPS + 4)
    for first, other in (("rank0.jsonl", "rank1.jsonl"), ("rank2.jsonl", "rank3.jsonl")):
        assert whole[first] == whole[other], "the ranks of a group had other batches, or another loss"
    assert whole["rank0.jsonl"] != whole["rank2.jsonl"]
    check(killed, resumed, {rank: lines[:STEPS] for rank, lines in whole.items()})

    expected = rows(whole["rank0.jsonl"], whole["rank2.jsonl"])[STEPS:]
    assert rows(one_box["rank0.jsonl"]) == expected[:2]
    assert rows(two_boxes["rank0.jsonl"], two_boxes["rank1.jsonl"]) == expected[2:]
    assert losses(one_box["rank0.jsonl"]) + losses(two_boxes["rank0.jsonl"], two_boxes["rank1.jsonl"]) == pytest.approx(
        losses(whole["rank0.jsonl"], whole["rank2.jsonl"])[STEPS:], rel=1e-4
    )


def rows(*boxes: list[dict[str, Any]]) -> list[list[int]]:
    """The pieces of each global batch, in its order: boxes have its rows in turn."""
    return [list(chain(*zip(*(line["pieces"] for line in step), strict=True))) for step in zip(*boxes, strict=True)]


def losses(*boxes: list[dict[str, Any]]) -> list[float]:
    """The mean over the boxes. Sums are made in another order on another topology, so it is not the same to the bit."""
    return [sum(float.fromhex(line["loss"]) for line in step) / len(boxes) for step in zip(*boxes, strict=True)]
