"""Our torchtitan components without a trainer, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.client.integrations.torchtitan import PenstockCheckpointManager, PenstockDataLoader
from penstock.data import MapLoader
from penstock.proto.errors import CheckpointError, InvalidArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def pairs(dataset_path: str, tokenizer_path: str | None, seq_len: int, global_batch_size: int, rows: int) -> MapLoader:
    assert (dataset_path, tokenizer_path) == ("somewhere", None)
    dataset = [({"input": torch.full((seq_len,), row)}, torch.full((seq_len,), row + 1)) for row in range(rows)]
    return MapLoader(dataset, global_batch_size=global_batch_size)


def dicts(dataset_path: str, tokenizer_path: str | None, seq_len: int, global_batch_size: int) -> list[Any]:
    return [{"input": torch.zeros(global_batch_size, seq_len)}]


def built(**settings: Any) -> PenstockDataLoader:
    config = PenstockDataLoader.Config(dataset_path="somewhere", num_workers=0, **settings)
    loader: PenstockDataLoader = config.build(
        dp_world_size=1, dp_rank=0, tokenizer=object(), seq_len=3, local_batch_size=2, snapshot_every_n_steps=2
    )
    return loader


def first_tokens(batches: Any, count: int) -> list[list[int]]:
    return [inputs["input"][:, 0].tolist() for inputs, _ in (next(batches) for _ in range(count))]


def test_infinite_loader_reads_epoch_after_epoch() -> None:
    batches = iter(built(input_fn=pairs, arguments={"rows": 4}))
    assert first_tokens(batches, 5) == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("ended", [False, True])
def test_finite_loader_resumes_at_its_end(ended: bool) -> None:
    """Its state after the last batch, before and after the loop has seen that there is no other."""
    settings: dict[str, Any] = {"input_fn": pairs, "arguments": {"rows": 6}, "infinite": False}
    loader = built(**settings)
    batches = iter(loader)
    assert first_tokens(batches, 3)[-1] == [4, 5]
    if ended:
        assert list(batches) == []
    state = loader.state_dict()
    assert list(batches) == []

    resumed = built(**settings)
    resumed.load_state_dict(state)
    assert list(resumed) == []


def test_dropped_loader_ends_its_stream() -> None:
    loader = built(input_fn=pairs, arguments={"rows": 4})
    batches = iter(loader)
    next(batches)
    inner = loader.loader
    assert inner is not None
    assert inner.step == 1
    del loader, batches
    assert inner.step == 0


def test_batch_that_is_no_pair_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r'dicts must yield \(\{"input": tokens, ...\}, labels\)'):
        next(iter(built(input_fn=dicts)))


def test_input_fn_is_required() -> None:
    with pytest.raises(InvalidArgumentError, match=r"input_fn must be the function that makes the loader, got None"):
        built()


class Steps:
    """A value with the methods that torchtitan's parts have."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def manager(folder: Path, trainer: Steps, weight: float = 0.0, **settings: Any) -> PenstockCheckpointManager:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    config = PenstockCheckpointManager.Config(enable=True, folder="saved", interval=1, **settings)
    made: PenstockCheckpointManager = config.build(
        dataloader=built(input_fn=pairs, arguments={"rows": 4}),
        model_parts=[model],
        optimizers=Steps(),
        lr_schedulers=Steps(),
        states={"train_state": trainer},
        sd_adapter=None,
        base_folder=str(folder),
    )
    return made


def saved(folder: Path) -> set[str]:
    return {path.name for path in (folder / "saved").glob("step-*")}


def saves(folder: Path, steps: int, **settings: Any) -> None:
    """Save after each step, the last as torchtitan's trainer does; the model's weight is the number of the step."""
    trainer = Steps()
    with torch.no_grad():
        made = manager(folder, trainer, **settings)
        assert not made.load()
        for trainer.step in range(1, steps + 1):
            nn.init.constant_(made.states["model"].model[0].weight, trainer.step)
            made.save(trainer.step, last_step=trainer.step == steps)
    made.close()


def test_newest_checkpoint_is_loaded(tmp_path: Path) -> None:
    saves(tmp_path, 4, keep_latest_k=2, last_save_model_only=False)
    assert saved(tmp_path) == {"step-3", "step-4"}
    made = manager(tmp_path, trainer := Steps())
    assert made.load()
    assert trainer.step == 4
    assert made.states["model"].model[0].weight.item() == 4
    assert made.load(3)
    assert trainer.step == 3
    assert made.states["model"].model[0].weight.item() == 3
    made.close()


def test_model_alone_is_not_resumed_over(tmp_path: Path) -> None:
    """torchtitan's last checkpoint with only the model: it would be in the way of a save of its step."""
    saves(tmp_path, 3, last_save_model_only=True)
    assert saved(tmp_path) == {"step-1", "step-2", "step-3"}
    made = manager(tmp_path, trainer := Steps())
    with (
        pytest.warns(UserWarning, match="dcp.save wrote a newer one: .*step-3"),
        pytest.raises(
            CheckpointError, match=r"saved has step-3 beyond step 2, where training begins.*move these folders"
        ),
    ):
        made.load()
    (tmp_path / "saved" / "step-3").rename(tmp_path / "model")
    assert made.load()
    assert trainer.step == 2
    made.close()


def test_remote_folder_is_refused() -> None:
    config = PenstockCheckpointManager.Config(enable=True, folder="memory://saved")
    parts = {"optimizers": Steps(), "lr_schedulers": Steps(), "states": {}, "sd_adapter": None}
    with pytest.raises(InvalidArgumentError, match=r"folder must be a path, got memory://saved"):
        config.build(dataloader=None, model_parts=[nn.Linear(1, 1)], **parts)
