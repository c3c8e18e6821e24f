"""Surroundings of a checkpointer: other modes, other processes, other users' folders; each of these once went wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.proto.errors import CheckpointError, ForkedProcessError, InvalidArgumentError
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


def test_half_replaced_in_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(5, {"x": torch.ones(4)})
        checkpointer.wait()
        (tmp_path / "step-5").rename(tmp_path / "step-5.old-12345678")

        def refuses(*arguments: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("penstock.client.checkpoint.restoring.restore.put_back", refuses)
        found = {"x": torch.zeros(4)}
        assert checkpointer.restore(found) == 5
        assert found["x"].eq(1).all()


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
    checkpointer.save(1, {"x": {"best": 5.0}})
    with pytest.raises(
        CheckpointError,
        match=r"'x.best' was saved in .* as a Python object, but is a tensor",
    ):
        checkpointer.restore({"x": {"best": torch.tensor(0.0)}})


def test_an_empty_dict_takes_all_there_is(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {"x": {"a": torch.ones(2), "b": {"c": 3}}})
    found: dict[str, Any] = {"x": {}}
    checkpointer.restore(found)
    assert found["x"]["a"].tolist() == [1.0, 1.0]
    assert found["x"]["b"] == {"c": 3}


@pytest.mark.parametrize("state", [{"a.b": torch.ones(2), "a": {"b": {}}}, {"a": {"b": {}}, "a.b": 1}])
def test_an_empty_dict_takes_no_other_name(tmp_path: Path, state: dict[str, Any]) -> None:
    with (
        AsyncCheckpointer(tmp_path) as checkpointer,
        pytest.raises(InvalidArgumentError, match=r"two values under the name a.b"),
    ):
        checkpointer.save(1, state)


def test_counters_and_ordered_dicts_are_restored(checkpointer: AsyncCheckpointer) -> None:
    class Holder:
        state: Any = None

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    holder, other = Holder(), Holder()
    holder.state = {"milestones": Counter({2: 1, 4: 2}), "order": OrderedDict(b=1, a=torch.ones(2)), "none": Counter()}
    other.state = {}
    checkpointer.save(1, {"holder": holder})
    checkpointer.restore({"holder": other})
    assert other.state["milestones"] == Counter({2: 1, 4: 2})
    assert [type(value) for value in other.state.values()] == [Counter, OrderedDict, Counter]
    assert list(other.state["order"]) == ["b", "a"]


def test_default_device_and_inference_mode(checkpointer: AsyncCheckpointer) -> None:
    values = torch.ones(4)
    with torch.device("meta"):
        checkpointer.save(1, {"x": values})
        found = {"x": values.clone().zero_()}
        checkpointer.restore(found)
    assert found["x"].eq(1).all()
    with torch.inference_mode():
        checkpointer.save(2, {"x": values, "new": torch.zeros(5)})
    checkpointer.save(3, {"x": values, "new": torch.ones(5)})
    found = {"x": torch.zeros(4), "new": torch.zeros(5)}
    assert checkpointer.restore(found) == 3
    assert found["new"].eq(1).all()


def test_objects_that_grow_get_room(tmp_path: Path) -> None:
    """An object that grows from save to save has the memory laid out anew a few times, and not each time."""
    with AsyncCheckpointer(tmp_path, keep_last=1, fsync=False) as checkpointer:
        images = set()
        for step in range(30):
            checkpointer.save(step, {"x": torch.ones(1000), "note": b"x" * 100_000 * step})
            checkpointer.wait()
            image = checkpointer._buffers[0].image
            assert image is not None
            images.add(image.number)
        found: dict[str, Any] = {"note": b""}
        checkpointer.restore(found)
        assert len(found["note"]) == 2_900_000
    assert len(images) < 9


def test_modules_in_the_writer_s_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A json.py in the working directory, or where Penstock is installed, does not come before Python's own."""
    (tmp_path / "json.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "/elsewhere"])
    with AsyncCheckpointer(tmp_path / "saved") as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)})
        assert checkpointer.result().name == "step-1"
        listed = Path(f"/proc/{checkpointer._writer.pid}/environ").read_bytes()
        assert b"PYTHONPATH=" not in listed or "PYTHONPATH" in os.environ


def test_deaths_are_seen_if_the_socket_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is forked while the writer is being started holds the writer's end of the socket too."""
    real, children = subprocess.Popen, []

    def forks(*arguments: Any, **options: Any) -> Any:
        child = os.fork()
        if not child:
            signal.pause()
        children.append(child)
        return real(*arguments, **options)

    monkeypatch.setattr("penstock.runtime.process.spawn.subprocess.Popen", forks)
    try:
        with AsyncCheckpointer(tmp_path, timeout_s=600) as checkpointer:
            pid = checkpointer._writer.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            checkpointer.save(1, {"x": torch.ones(3)})
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(CheckpointError, match="killed by SIGKILL"):
                checkpointer.wait(60)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


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


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0])
def test_deadlines_that_no_clock_can_wait_for(tmp_path: Path, timeout_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout_s must be in"):
        AsyncCheckpointer(tmp_path, timeout_s=timeout_s)
