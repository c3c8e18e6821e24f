"""Log of the samples of each step, in a file that outlives its job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from listed import Listed

from penstock.client import SampleLog
from penstock.data import ShardLoader
from penstock.proto.errors import InvalidArgumentError


def steps_of(path: Path) -> dict[int, list[str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    return {line["step"]: line["keys"] for line in lines}


def test_each_sample_of_a_step_can_be_had_again(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "box0.jsonl"
    loader = ShardLoader(Listed([5, 3]), batch_size=3, keys="key", seed=1)
    with SampleLog(path) as log:
        samples = {}
        for step, batch in enumerate(loader, start=1):
            log.write(step, batch)
            samples[step] = batch["batch"].tolist()
    other = ShardLoader(Listed([5, 3]), batch_size=1, seed=1)
    assert {step: [other.restore_sample(key) for key in keys] for step, keys in steps_of(path).items()} == samples


def test_resumed_job_replaces_repeated_steps(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    with SampleLog(path, field="of") as log:
        for step in range(1, 6):
            log.write(step, {"of": [f"first {step}"]})
    with path.open("ab") as file:
        file.write(b'{"step": 6, "ke')  # the machine crashed
    log = SampleLog(path, field="of")
    log.write(4, {"of": ["again 4"]})
    log.close()
    log.write(5, {"of": ["again 5"]})
    log.close()
    assert steps_of(path) == {1: ["first 1"], 2: ["first 2"], 3: ["first 3"], 4: ["again 4"], 5: ["again 5"]}


@pytest.mark.parametrize("batch", [{"x": 1}, [1], {"key": "abc"}, {"key": [1]}, None])
def test_a_batch_without_keys_is_refused(tmp_path: Path, batch: Any) -> None:
    with SampleLog(tmp_path / "keys") as log, pytest.raises(InvalidArgumentError, match="with keys='key'"):
        log.write(1, batch)
    assert not (tmp_path / "keys").exists()


def test_steps_go_up(tmp_path: Path) -> None:
    with SampleLog(tmp_path / "keys") as log:
        log.write(2, {"key": []})
        with pytest.raises(InvalidArgumentError, match=r"above 2, the last step in .*, got 2"):
            log.write(2, {"key": []})
