"""`penstock replay --loss`, and `penstock state FILE`: spikes of a loss log, their samples, and saved counts."""

from __future__ import annotations

import json
import math
import random
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
from penstock.deploy.replay.loss_log import Loss, read_losses, spikes_of
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.state.assignment import Assignment, assigned


def noisy(spikes: dict[int, float], steps: int = 400) -> list[Loss]:
    """A falling loss with noise, and spikes on top of it."""
    draw = random.Random(3)
    return [Loss(s, 2 + 5 / s**0.5 + draw.gauss(0, 0.02) + spikes.get(s, 0.0)) for s in range(1, steps + 1)]


def test_highest_spikes_are_found_on_a_falling_loss() -> None:
    found = spikes_of(noisy({100: 0.4, 101: 0.9, 102: 0.3, 250: 2.0, 330: math.nan, 331: math.nan}), 4)
    assert [(spike.step, spike.first, spike.last) for spike in found[:3]] == [
        (330, 330, 331),
        (250, 250, 250),
        (101, 100, 101),
    ]
    assert found[0].plain()["loss"] == "nan"
    assert found[1].plain()["height"] > found[2].height > 10
    assert len(found) <= 4
    assert [spike.step for spike in spikes_of([Loss(s, 1.0 + (s == 9)) for s in range(1, 20)], 3)] == [9]
    with pytest.raises(InvalidArgumentError, match=r"at least 9 losses.*got 8"):
        spikes_of(noisy({}, 8), 1)


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        (
            '{"step": 2, "loss": 1.5}\n\n{"eval": 3}\n{"step": 1, "loss": NaN}\n{"step": 2, "loss": 2}\n{"st',
            {1: None, 2: 2.0},
        ),
        ("\ufeffepoch, Step, Loss\n0, 1.0, 2.5\n0, 2, \n0, 3, nan\n", {1: 2.5, 3: None}),
        ('{"step": 1, "loss": 2.5, "note": "one\u2028line"}\n', {1: 2.5}),
    ],
)
def test_json_lines_and_csv_are_read(tmp_path: Path, text: str, losses: dict[int, Any]) -> None:
    log = tmp_path / "losses"
    log.write_text(text)
    assert {one.step: None if math.isnan(one.loss) else one.loss for one in read_losses(log)} == losses


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step\n1\n", "must be JSON lines, or CSV with the columns step and loss"),
        ("a,b\n1,2\n", "got the header 'a, b'"),
        ("step,loss\n", "must have lines with `step` and `loss`"),
        ('{"step": 0, "loss": 1}\n', "If the log counts from 0, add 1"),
        ('{"step": 1.5, "loss": 1}\n', "a whole number >= 1, .* got 1.5. Correct the line"),
        ("\n", "must have losses, got an empty file"),
        ('{"step": 1, "loss": "high"}\n', "loss in line 1 must be a number, got 'high'"),
        ('{"step": 1, "loss": 1}\n{oops\n{"step": 2, "loss": 1}\n', "line 2 must be a JSON object"),
    ],
)
def test_a_wrong_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    log = tmp_path / "losses.jsonl"
    log.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        read_losses(log)


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


def test_samples_of_spikes_can_be_left_out(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss jumps at steps 9, 11 and 13. Step 9 cannot be replayed from the checkpoint; what is printed for the
    others leaves out just their samples."""
    monkeypatch.setenv("PYTHONPATH", INPUTS)
    log = tmp_path / "losses.jsonl"
    losses = [Loss(one.step, 2 + one.step % 3 / 10) for one in noisy({}, 15)]
    lines = [{"step": one.step, "loss": one.loss + {9: 9, 11: 7, 13: 5}.get(one.step, 0)} for one in losses]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["replay", "--checkpoint", str(state), "--args", "[6]", "--allow", "counted", "--loss", str(log)]
    done = CliRunner().invoke(app, [*command, "--spikes", "4", "--json", "--timeout", "300"])
    assert done.exit_code == 0, done.output
    assert "step 9 cannot be replayed: the checkpoint of step 9 cannot be used to replay step 9" in done.stderr
    found = json.loads(done.stdout)
    assert [spike["step"] for spike in found["spikes"]] == [9, 11, 13]
    _, *batches = [spike["batch"] for spike in found["spikes"]]
    given = [sample for batch in read(range(20)) for sample in batch]
    for batch in batches:
        own = given[6 * (batch["step"] - 1) : 6 * batch["step"]]
        assert [int(key.split(":")[2]) for key in batch["restore_keys"]] == [*range(*batch["samples"][0])]
        keys = {key: counts["samples"] for key, counts in batch["counts"]["keys"].items()}
        assert keys == Counter("en" if number % 3 else "de" for number in own)
        assert batch["counts"]["sources"][""]["tokens"] == sum(own)
    skip = eval(found["skip"].removeprefix("skip="))
    kept = [number for at, number in enumerate(given) if at // 6 + 1 not in (11, 13)]
    assert [number for batch in read(range(18), skip=skip) for number in batch] == kept


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
    both = CliRunner().invoke(app, ["replay", "job", "--step", "3", "--loss", "x"])
    assert both.exit_code
    assert "one of --step and --loss must be given, got both" in both.stderr
    alone = CliRunner().invoke(app, ["replay", "job", "--step", "3", "--spikes", "2"])
    assert (alone.exit_code, "--spikes needs --loss, got --spikes 2" in alone.stderr) == (2, True)
