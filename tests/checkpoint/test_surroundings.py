"""Surroundings of a checkpointer: other modes, other processes, other users' folders; each of these once went wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.proto.errors import CheckpointError, ForkedProcessError
from penstock.proto.state.checkpoint_files import checkpoints


def test_forked_child_cannot_save_or_close(tmp_path: Path) -> None:
    """A forked child would write into the parent's shared memory, and wait for a thread that it does not have."""
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(4)})
        child = os.fork()
        if not child:
            status = 1
            try:
                checkpointer.save(2, {"y": torch.zeros(400)})
            except ForkedProcessError:
                status = 0
            checkpointer.close()
            checkpointer._finalizer()  # what the interpreter does at its end
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        checkpointer.save(3, {"x": torch.full((4,), 3.0)})
        found = {"x": torch.zeros(4)}
        assert checkpointer.restore(found, verify=True) == 3
        assert found["x"].eq(3).all()


def test_a_folder_of_others_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "weights.bin").write_text("mine")
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(5, {"x": torch.ones(4)})
        with pytest.raises(
            CheckpointError, match=r"step-5 exists and is not a Penstock checkpoint: move it to another"
        ):
            checkpointer.wait()
        assert (tmp_path / "step-5" / "weights.bin").read_text() == "mine"
        checkpointer.save(6, {"x": torch.ones(4)})
        checkpointer.wait()


def test_reordered_names_are_another_state(checkpointer: AsyncCheckpointer) -> None:
    """Else one would be copied to the other's place, and converted on the way."""
    large, small = torch.tensor([2**40 + 1]), torch.tensor([1.5])
    checkpointer.save(1, {"x": {"a": small, "b": large}})
    checkpointer.save(2, {"x": {"b": small, "a": large}})
    checkpointer.wait()
    found = {"x": {"a": torch.zeros(1, dtype=torch.int64), "b": torch.zeros(1)}}
    checkpointer.restore(found)
    assert found["x"]["a"].item() == 2**40 + 1
    assert found["x"]["b"].item() == 1.5


def test_an_object_does_not_go_into_a_tensor(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {"best": 5.0})
    with pytest.raises(
        CheckpointError,
        match=r"'best' was saved in .* as a Python object, but is a tensor",
    ):
        checkpointer.restore({"best": torch.tensor(0.0)})


def test_modules_in_the_writer_s_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A json.py in the working directory, or where Penstock is installed, does not come before Python's own."""
    (tmp_path / "json.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "/elsewhere"])
    with AsyncCheckpointer(tmp_path / "saved") as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)})
        assert checkpointer.result() == checkpointer.folder / "step-1"
        listed = Path(f"/proc/{checkpointer._writer.pid}/environ").read_bytes()
        assert b"PYTHONPATH=" not in listed or "PYTHONPATH" in os.environ


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with AsyncCheckpointer(tmp_path / "file" / "folder") as checkpointer:
        checkpointer.save(1, {"x": torch.ones(4)})
        with pytest.raises(CheckpointError, match=r"rank 0: .*file/folder: Not a directory"):
            checkpointer.wait()
    with AsyncCheckpointer(tmp_path / "file") as checkpointer:
        for ask in (checkpointer.latest, lambda: checkpointer.restore({"x": 1})):
            with pytest.raises(CheckpointError, match=r"file cannot be listed: Not a directory"):
                ask()
    assert checkpoints(tmp_path) == []
