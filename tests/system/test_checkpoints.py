"""A loader in a checkpoint, with the model: by AsyncCheckpointer, and as a Stateful in torch's own save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import growing_states
import pytest
import torch
from chains import plain
from ranked import run
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.checkpoint import AsyncCheckpointer

STEPS = 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_loader_goes_on_from_a_checkpoint(appliance: Appliance, tmp_path: Path) -> None:
    """Save one run in all ways, and resume each in a loader that has read nothing. Parts of its states come and go."""
    loader = DataLoader(growing_states.growing, batches=24)
    weights = torch.zeros(4)
    state = {"weights": weights, "loader": loader}
    whole: list[Any] = []
    executor = DataExecutor(loader, num_steps=3 * STEPS, appliance=appliance)
    with AsyncCheckpointer(tmp_path / "ours") as checkpointer:
        for batch in executor:
            whole.append(plain(batch))
            weights += 1
            if executor.step == STEPS:
                save(state, checkpoint_id=tmp_path / "dcp")
            if executor.step == 2 * STEPS:
                checkpointer.save(executor.step, state)
                async_save(state, checkpoint_id=tmp_path / "async").result()  # type: ignore[union-attr]
    for step, how in ((2 * STEPS, "ours"), (STEPS, "dcp"), (2 * STEPS, "async")):
        again = DataLoader(growing_states.growing, batches=24)
        found: dict[str, Any] = {"weights": torch.zeros(4), "loader": again}
        if how == "ours":
            with AsyncCheckpointer(tmp_path / "ours") as checkpointer:
                assert checkpointer.restore(found, step=step) == step
        else:
            load(found, checkpoint_id=tmp_path / how)
        assert found["weights"].tolist() == [float(step)] * 4
        rest = DataExecutor(again, num_steps=3 * STEPS - step, appliance=appliance)
        assert [plain(batch) for batch in rest] == whole[step:], (how, step)


def in_order(outcomes: list[Any]) -> list[Any]:
    """Global batches in the order of the epoch, of all boxes' batches."""
    assert not [one for one in outcomes if one.raised], outcomes
    boxes = [one.value for one in outcomes]
    return [
        [step[at % len(step)][at // len(step)] for at in range(sum(map(len, step)))]
        for step in zip(*boxes, strict=True)
    ]


@pytest.mark.timeout(240)
def test_any_number_of_ranks_goes_on(appliance: Appliance, tmp_path: Path) -> None:
    """Saved by two ranks, gone on with by one: the global batches are those of the first life."""
    access, folder = appliance._access, str(tmp_path / "saved")
    assert access is not None
    where = access.address, access.token
    whole = in_order(run(2, "ranked_loaders:first", *where, "two", "ours", folder, STEPS))
    assert in_order(run(1, "ranked_loaders:rest", *where, "then-one", "ours", folder, 3)) == whole[STEPS:]
