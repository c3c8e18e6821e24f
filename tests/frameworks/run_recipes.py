"""TRL's SFTTrainer, NeMo Automodel's recipes and Megatron-core: `make frameworks` kills them, and starts them again.

The examples are run as they are, on the CPU; Megatron's by tests/inputs/cpu_megatron.py. That one checks itself that
the consumed samples of a checkpoint are those of its iteration; its resumes on other ranks are in
tests/integrations/test_megatron_data.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import validation_rows
from cluster import Cluster
from framework_runs import check, daemons, started
from kill_and_resume import Line

from penstock.client import DataLoader
from penstock.client.integrations.megatron_data import DataIterator, RankGroups
from penstock.client.testing import FakeAppliance

pytestmark = pytest.mark.timeout(600)

EVERY = ("--checkpoint-every", "3")
KILLED_AT = 4
EPOCH = 64
"""Steps of an epoch of TRL and Automodel."""
TRL, AUTOMODEL = ("late_import", "integrations.sft_trainer"), ("late_import", "integrations.automodel_recipe")
MEGATRON = ("cpu_megatron",)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with daemons(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.mark.parametrize(
    ("script", "ranks", "steps"),
    [
        pytest.param(TRL, 2, EPOCH + 6, id="TRL"),
        pytest.param(AUTOMODEL, 2, EPOCH + 3, id="Automodel"),
        pytest.param((*MEGATRON, "--tp", "2"), 2, 9, id="tensor"),
        pytest.param((*MEGATRON, "--cp", "2"), 2, 9, id="context"),
        pytest.param((*MEGATRON, "--pp", "2"), 2, 9, id="pipeline"),
        pytest.param((*MEGATRON, "--pp", "2", "--chunks", "2"), 2, 9, id="virtual-pipeline"),
        pytest.param((*MEGATRON, "--tp", "2", "--pp", "2"), 4, 9, id="tensor-and-pipeline"),
    ],
)
def test_killed_and_resumed(cluster: Cluster, tmp_path: Path, script: tuple[str, ...], ranks: int, steps: int) -> None:
    module, *options = script
    killed_one = started(cluster, module, f"killed-{tmp_path.name}", tmp_path / "killed")
    killed = killed_one.killed(ranks, *options, *EVERY, steps=steps, at=KILLED_AT)
    resumed = killed_one.to_the_end(ranks, *options, *EVERY, steps=steps)
    whole_one = started(cluster, module, f"whole-{tmp_path.name}", tmp_path / "whole")
    whole = whole_one.to_the_end(ranks, *options, *EVERY, steps=steps)
    check(killed, resumed, whole, steps)
    if script[:1] == MEGATRON:
        for lines in whole.values():
            assert pieces(lines) == pieces(whole["rank0.jsonl"]), "all ranks of the box have the same samples"


def test_automodel_on_other_numbers_of_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """From two ranks with two microbatches to four ranks with one, and back; and from the end of an epoch."""
    module, *options = (*AUTOMODEL, *EVERY)
    whole = started(cluster, module, "two", tmp_path / "whole").to_the_end(2, *options, steps=EPOCH + 3)
    moved = started(cluster, module, "moved", tmp_path / "moved")
    places = ((2, 3), (4, 6), (2, EPOCH), (2, EPOCH + 3))
    found = [samples(*moved.to_the_end(ranks, *options, steps=steps).values()) for ranks, steps in places]
    assert [step for part in found for step in part] == samples(*whole.values())


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
    """The samples of each step, in any order: microbatches deal them to boxes."""
    return [sorted(piece for line in step for piece in line["pieces"]) for step in zip(*boxes, strict=True)]
