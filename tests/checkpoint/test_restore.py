"""Choice of the checkpoint to restore, targets of a restore, and its errors."""

from __future__ import annotations

import collections
import json
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.restoring.places import FolderPlace, PinnedCheckpoint
from penstock.client.checkpoint.restoring.restore import load
from penstock.proto.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, InvalidArgumentError
from penstock.proto.state.checkpoint_files import INDEX, MANIFEST, checkpoints, leftovers, newest, pinned


def fill(checkpointer: AsyncCheckpointer, *steps: int) -> None:
    """Saves of these steps, of a tensor with the step in it."""
    for step in steps:
        checkpointer.save(step, {"x": torch.full((1000,), float(step))})
    checkpointer.wait()


def back(checkpointer: AsyncCheckpointer, step: int | None = None, **options: Any) -> tuple[int | None, float]:
    found = {"x": torch.full((1000,), -1.0)}
    return checkpointer.restore(found, step, **options), float(found["x"][0])


def filled(folder: Path, *steps: int, **options: Any) -> None:
    with AsyncCheckpointer(folder, **options) as checkpointer:
        fill(checkpointer, *steps)


def restored(folder: Path, step: int | None = None) -> tuple[int | None, float]:
    with AsyncCheckpointer(folder) as checkpointer:
        return back(checkpointer, step)


def test_newest_is_the_last_saved(tmp_path: Path) -> None:
    filled(tmp_path, 50, 75, 100)
    assert restored(tmp_path) == (100, 100.0)
    filled(tmp_path, 60)  # somebody went back to 50 and gave the branch to 100 up
    assert restored(tmp_path) == (60, 60.0)
    assert (tmp_path / "latest").read_text() == "step-60\n"
    filled(tmp_path, 75)  # again: it takes the place of the other one
    assert restored(tmp_path) == (75, 75.0)
    assert [one.step for one in checkpoints(tmp_path)] == [75, 60, 100, 50]
    assert not leftovers(tmp_path)


def test_an_empty_folder_is_a_start_from_nothing(tmp_path: Path) -> None:
    assert restored(tmp_path / "not there") == (None, -1.0)
    with pytest.raises(CheckpointNotFoundError, match=r"has no checkpoint of step 3; it has steps: none"):
        restored(tmp_path, 3)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() is None


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("missing", r"__0_0.distcp is missing"),
        ("short", r"__0_0.distcp has [0-9,]+ bytes, but [0-9,]+ were written"),
        ("checksum", r"penstock.json is damaged: the checksum in the file differs from that of its content"),
        ("newer", r"penstock.json is in format 99 of a newer Penstock"),
    ],
)
def test_damage_names_the_newest_good_one(checkpointer: AsyncCheckpointer, harm: str, words: str) -> None:
    fill(checkpointer, 1, 2)
    path = checkpointer.folder / "step-2"
    if harm == "missing":
        (path / "__0_0.distcp").unlink()
    elif harm == "short":
        os.truncate(path / "__0_0.distcp", 100)
    else:
        outer = json.loads((path / MANIFEST).read_text())
        outer["checkpoint"]["step" if harm == "checksum" else "format"] = 99
        if harm == "newer":
            import xxhash

            body = json.dumps(outer["checkpoint"], sort_keys=True).encode()
            outer["xxh3"] = xxhash.xxh3_128_hexdigest(body)
        (path / MANIFEST).write_text(json.dumps(outer))
    with pytest.raises(CheckpointCorruptError, match=rf"step-2 is damaged: .*{words}.* undamaged one is step=1"):
        back(checkpointer)
    assert back(checkpointer, 1) == (1, 1.0)
    with pytest.warns(UserWarning, match=rf"step-2 is damaged: .*{words}"):
        assert checkpointer.latest() == 1
    fill(checkpointer, 3)  # and the training goes on
    assert back(checkpointer) == (3, 3.0)


def test_a_flipped_bit_of_the_index_is_found(checkpointer: AsyncCheckpointer) -> None:
    fill(checkpointer, 1, 2)
    path = checkpointer.folder / "step-2" / INDEX
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=r"index.json must have the checksum .* undamaged one is step=1"):
        back(checkpointer)


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "notes").write_text("")
    (tmp_path / "step-8.tmp-mine").mkdir()
    filled(tmp_path, 1, 2, keep_last=1)
    assert restored(tmp_path) == (2, 2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "latest",
        "step-2",
        "step-7",
        "step-8.tmp-mine",
    ]


def test_a_checkpoint_of_an_earlier_penstock(tmp_path: Path) -> None:
    """It was saved by two ranks, and has no index but torch's."""
    shutil.copytree(Path(__file__).parents[1] / "data" / "checkpoints", tmp_path, dirs_exist_ok=True)
    state: dict[str, Any] = {
        "split": torch.zeros(3, 2),
        "same": {"x": torch.zeros(2, dtype=torch.bfloat16), "n": 0, 3: {"deep": None}},
        "own-0": {"seen": None},
        "own-1": {"seen": None},
    }
    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state, verify=True) == 5
    assert torch.equal(state["split"], torch.arange(6.0).reshape(3, 2))
    assert torch.equal(state["same"].pop("x"), torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
    assert state["same"] == {"n": 7, 3: {"deep": (1, 2)}}
    assert (state["own-0"], state["own-1"]) == ({"seen": {0}}, {"seen": {1}})


def test_retention(tmp_path: Path) -> None:
    filled(tmp_path, *range(10, 100, 10), keep_last=2, keep_every=30)
    assert [one.step for one in checkpoints(tmp_path)] == [90, 80, 60, 30]
    filled(tmp_path, 15, keep_last=1)  # the newest by the order of saves
    assert [one.step for one in checkpoints(tmp_path)] == [15]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3)
    (tmp_path / "step-3" / "__0_0.distcp").unlink()
    filled(tmp_path, 4, keep_last=2)
    found = newest(tmp_path)
    assert found is not None
    assert [one.step for one in checkpoints(tmp_path) if not one.damage] == [4, 2]


def test_one_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    """Neither as surplus, nor because a save of its step has replaced it, nor as a leftover of that."""

    def steps() -> list[int]:
        return [one.step for one in checkpoints(tmp_path)]

    filled(tmp_path, 1, 2)
    with pinned(tmp_path / "step-1") as folder:
        filled(tmp_path, 3, keep_last=1)
        assert steps() == [3, 1]
        for step in (1, 4):
            filled(tmp_path, step)
            assert os.stat("__0_0.distcp", dir_fd=folder).st_size
    filled(tmp_path, 5, keep_last=1)
    assert steps() == [5]
    assert not leftovers(tmp_path)


def test_all_ranks_load_the_save_that_was_chosen(tmp_path: Path) -> None:
    """A rank that finds another save in its place loads nothing: the ranks choose again."""
    filled(tmp_path, 1)
    other = PinnedCheckpoint(1, str(tmp_path / "step-1"), "00000000")
    assert load(FolderPlace(tmp_path), other, {"x": torch.zeros(1000)}, 0, 1, False) is None


def network(seed: int = 0, **options: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5, **options), nn.BatchNorm1d(5), nn.Linear(5, 2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    torch.manual_seed(9)
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = module(torch.ones(4, 6)).square().sum()
            torch.autograd.backward(loss)
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_schedulers_and_whatever_has_a_state(checkpointer: AsyncCheckpointer) -> None:
    class Meter:
        def __init__(self) -> None:
            self.state: Any = {}

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    module, meter = network(), Meter()
    optimizer = torch.optim.SGD(module.named_parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    meter.state = {"seen": {"a": torch.arange(7), "b": {}}, "list": [torch.ones(2), {"c": 1}], "none": None}
    checkpointer.save(1, {"scheduler": scheduler, "optimizer": optimizer, "meter": meter, "step": 5})
    again = torch.optim.SGD(network(1).named_parameters(), lr=1.0)
    fresh, other = torch.optim.lr_scheduler.StepLR(again, 3), Meter()
    other.state = {"seen": {"a": torch.zeros(2), "z": 1}}  # of another topology than what was saved
    state: dict[str, Any] = {"scheduler": fresh, "optimizer": again, "meter": other, "step": 0}
    checkpointer.restore(state)
    assert (fresh.last_epoch, fresh.step_size, state["step"]) == (5, 2, 5)
    assert fresh.get_last_lr() == scheduler.get_last_lr()
    assert again.param_groups[0]["lr"] == pytest.approx(0.01)
    assert equal(other.state, meter.state)


@pytest.mark.filterwarnings("ignore:'optimizer' of the state has:UserWarning")
def test_what_does_not_fit_is_named(checkpointer: AsyncCheckpointer) -> None:
    module = network()
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer)
    checkpointer.save(1, {"model": module, "optimizer": optimizer, "extra": {"a": 1, "t": torch.ones(3)}})
    checkpointer.wait()

    def fails(state: Any, words: str, error: type[Exception] = CheckpointError) -> None:
        with pytest.raises(error, match=words):
            checkpointer.restore(state)

    fails({"nothing": {}}, r"has no value 'nothing'; its values are 'extra', 'model', 'optimizer'")
    fails(
        {"model": network(bias=False)},
        r"'model' cannot be restored from .*step-1: the checkpoint has 'model.0.bias', which the",
    )
    larger = nn.Sequential(*network(), nn.Linear(2, 2))
    fails({"model": larger}, r"the checkpoint lacks 'model.3.bias', 'model.3.weight'")
    wider = nn.Sequential(nn.Linear(7, 5), *list(network())[1:])
    fails({"model": wider}, r"must fit what is saved in .* of shape \[5, 6\], got ")
    fails({"extra": torch.ones(4)}, r"'extra' .*: it was saved as a dict or list, but is a tensor in the state")
    fails(
        {"optimizer": torch.optim.Adam(network().parameters())},
        r"state for the parameters '0.bias', .*: save and restore the module",
    )
    fails([1], r"state must be a dict of names and values, .*, got list", InvalidArgumentError)
    good = network(3)
    checkpointer.restore({"model": good})
    assert equal(good.state_dict(), module.state_dict())


class Custom:
    """Object of a class that torch does not know."""

    ran: ClassVar[list[str]] = []

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return _make, (self.value,)


def _make(value: int) -> Custom:
    Custom.ran.append("made")
    return Custom(value)


def test_other_classes_are_loaded_only_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step in (1, 1):
            checkpointer.save(step, {"custom": {"it": Custom(7)}})
        told = [one.getMessage() for one in caplog.records]  # at the save, and once
        assert [text.partition(":")[0] for text in told] == [f"'custom.it' of the state contains {__name__}.Custom"]
        state: dict[str, Any] = {"custom": {"it": None}}
        with pytest.raises(CheckpointError, match=r"'custom.it' of .* allow_unsafe_types=True"):
            checkpointer.restore(state)
        assert not Custom.ran
        checkpointer.restore(state, allow_unsafe_types=True)
        assert state["custom"]["it"].value == 7
