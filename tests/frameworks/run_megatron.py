"""Megatron-core, killed with SIGKILL, started again, and resumed on other ranks: `make frameworks` runs this.

The example is run as it is, on the CPU (tests/inputs/cpu_megatron.py), on gloo. It checks itself that the consumed
samples of a checkpoint are those of its iteration.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import validation_rows
from cluster import TOKEN, Cluster, running
from interpreters import EXAMPLES
from kill_and_resume import Line, Training

from penstock.client import DataLoader
from penstock.client.integrations.megatron_data import DataIterator, RankGroups
from penstock.client.testing import FakeAppliance

pytestmark = pytest.mark.timeout(600)

MODULE = "cpu_megatron"
STEPS, KILLED_AT = 9, 4
OPTIONS = ("--checkpoint-every", "3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running(tmp_path_factory.mktemp("state"), PYTHONPATH=path) as cluster:
        cluster.add_worker(4, allow="integrations")
        yield cluster


def training(cluster: Cluster, job: str, out: Path) -> Training:
    variables = {"PENSTOCK_COORDINATOR": cluster.address, "PENSTOCK_TOKEN": TOKEN, "PENSTOCK_SEED": "1"}
    return Training(MODULE, out, {**variables, "PENSTOCK_JOB": job})


@pytest.mark.parametrize(
    ("split", "ranks"),
    [
        pytest.param(("--tp", "2"), 2, id="tensor"),
        pytest.param(("--cp", "2"), 2, id="context"),
        pytest.param(("--pp", "2"), 2, id="pipeline"),
        pytest.param(("--pp", "2", "--chunks", "2"), 2, id="virtual-pipeline"),
        pytest.param(("--tp", "2", "--pp", "2"), 4, id="tensor-and-pipeline"),
    ],
)
def test_killed_and_resumed(cluster: Cluster, tmp_path: Path, split: tuple[str, ...], ranks: int) -> None:
    name = "-".join(split).replace("--", "")
    killed_one = training(cluster, f"killed-{name}", tmp_path / "killed")
    killed = killed_one.killed(ranks, *OPTIONS, *split, steps=STEPS, at=KILLED_AT)
    resumed = killed_one.to_the_end(ranks, *OPTIONS, *split, steps=STEPS)
    whole = training(cluster, f"whole-{name}", tmp_path / "whole").to_the_end(ranks, *OPTIONS, *split, steps=STEPS)
    for rank, lines in whole.items():
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert pieces(lines) == pieces(whole["rank0.jsonl"]), "all ranks of the box have the same samples"
        first = resumed[rank][0]["step"]
        assert first in (4, 7), "it goes on from a checkpoint"
        assert killed[rank] == lines[: len(killed[rank])]
        assert resumed[rank] == lines[first - 1 :]


def test_other_topologies(cluster: Cluster, tmp_path: Path) -> None:
    """From two boxes to one of two ranks, to one pipeline, to two boxes of two ranks, to context parallelism."""
    whole = training(cluster, "dp2", tmp_path / "whole").to_the_end(2, *OPTIONS, steps=15)
    moved = training(cluster, "moved", tmp_path / "moved")
    expected = samples(whole["rank0.jsonl"], whole["rank1.jsonl"])
    found = samples(*moved.to_the_end(2, *OPTIONS, steps=3).values())
    of_tp = moved.to_the_end(2, *OPTIONS, "--tp", "2", steps=6)
    found += samples(of_tp["rank0.jsonl"])
    of_pp = moved.to_the_end(2, *OPTIONS, "--pp", "2", steps=9)
    found += samples(of_pp["rank1.jsonl"])
    of_four = moved.to_the_end(4, *OPTIONS, "--tp", "2", steps=12)
    found += samples(of_four["rank0.jsonl"], of_four["rank2.jsonl"])
    of_cp = moved.to_the_end(2, *OPTIONS, "--cp", "2", steps=15)  # another model here, so losses are not compared
    found += samples(of_cp["rank0.jsonl"])
    assert found == expected
    parts = [(of_tp["rank0.jsonl"],), (of_pp["rank1.jsonl"],), (of_four["rank0.jsonl"], of_four["rank2.jsonl"])]
    mean = [loss for part in parts for loss in losses(*part)]
    assert mean == pytest.approx(losses(whole["rank0.jsonl"], whole["rank1.jsonl"])[3:12], rel=1e-4)


@pytest.mark.filterwarnings("ignore")  # of its import
def test_microbatches_are_run_again() -> None:
    """By Megatron's rerun state machine, which keeps those of an iteration."""
    import megatron.core.rerun_state_machine as machine

    machine.initialize_rerun_state_machine(mode=machine.RerunMode.VALIDATE_RESULTS)
    alone = RankGroups(rank=0, box=0, stage=0, num_stages=1, peers=(0,), leaders=(0,), readers=(0,))
    with FakeAppliance(seed=7), DataIterator(DataLoader(validation_rows.rows, 50), ranks=alone) as data:
        iterator = machine.RerunDataIterator(data)
        first = [int(next(iterator)["number"]) for _ in range(40)]
        iterator.rewind()
        assert [int(next(iterator)["number"]) for _ in range(40)] == first == list(range(40))
        iterator.advance()
        assert int(next(iterator)["number"]) == 40


def pieces(lines: list[Line]) -> list[Any]:
    return [line["pieces"] for line in lines]


def samples(*boxes: list[Line]) -> list[list[int]]:
    """The samples of each iteration, in any order: a global batch is dealt to boxes by rows."""
    return [sorted(chain(*(line["pieces"] for line in step))) for step in zip(*boxes, strict=True)]


def losses(*boxes: list[Line]) -> list[float]:
    return [sum(float.fromhex(line["loss"]) for line in step) / len(boxes) for step in zip(*boxes, strict=True)]
