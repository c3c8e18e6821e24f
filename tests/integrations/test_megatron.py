"""Megatron-core's and NVRx's phases of an asynchronous save, with a scheduler that has them, and with theirs if it is
installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from phases import Request, plan
from ranked import run
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.client.integrations.megatron import FileSystemWriterAsync
from penstock.proto.errors import CheckpointError, InvalidArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(mark: float) -> dict[str, Any]:
    return {
        "optimizer.moments": torch.full((3, 5), mark, dtype=torch.float64),
        "model.optimizer_gate": torch.full((7,), mark),
        "model.weight": torch.nn.Parameter(torch.full((64, 8), mark)),
        "model.view": torch.full((1 << 18,), mark)[3:9],
        "model.transposed": torch.arange(6.0).reshape(2, 3).t() * mark,
        "model.empty": torch.empty(0, 4),
        "model.complex": torch.full((3,), complex(mark, 1)).conj(),
        "rng": {"seed": mark, "name": "x" * 5000},
    }


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: torch.zeros_like(one) if isinstance(one, torch.Tensor) else dict.fromkeys(one)
        for name, one in state(0.0).items()
    }
    load(found, storage_reader=FileSystemReader(folder))
    return found


def assert_holds(folder: Path, mark: float) -> None:
    found = read(folder)
    for name, value in state(mark).items():
        same = torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
        assert same, name


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
@pytest.mark.parametrize("decentralized", [False, True])
def test_staged_values_are_saved(tmp_path: Path, decentralized: bool) -> None:
    """Three saves whose memory is one and the same, the last over the first's folder."""
    values = state(0.0)
    for mark, folder in ((1.0, "a"), (2.0, "b"), (3.0, "a")):
        values.update(state(mark))
        writer = FileSystemWriterAsync(tmp_path / folder, thread_count=2, separation_hint="optimizer")
        assert writer.write_buckets is None
        request = Request(writer, plan(values, writer, decentralized=decentralized))
        for value in values.values():
            if isinstance(value, torch.Tensor):
                value.detach().zero_()
        assert not (tmp_path / folder / ".metadata").exists()
        request.write()
        request.finalize()
        assert_holds(tmp_path / folder, mark)
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [
            *(".metadata", "__0_0.distcp", "__0_1.distcp", "optimizer__0_0.distcp")
        ]
    assert sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) < 64 << 10  # no view's whole storage


def test_process_without_a_result_is_a_failure(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path)
    request = Request(writer, plan(state(1.0), writer))
    with pytest.raises(CheckpointError, match=r"rank 0: the process that writes .* left no result"):
        request.finalize()
    assert not (tmp_path / ".metadata").exists()
    again = FileSystemWriterAsync(tmp_path)
    request = Request(again, plan(state(2.0), again))
    request.write()
    request.finalize()
    assert_holds(tmp_path, 2.0)


def test_what_is_not_supported_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"use_msc=True"):
        FileSystemWriterAsync(tmp_path, use_msc=True)
    with pytest.raises(InvalidArgumentError, match=r"single_file_per_rank=False"):
        FileSystemWriterAsync(tmp_path, single_file_per_rank=False)
    with pytest.raises(CheckpointError, match=r"must be called after prepare_write_data"):
        FileSystemWriterAsync(tmp_path).retrieve_write_results()


def test_ranks_write_in_processes(tmp_path: Path) -> None:
    """Write in processes. A process that is killed fails the save of all ranks, but not the next save."""
    for outcome in run(2, "phases:ranks_save", str(tmp_path)):
        assert outcome.value == ["saved", "rank 1: the process that writes", "saved"], outcome


@pytest.mark.parametrize(
    "package",
    ["megatron.core.dist_checkpointing.strategies.async_utils", "nvidia_resiliency_ext.checkpointing.async_ckpt.core"],
)
@pytest.mark.parametrize("persistent", [False, True])
def test_their_schedulers_drive_it(tmp_path: Path, package: str, persistent: bool) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip("not installed")
    for outcome in run(2, "phases:ranks_save_by", package, persistent, str(tmp_path), timeout_s=300):
        assert outcome.value == "saved", outcome
