"""Megatron-core's and NVRx's phases of an asynchronous save, with a scheduler that has them; with theirs it is
tests/frameworks/run_megatron_saves.py."""

from __future__ import annotations

import gc
import os
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


def test_memory_of_an_aborted_save_is_released(tmp_path: Path) -> None:
    """Its scheduler forgets the request."""

    def allocated() -> int:
        return sum(
            "penstock-checkpoint" in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        )

    before = allocated()
    values = {**state(1.0), "more": torch.ones(1 << 20)}  # in no memory of an earlier save
    request = Request(writer := FileSystemWriterAsync(tmp_path), plan(values, writer))
    assert request is not None
    del request, writer
    gc.collect()
    assert allocated() <= before


def test_what_is_not_supported_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"use_msc=True"):
        FileSystemWriterAsync(tmp_path, use_msc=True)
    with pytest.raises(InvalidArgumentError, match=r"single_file_per_rank=False"):
        FileSystemWriterAsync(tmp_path, single_file_per_rank=False)
    with pytest.raises(CheckpointError, match=r"must be called after prepare_write_data"):
        FileSystemWriterAsync(tmp_path).retrieve_write_results()


def test_what_has_no_effect_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.checkpoint")
    for mark in (1.0, 2.0):
        folder = tmp_path / str(mark)
        writer = FileSystemWriterAsync(folder, use_cached_data_structure=True, use_cpu_shm_for_gpu_tensors=True)
        request = Request(writer, plan(state(mark), writer))
        request.write()
        request.finalize()
        assert_holds(folder, mark)
    said = [record.getMessage() for record in caplog.records if record.name == "penstock.checkpoint"]
    assert len(said) == 1
    assert "use_cached_data_structure, use_cpu_shm_for_gpu_tensors" in said[0]


def no_room(path: str, mode: str) -> Any:
    raise OSError(28, "no room", path)


def test_files_are_opened_by_open_file(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "a", thread_count=2, open_file=open, is_multiproc_io=True)
    request = Request(writer, plan(state(1.0), writer))
    request.write_elsewhere(sent=True, kill=False)
    request.finalize()
    assert_holds(tmp_path / "a", 1.0)
    writer = FileSystemWriterAsync(tmp_path / "b", thread_count=2, open_file=no_room)
    request = Request(writer, plan(state(2.0), writer))
    request.write_elsewhere(sent=True, kill=False)
    with pytest.raises(CheckpointError, match=r"failed: OSError: \[Errno 28\] no room.*__0_[01].distcp"):
        request.finalize()


class Quantised(torch.Tensor):
    """A tensor on a GPU, as far as its class says, which can be dequantised as Transformer Engine's."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=torch.device("cuda")
        )
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = func(*(one.held if isinstance(one, Quantised) else one for one in args), **kwargs or {})
        return cls(found) if isinstance(found, torch.Tensor) else found

    def dequantize(self) -> torch.Tensor:
        return self.held


def test_quantised_tensors_of_a_gpu_are_dequantised(tmp_path: Path) -> None:
    """As the libraries' own writers do, whose loaders refuse other classes than torch's."""
    value = torch.arange(12.0).reshape(3, 4)
    writer = FileSystemWriterAsync(tmp_path)
    request = Request(writer, plan({"weight": Quantised(value)}, writer))
    request.write()
    request.finalize()
    found = {"weight": torch.zeros(3, 4)}
    load(found, storage_reader=FileSystemReader(tmp_path))
    assert torch.equal(found["weight"], value)


def test_ranks_write_in_processes(tmp_path: Path) -> None:
    """Write in processes. A process that is killed fails the save of all ranks, but not the next save."""
    for outcome in run(2, "phases:ranks_save", str(tmp_path)):
        assert outcome.value == ["saved", "rank 1: the process that writes", "saved"], outcome
