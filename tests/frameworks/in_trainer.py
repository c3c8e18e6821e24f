"""Puts our loader under the tests of Hugging Face's Trainer: its train loader is a Lookahead, with the callback."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from put_in_place import ahead_of
from transformers import Trainer

from penstock.client.integrations.transformers import LoaderState

pytest_plugins = ["put_in_place"]

TESTS = {
    "test_save_checkpoints",
    "test_can_resume_training",
    "test_training_with_resume_from_checkpoint_false",
    "test_resume_training_with_shard_checkpoint",
    "test_resume_training_with_checkpoint",
    "test_resume_training_with_gradient_accumulation",
    "test_resume_training_with_frozen_params",
    "test_auto_batch_size_with_resume_from_checkpoint",
}
"""Those that train and resume without a model of a hub."""

_init, _loader = Trainer.__init__, Trainer.get_train_dataloader


@functools.wraps(_init)
def init(self: Any, *arguments: Any, **named: Any) -> None:
    _init(self, *arguments, **named)
    self.args.ignore_data_skip = True
    self.add_callback(LoaderState())


def get_train_dataloader(self: Any) -> Any:
    self.accelerator.prepare = lambda loader: loader
    try:
        loader = _loader(self)
    finally:
        del self.accelerator.prepare
    return ahead_of(loader)


Trainer.__init__ = init
Trainer.get_train_dataloader = get_train_dataloader


@pytest.fixture(autouse=True)
def of_one_launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare states without the loader's, which says from which step its launch began, and without the epoch, which
    the Trainer counts from a resume in mid-epoch where the loader skips the batches."""
    common = request.module.TrainerIntegrationCommon
    compare = common.check_trainer_state_are_the_same

    def without_ours(self: Any, *states: dict[str, Any]) -> None:
        for state in states:
            state["stateful_callbacks"].pop("LoaderState", None)
            for line in state["log_history"]:
                line.pop("epoch", None)
        compare(self, *states)

    monkeypatch.setattr(common, compare.__name__, without_ours)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item.name in TESTS]
