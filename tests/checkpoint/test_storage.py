"""AsyncFileSystemWriter in torch's own save and async_save: read by torch's reader, and right where torch is not."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from penstock.client.checkpoint import AsyncFileSystemWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state() -> dict[str, Any]:
    base = torch.arange(1 << 18, dtype=torch.float32)
    return {
        "model": {f"layer.{number}": torch.randn(100 * (number + 1)) for number in range(9)},
        "optimizer": {"moments": torch.randn(3, 4), "lr": 0.5, "names": ["a", "b"]},
        "view": base[7:11],
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }


def blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"thread_count": 1, "sync_files": False}, ["__0_0.distcp"]),
        (
            {"separation_hint": "optimizer"},
            ["__0_0.distcp", "__0_1.distcp", "optimizer__0_0.distcp", "optimizer__0_1.distcp"],
        ),
        ({"transforms": [ZStandard()]}, ["__0_0.distcp", "__0_1.distcp"]),
    ],
)
def test_torchs_own_reader_reads_it(tmp_path: Path, options: dict[str, Any], files: list[str]) -> None:
    saved = state()
    save(saved, storage_writer=AsyncFileSystemWriter(tmp_path / "saved", **options))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [".metadata", *files]
    found = blank(saved)
    load(found, storage_reader=FileSystemReader(tmp_path / "saved"))
    assert equal(saved, found)
    assert sum(path.stat().st_size for path in (tmp_path / "saved").iterdir()) < 128 << 10  # no view's whole storage


def test_async_save_stores_the_state_of_the_call(tmp_path: Path) -> None:
    """Whole tensors and views, and a second save by the same writer before the first is done."""
    writer = AsyncFileSystemWriter(tmp_path / "1")
    values = {"whole": torch.ones(1 << 20), "part": torch.ones(1 << 20)[10:20]}
    futures = []
    for step in (1, 2):
        for tensor in values.values():
            tensor.fill_(step)
        futures.append(async_save(values, storage_writer=AsyncFileSystemWriter(tmp_path / str(step))))
    for tensor in values.values():
        tensor.fill_(3)
    for future in futures:
        future.result()  # type: ignore[union-attr]
    assert writer.thread_count == 2
    for step in (1, 2):
        found = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
        load(found, storage_reader=FileSystemReader(tmp_path / str(step)))
        assert all(tensor.eq(step).all() for tensor in found.values())


class FailsAt(DefaultSavePlanner):
    """Cannot resolve one item, after others were written."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index.fqn == "model.layer.3":
            raise OSError("the device has fallen off the bus")
        return super().resolve_data(write_item)


def test_a_thread_s_failure_is_the_save_s(tmp_path: Path) -> None:
    """Whichever thread it is: torch reports such a save as done when it is not the main one's."""
    writer = AsyncFileSystemWriter(tmp_path, thread_count=2)
    with pytest.raises(CheckpointException, match=r"the device has fallen off the bus"):
        save(state(), storage_writer=writer, planner=FailsAt())
    assert not (tmp_path / ".metadata").exists()
    assert not [path for path in tmp_path.glob("*") if path.name.endswith(".tmp")]


def test_the_index_is_durable_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch flushes it after its fsync, removes the old one before it renames, and leaves names to luck."""
    done: list[str] = []
    fsync, replace, remove = os.fsync, os.replace, os.unlink

    def noted_fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            done.append(f"folder {path.name}")
        else:
            done.append(f"{path.name.rpartition('.')[0] or path.name}: {os.fstat(handle).st_size > 0}")
        fsync(handle)

    def noted_replace(source: Any, target: Any) -> None:
        done.append(f"{Path(target).name} replaced: {Path(target).exists()}")
        replace(source, target)

    def noted_unlink(path: Any, **more: Any) -> None:
        done.append(f"removed {path}")
        remove(path, **more)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "unlink", noted_unlink)
    folder = tmp_path / "saved"
    for _ in range(2):
        done.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that there is a checkpoint already
            save({"x": torch.ones(9)}, storage_writer=AsyncFileSystemWriter(folder, thread_count=1))
    assert done == [
        f"removed {folder}/__0_0.distcp",
        "__0_0: True",
        "..metadata: True",
        ".metadata replaced: True",
        f"folder {folder.name}",
        f"folder {tmp_path.name}",
    ]


def test_it_can_be_sent_to_a_process(tmp_path: Path) -> None:
    """Save as async_save does, with a process."""
    again = pickle.loads(pickle.dumps(AsyncFileSystemWriter(tmp_path / "x", thread_count=3, separation_hint="opt")))
    assert (again.thread_count, again.separation_hint) == (3, "opt")
    save(state(), storage_writer=again)
