"""Reads are correct to the byte or change nothing, and a checkpoint stays while it is read."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.restoring import places, reading, restore
from penstock.proto.errors import CheckpointCorruptError, CheckpointError
from penstock.proto.state.checkpoint_files import (
    METADATA,
    checkpoints,
    leftovers,
)


def state_of(mark: float) -> dict[str, Any]:
    """Large and small tensors, of odd lengths, objects, and an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(mark)
    optimizer = torch.optim.AdamW(model.parameters(), lr=mark)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, mark)
    optimizer.step()
    extra = {"small": torch.full((5,), mark, dtype=torch.int8), "note": f"mark {mark}", "none": torch.empty(0)}
    return {"model": model, "optimizer": optimizer, "extra": extra}


def seen(state: dict[str, Any]) -> Any:
    return repr([state["model"].state_dict(), state["optimizer"].state_dict(), state["extra"]])


def test_flipped_bytes_are_found_before_changes(tmp_path: Path) -> None:
    """Bytes are flipped in every file, at positions all over it."""
    with AsyncCheckpointer(tmp_path, fsync=False) as checkpointer:
        checkpointer.save(1, state_of(1.0))
        checkpointer.save(2, state_of(2.0))
        checkpointer.wait()
        state = state_of(3.0)
        before = seen(state)
        for path in sorted(set((tmp_path / "step-2").iterdir()) - {tmp_path / "step-2" / METADATA}):
            data = path.read_bytes()
            for place in {0, len(data) // 3, len(data) // 2, len(data) - 1}:
                path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
                with pytest.raises(CheckpointCorruptError, match=r"step-2 is damaged: .*undamaged one is step=1"):
                    checkpointer.restore(state)
                assert seen(state) == before
            path.write_bytes(data)
        assert checkpointer.restore(state) == 2
        assert seen(state) == seen(state_of(2.0))


def test_a_rank_reads_what_it_needs_and_no_more(tmp_path: Path) -> None:
    """Damage elsewhere is no matter for it; it is for `verify`."""
    with AsyncCheckpointer(tmp_path, threads=1, fsync=False) as checkpointer:
        checkpointer.save(1, {"wanted": torch.ones(100), "other": torch.zeros(200_000)})
        file = Path(checkpointer.result()) / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[5000] ^= 1
        file.write_bytes(data)
        found = {"wanted": torch.zeros(100)}
        assert checkpointer.restore(found) == 1
        assert found["wanted"].eq(1).all()
        with pytest.raises(CheckpointCorruptError, match="The folder has no undamaged"):
            checkpointer.restore(found, verify=True)


def test_a_checkpoint_that_is_read_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it mixed with another one of its step."""
    real, reached, go = reading.read, threading.Event(), threading.Event()

    def read(*arguments: Any) -> Any:
        reached.set()
        assert go.wait(60)
        return real(*arguments)

    with AsyncCheckpointer(tmp_path, keep_last=1, fsync=False) as checkpointer:
        checkpointer.save(1, state_of(1.0))
        checkpointer.wait()
        monkeypatch.setattr(restore, "read", read)
        state, steps = state_of(0.5), []
        with AsyncCheckpointer(tmp_path) as other:
            thread = threading.Thread(target=lambda: steps.append(other.restore(state)))
            thread.start()
            assert reached.wait(60)
            for step in (1, 2, 3):  # the same one again, and others
                checkpointer.save(step, state_of(10.0 + step))
                checkpointer.wait()
            go.set()
            thread.join(60)
        assert steps == [1]
        assert seen(state) == seen(state_of(1.0))
        checkpointer.save(4, state_of(4.0))
        checkpointer.wait()
        assert [one.step for one in checkpoints(tmp_path)] == [4]
        assert not leftovers(tmp_path)


def test_one_that_goes_before_it_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader goes on with the newer one."""
    with AsyncCheckpointer(tmp_path, fsync=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": torch.full((3,), float(step))})
        checkpointer.wait()
        stale = [one for one in checkpoints(tmp_path) if one.step == 1]
        shutil.rmtree(tmp_path / "step-1")
        answers = [stale]
        monkeypatch.setattr(places, "checkpoints", lambda folder: answers.pop() if answers else checkpoints(folder))
        found = {"x": torch.zeros(3)}
        assert checkpointer.restore(found) == 2
        assert found["x"].eq(2).all()


def test_modules_on_the_meta_device_are_named(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {"model": nn.Linear(2, 2), "x": torch.ones(3)})
    checkpointer.wait()
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    for state in ({"model": module}, {"x": torch.ones(3, device="meta")}):
        with pytest.raises(CheckpointError, match=r"is on the meta device: .*to_empty"):
            checkpointer.restore(state)
    module.to_empty(device="cpu")
    assert checkpointer.restore({"model": module}) == 1


def test_values_that_would_be_cut_are_named(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {"x": torch.tensor([1.5])})
    checkpointer.wait()
    with pytest.raises(
        CheckpointError,
        match=r"'x' must fit .*, torch.float32 of .* got torch.int64",
    ):
        checkpointer.restore({"x": torch.zeros(1, dtype=torch.int64)})
    half = {"x": torch.zeros(1, dtype=torch.bfloat16)}
    checkpointer.restore(half)
    assert half["x"] == 1.5


class Extra(nn.Module):
    """Parameters restore beside a state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "there"),
    [
        (torch.arange(7), torch.arange(3)),
        ({"a": 1, "b": {"c": torch.ones(2)}}, {"z": 5}),
        ("text", torch.arange(3)),
    ],
)
def test_extra_states_of_another_length(checkpointer: AsyncCheckpointer, saved: Any, there: Any) -> None:
    own, other = Extra(saved), Extra(there)
    module, again = nn.Sequential(own), nn.Sequential(other)
    checkpointer.save(1, {"model": module})
    checkpointer.restore({"model": again})
    assert repr(other.extra) == repr(saved)
    assert torch.equal(other.inner.weight, own.inner.weight)
