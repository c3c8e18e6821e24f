"""Checkpoints of torch's own `dcp.save`: a restore reads the one that is named, and passes none over in silence."""

from __future__ import annotations

import os
import time
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import run
from torch import nn
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.proto.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from penstock.proto.state.checkpoint_files import MANIFEST

UNCHECKED = "by torch's dcp.save, without checksums"


def x(value: float = -1.0) -> dict[str, Any]:
    return {"x": torch.full((100,), value)}


def torch_saved(path: Path, state: dict[str, Any], **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, without ranks
        save(state, checkpoint_id=path, **options)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.25)
    network(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return network, optimizer


@pytest.fixture
def folder(checkpointer: AsyncCheckpointer) -> Path:
    checkpointer.folder.mkdir(parents=True, exist_ok=True)
    return checkpointer.folder


@pytest.mark.parametrize("name", ["", "step-100", "checkpoint-100", "checkpoint-100/model", "final"])
def test_one_of_torchs_alone_is_named(checkpointer: AsyncCheckpointer, folder: Path, name: str) -> None:
    torch_saved(folder / name, x(5.0))
    state = x()
    for call in (checkpointer.newest, checkpointer.latest, lambda: checkpointer.restore(state)):
        with pytest.raises(
            CheckpointNotFoundError, match=f"{folder / name}. (Pass step=100|To read it, move its files)"
        ):
            call()
    with pytest.raises(
        CheckpointNotFoundError, match=f"no checkpoint of step 3; it has steps: {folder / name} of torch"
    ):
        checkpointer.restore(state, 3)
    assert torch.equal(state["x"], x()["x"])


@pytest.mark.skipif("use_collectives" not in signature(save).parameters, reason="torch 2.9 brought use_collectives")
def test_ranks_that_saved_alone(checkpointer: AsyncCheckpointer, folder: Path) -> None:
    torch_saved(folder / "step-1", x(5.0), use_collectives=False)
    with pytest.raises(CheckpointNotFoundError, match=r"step-1\. Pass step=1"):
        checkpointer.restore(x())
    with pytest.warns(UserWarning, match=UNCHECKED), pytest.raises(CheckpointError, match=r"load it with dcp\.load"):
        checkpointer.restore(x(), 1)


def test_it_is_read_once_and_then_ours_are(checkpointer: AsyncCheckpointer, folder: Path) -> None:
    network, optimizer = trained()
    weights, moments = get_state_dict(network, optimizer)
    torch_saved(folder / "step-100", {"model": weights, "optimizer": moments, "note": {"text": "x", "at": [1, 2]}})
    other, its = trained()
    note: dict[str, Any] = {}
    with pytest.warns(UserWarning, match=UNCHECKED):
        assert checkpointer.restore({"model": other, "optimizer": its, "note": note}, 100, verify=True) == 100
    assert note == {"text": "x", "at": [1, 2]}
    for name, tensor in network.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    before, after = optimizer.state_dict(), its.state_dict()
    assert {**after, "state": 0} == {**before, "state": 0}
    for number, values in before["state"].items():
        assert all(torch.equal(after["state"][number][name], value) for name, value in values.items())
    checkpointer.save(101, {"model": other, "optimizer": its})
    assert checkpointer.newest() == checkpointer.restore({"model": other}) == checkpointer.latest() == 101


def test_shards_of_torchs_are_read_on_any_number_of_ranks(tmp_path: Path) -> None:
    outcomes = run(2, "ranked_saves:torch_fsdp_save", str(tmp_path))
    assert not [one for one in outcomes if one.raised], outcomes
    for then in (3, 1):
        after = run(then, "ranked_saves:fsdp_restore", str(tmp_path), 4)
        assert [one.value for one in after] == [outcomes[0].value] * then


@pytest.mark.parametrize("step", [100, 1], ids=["a later step", "a later time"])
def test_a_newer_one_is_named_beside_ours(checkpointer: AsyncCheckpointer, folder: Path, step: int) -> None:
    checkpointer.save(50, x(50.0))
    checkpointer.wait()
    torch_saved(folder / f"checkpoint-{step}", x(5.0))
    index = folder / f"checkpoint-{step}" / ".metadata"
    earlier = time.time() - 60
    os.utime(index if step > 50 else folder / "step-50" / MANIFEST, (earlier, earlier))
    state = x()
    for call in (checkpointer.newest, checkpointer.latest, lambda: checkpointer.restore(state)):
        with pytest.warns(UserWarning, match=f"dcp.save wrote a newer one: {index.parent}") as caught:
            assert call() == 50
        assert [one.filename for one in caught] == [__file__]
    assert torch.equal(state["x"], x(50.0)["x"])
    checkpointer.save(101, x())
    checkpointer.wait()
    assert checkpointer.latest() == 101  # without a warning


def test_ours_in_flight_is_none_and_one_without_manifest_is(checkpointer: AsyncCheckpointer, folder: Path) -> None:
    checkpointer.save(50, x(50.0))
    checkpointer.wait()
    (folder / "step-50" / MANIFEST).unlink()
    (folder / "step-50").rename(folder / "step-60.tmp-0123abcd")
    assert checkpointer.latest() is None
    (folder / "step-60.tmp-0123abcd").rename(folder / "step-60")
    with pytest.raises(CheckpointNotFoundError, match=f"without a {MANIFEST}: {folder / 'step-60'}"):
        checkpointer.latest()


def test_keep_last_deletes_none_of_torchs(tmp_path: Path) -> None:
    torch_saved(tmp_path / "step-1", x(5.0))
    with AsyncCheckpointer(tmp_path, keep_last=1) as checkpointer:
        for step in (2, 3, 4):
            checkpointer.save(step, x(step))
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-1", "step-4"}


def test_what_cannot_be_read_is_said(checkpointer: AsyncCheckpointer, folder: Path) -> None:
    writer = FileSystemWriter(folder / "step-7", _extensions=[ZStandard()])
    torch_saved(folder / "step-7", x(5.0), storage_writer=writer)
    with pytest.warns(UserWarning, match=UNCHECKED), pytest.raises(CheckpointError, match="compressed or transformed"):
        checkpointer.restore(x(), 7)
    network, optimizer = trained()
    torch_saved(folder / "step-8", {"model": network, "optimizer": optimizer})  # by numbers, not by names
    with (
        pytest.warns(UserWarning, match=UNCHECKED),
        pytest.raises(CheckpointError, match="optimizer state for the parameters 0, 1"),
    ):
        checkpointer.restore({"model": network, "optimizer": optimizer}, 8)
    torch_saved(folder / "step-9", x(5.0))
    data = folder / "step-9" / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 100)
    state = x()
    with pytest.warns(UserWarning, match=UNCHECKED), pytest.raises(CheckpointCorruptError, match="beyond its end"):
        checkpointer.restore(state, 9)
    assert torch.equal(state["x"], x()["x"])
