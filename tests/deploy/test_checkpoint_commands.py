"""`penstock checkpoint`: what is there is listed, what is damaged is named, and what is exported is what was saved."""

from __future__ import annotations

import datetime
import json
import os
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import Rows8
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.client import DataLoader
from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.testing import FakeAppliance
from penstock.deploy.cli.main import app

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            app(["checkpoint", *map(str, arguments)], prog_name="penstock")
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step in (5, 10):
            checkpointer.save(step, {"x": torch.full((1000,), step), "note": "n"})
    return tmp_path


def torch_saved(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, without ranks
        save(state, checkpoint_id=path)


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if line.startswith(("step-", "checkpoint-"))]


def test_ls(folder: Path, run: Run) -> None:
    torch_saved(folder / "checkpoint-3", {"x": torch.ones(4)})
    (folder / "step-15.tmp-0123abcd").mkdir()
    os.truncate(folder / "step-10" / "__0_0.distcp", 10)
    code, out, err = run("ls", folder)
    assert (code, err) == (0, "")
    assert [(row[0], row[1], row[-1]) for row in rows(out)[:3]] == [
        ("step-10", "10", "damaged"),
        ("step-5", "5", "whole"),
        ("checkpoint-3", "-", "checksums"),
    ]
    assert "step-10  __0_0.distcp has 10 bytes, but" in out
    assert "step-15.tmp-0123abcd belongs to a save that was interrupted" in out
    found = json.loads(run("ls", folder, "--json")[1])["checkpoints"]
    assert [(one["step"], one["ranks"], bool(one["damage"]), one["has_checksums"]) for one in found] == [
        (10, 1, True, True),
        (5, 1, False, True),
        (None, 0, False, False),
    ]
    assert found[1]["written_at"] == pytest.approx((folder / "step-5" / "penstock.json").stat().st_mtime)
    assert found[1]["bytes"] > 8000 > found[2]["bytes"] > 16


def test_show(folder: Path, run: Run) -> None:
    code, out, _ = run("show", folder)
    assert code == 0
    assert [line.split() for line in out.splitlines()[2:3]] == [["x", "int64", "[1000]", "8,000"]]
    torch_saved(folder / "checkpoint-3", {"model": {"w": torch.ones(2, 3, dtype=torch.bfloat16)}, "n": 1})
    said = json.loads(run("show", folder / "checkpoint-3", "--json")[1])
    tensor, number = said["values"]
    assert tensor == {"name": "model.w", "dtype": "bfloat16", "shape": [2, 3], "nbytes": 12}
    assert (number["name"], number["dtype"], number["shape"]) == ("n", "object", None)


def test_verify_reads_all(folder: Path, run: Run) -> None:
    code, out, err = run("verify", folder)
    assert (code, err) == (0, "")
    assert [(row[0], row[-1]) for row in rows(out)] == [("step-10", "whole"), ("step-5", "whole")]
    file = folder / "step-10" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[2000] ^= 4
    file.write_bytes(data)
    assert run("ls", folder)[1].count("whole") == 2  # which looks at sizes alone
    code, out, err = run("verify", folder)
    assert code == 24
    assert "step-10  __0_0.distcp has checksum" in out
    assert f"1 of 2 checkpoints is damaged (see above). Resume from {folder / 'step-5'}, the newest intact" in err
    assert run("verify", folder / "step-5")[0] == 0
    (folder / "step-5" / ".metadata").unlink()
    code, out, err = run("verify", folder)
    assert code == 24
    assert "step-5   .metadata is missing" in out
    assert "2 of 2 checkpoints are damaged (see above). No checkpoint here is intact: restore the files" in err
    code, out, _ = run("verify", folder, "--json")
    assert (code, json.loads(out)["ok"]) == (24, False)


def test_where_there_is_none(tmp_path: Path, run: Run) -> None:
    for command in (["ls"], ["show"], ["verify"], ["export", "--to", str(tmp_path / "x.pt")]):
        code, _, err = run(*command, tmp_path)
        assert (code, "has no checkpoint" in err) == (23, True)
    torch_saved(tmp_path / "step-3", {"x": torch.ones(4)})
    for command in (["show"], ["verify"]):
        code, _, err = run(*command, tmp_path)
        assert (code, f"torch's dcp.save wrote {tmp_path / 'step-3'}: name that" in err) == (23, True)
    code, _, err = run("verify", tmp_path / "step-3")
    assert (code, "keeps no checksums" in err) == (23, True)


# ---- export


def same(one: Any, other: Any) -> bool:
    """True for equal types and values, of tensors to the bit."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        left, right = (value.detach().contiguous().view(-1).view(torch.uint8) for value in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(left, right)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def various() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
        "nan": torch.tensor([float("nan"), -0.0, 1e-45]),
        "low": torch.randn(40).to(torch.float8_e4m3fn),
        "nested": {1: torch.randn(2), "deep": {"empty": {}, "pair": (torch.arange(3), 2), "text": "x"}},
        "list": [torch.randn(3), torch.randn(2, 2, dtype=torch.bfloat16), {"n": 1}],
        "plain": {"ordered": OrderedDict(b=1, a=2), "counted": Counter("aab"), "numbers": [1, 2.5, None], "b": b"\0"},
    }


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the nested state that is in it."""
    state = various()
    with AsyncCheckpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state)
    return tmp_path / "run", {**state, "model": dict(state["model"].state_dict())}


def test_a_file_of_torch_has_the_state_as_it_was_saved(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, run: Run
) -> None:
    folder, state = saved
    file = tmp_path / "state.pt"
    code, out, err = run("export", folder, "--to", file)
    assert (code, err) == (0, ""), err
    assert f"{file}: 12 tensors and 10 objects of {folder / 'step-1'}" in out
    loaded = torch.load(file, weights_only=True)
    loaded["model"] = dict(loaded["model"])
    assert same(state, loaded)
    assert run("export", folder, "--key", "model", "--to", tmp_path / "model.pt")[0] == 0
    various()["model"].load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert run("export", folder, "--key", "nan", "--to", tmp_path / "nan.pt")[0] == 0
    assert same({"nan": state["nan"]}, torch.load(tmp_path / "nan.pt", weights_only=True))


def test_safetensors_has_tensors_alone(saved: tuple[Path, dict[str, Any]], tmp_path: Path, run: Run) -> None:
    folder, state = saved
    file = tmp_path / "state.safetensors"
    code, _, err = run("export", folder, "--to", file)
    assert code == 23
    assert "cannot hold 'nested.deep.empty': dict, no plain tensor; 'nested.deep.pair': tuple, no plain tensor" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    code, out, _ = run("export", folder, "--to", file, "--leave-out", "--json")
    assert code == 0
    assert json.loads(out)["left_out"] == [
        *("nested.deep.empty", "nested.deep.pair", "nested.deep.text", "list.2.n"),
        *("plain.ordered.b", "plain.ordered.a", "plain.counted.a", "plain.counted.b", "plain.numbers", "plain.b"),
    ]
    expected = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    expected |= {"nan": state["nan"], "low": state["low"], "nested.1": state["nested"][1]}
    expected |= {"list.0": state["list"][0], "list.1": state["list"][1]}
    assert same(dict(sorted(expected.items())), dict(sorted(load_file(file).items())))
    assert run("export", folder / "step-1", "--key", "model", "--to", tmp_path / "model.safetensors")[0] == 0
    various()["model"].load_state_dict(load_file(tmp_path / "model.safetensors"))


def test_what_torch_would_not_load_is_named(tmp_path: Path, run: Run) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        state = {
            "on": {"date": datetime.date(2026, 1, 2), "many": defaultdict(list, a=[torch.ones(3)])},
            "x": torch.ones(2),
        }
        checkpointer.save(1, {**state, "parts": [torch.ones(1), datetime.date(2026, 1, 2), torch.zeros(1)]})
    file = tmp_path / "x.pt"
    code, _, err = run("export", tmp_path, "--to", file)
    assert (code, file.exists()) == (23, False)
    for name in ("'on.date': datetime.date", "'on.many': collections.defaultdict", "'parts.1': datetime.date"):
        assert f"{name}, which torch.load(weights_only=True) refuses" in err
    assert run("export", tmp_path, "--to", file, "--leave-out")[0] == 0
    expected = {"on": {}, "x": torch.ones(2), "parts": [torch.ones(1), None, torch.zeros(1)]}
    assert same(expected, torch.load(file, weights_only=True))
    assert run("export", tmp_path, "--to", tmp_path / "x.safetensors", "--leave-out")[0] == 0
    assert load_file(tmp_path / "x.safetensors").keys() == {"on.many.a.0", "x", "parts.0", "parts.2"}


def test_a_tensor_class_that_is_not_imported_is_named(tmp_path: Path, run: Run) -> None:
    rows = Rows8.of(torch.randn(4, 6))
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"rows": rows, "x": torch.ones(2)})
    file = tmp_path / "x.pt"
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        code, _, err = run("export", tmp_path, "--to", file)
        assert (code, "'rows' is a tensor of a class that torch.load does not know here" in err) == (23, True), err
        assert "quantised.Rows8" in err
        assert run("export", tmp_path, "--key", "x", "--to", file)[0] == 0
    finally:
        torch.serialization.add_safe_globals(known)
    assert run("export", tmp_path, "--to", file)[0] == 0
    found = torch.load(file, weights_only=True)["rows"]
    assert type(found) is Rows8
    assert same([rows.codes, rows.scale], [found.codes, found.scale])
    code, _, err = run("export", tmp_path, "--to", tmp_path / "x.safetensors")
    assert (code, "'rows': quantised.Rows8, no plain tensor" in err) == (23, True)


def test_a_checkpoint_of_torchs_is_exported(tmp_path: Path, run: Run) -> None:
    network = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": {"w": torch.randn(3, 2)}, "step": 7, "betas": (0.9, 0.99)}
    torch_saved(tmp_path / "final", {**state, "optimizer": optimizer})
    assert run("export", tmp_path / "final", "--to", tmp_path / "final.pt")[0] == 0
    its = optimizer.state_dict()
    its["state"] = {str(number): values for number, values in its["state"].items()}  # as dcp.save keeps them
    assert same({**state, "optimizer": its}, torch.load(tmp_path / "final.pt", weights_only=True))


def test_the_state_of_a_loader_is_that_of_its_state_dict(tmp_path: Path, run: Run) -> None:
    with FakeAppliance(replay=True), AsyncCheckpointer(tmp_path) as checkpointer:
        loader = DataLoader(range, 5)
        for _ in zip(range(2), loader, strict=False):
            pass
        checkpointer.save(2, {"loader": loader})
        state = loader.state_dict()
    assert run("export", tmp_path, "--to", tmp_path / "x.pt")[0] == 0
    assert same(dict(state), torch.load(tmp_path / "x.pt", weights_only=True)["loader"])


def test_what_cannot_be_exported_is_said(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    target = folder / "x.safetensors"
    (folder / "y.pt").mkdir()
    before = sorted(folder.iterdir())
    for arguments, code, says in (
        (("--to", folder / "x.bin"), 2, "must be FILE.safetensors or FILE.pt"),
        (("--to", folder / "nowhere" / "x.pt"), 2, "in an existing folder"),
        (("--to", target, "--key", "y"), 23, "has no value 'y'; its values are 'x', 'note'"),
        (("--to", folder / "y.pt"), 23, "cannot be written: IsADirectoryError"),
    ):
        ended, _, err = run("export", folder, *arguments)
        assert (ended, says in err, sorted(folder.iterdir())) == (code, True, before), err
    file = folder / "step-10" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"\x0a" + b"\0" * 7, b"\x0b" + b"\0" * 7))
    code, _, err = run("export", folder, "--to", target)
    assert (code, "must have the checksum" in err, target.exists()) == (24, True, False)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)  # as if it were not installed
    code, _, err = run("export", folder, "--to", target)
    assert (code, "pip install safetensors" in err) == (2, True)
