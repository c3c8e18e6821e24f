"""`penstock doctor CHECKPOINT`: what is whole is said to be, what is not is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.deploy.cli.main import app


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step in (5, 10):
            checkpointer.save(step, {"x": torch.full((1000,), step)})
    return tmp_path


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(["doctor", *arguments], prog_name="penstock")
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_whole_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = doctor(capsys, str(folder))
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith("step-")]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("step-10", "10", "whole"), ("step-5", "5", "whole")]
    code, out, _ = doctor(capsys, str(folder / "step-5"), "--json")
    said = json.loads(out)
    assert (code, said["ok"], said["leftovers"]) == (0, True, [])
    assert [(one["step"], one["ranks"], one["files"], one["damage"]) for one in said["checkpoints"]] == [(5, 1, 3, [])]


def test_a_flipped_bit_and_a_missing_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "step-10" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[2000] ^= 4
    file.write_bytes(data)
    code, out, err = doctor(capsys, str(folder))
    assert code == 24
    assert "step-10  __0_0.distcp has checksum" in out
    assert f"1 of 2 checkpoints is damaged (see above). Resume from {folder / 'step-5'}, the newest intact" in err
    (folder / "step-5" / ".metadata").unlink()
    code, out, err = doctor(capsys, str(folder))
    assert code == 24
    assert "step-5   .metadata is missing" in out
    assert "2 of 2 checkpoints are damaged (see above). No checkpoint here is intact: restore the files" in err
    code, out, _ = doctor(capsys, str(folder), "--json")
    assert (code, json.loads(out)["ok"]) == (24, False)


def test_leftovers_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-15.tmp-0123abcd").mkdir()
    code, out, _ = doctor(capsys, str(folder))
    assert code == 0
    assert "step-15.tmp-0123abcd belongs to a save that was interrupted" in out
