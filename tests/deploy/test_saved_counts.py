"""`penstock replay` from a checkpoint, and `penstock state FILE`: the samples of a step, and saved counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import INPUTS
from counted import counted
from typer.testing import CliRunner

from penstock.client import DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.deploy.cli.main import app
from penstock.proto.state.assignment import Assignment, assigned


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 9."""
    path = tmp_path_factory.mktemp("state") / "state.pt"
    loader = DataLoader(counted, 6)
    with FakeAppliance(seed=5):
        for _ in DataExecutor(loader, num_steps=9):
            pass
        torch.save({"loader": loader.state_dict()}, path)
    return path


def test_replay_shows_samples_keys_and_counts(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed of a step leaves out just its samples."""
    monkeypatch.setenv("PYTHONPATH", INPUTS)
    command = ["replay", "--checkpoint", str(state), "--args", "[6]", "--allow", "counted", "--step", "11"]
    done = CliRunner().invoke(app, [*command, "--json", "--deadline", "300"])
    assert done.exit_code == 0, done.output
    batch = json.loads(done.stdout)
    given = [sample for batch in read(range(20)) for sample in batch]
    own = given[6 * 10 : 6 * 11]
    keys = {key: counts["samples"] for key, counts in batch["counts"]["keys"].items()}
    assert keys == Counter("en" if number % 3 else "de" for number in own)
    assert batch["counts"]["sources"][""]["tokens"] == sum(own)
    skip = [range(first, end) for first, end in batch["samples"]]
    kept = [number for at, number in enumerate(given) if at // 6 + 1 != 11]
    assert [number for batch in read(range(19), skip=skip) for number in batch] == kept


def read(steps: range, **options: Any) -> list[list[int]]:
    with assigned(Assignment(0, 1, 0, 1, 5, 1)):
        return [batch["tokens"].tolist() for _, batch in zip(steps, counted(6, **options), strict=False)]


def test_state_file_shows_counts(state: Path) -> None:
    shown = CliRunner().invoke(app, ["state", str(state)])
    assert shown.exit_code == 0, shown.output
    counts = {line.split()[0]: line.split()[1] for line in shown.stdout.splitlines() if line[:3] in ("en ", "de ")}
    own = Counter("en" if number % 3 else "de" for batch in read(range(9)) for number in batch)
    assert counts == {key: str(count) for key, count in own.items()}
    as_json = json.loads(CliRunner().invoke(app, ["state", str(state), "--json"]).stdout)
    assert as_json["states"][0]["counts"]["sources"][""]["samples"] == 54
    refused = CliRunner().invoke(app, ["state", str(state), "--step", "3"])
    assert refused.exit_code
    assert "--step must be given only with a RUN" in refused.stderr
