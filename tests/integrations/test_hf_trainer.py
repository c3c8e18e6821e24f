"""Hugging Face's Trainer: what resumes, what a checkpoint is; evaluation and accumulation beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lengths
import pytest
import streams
import torch
import validation_rows
from reading_ahead import PASS, WHOLE, following

from penstock.client import Appliance, DataLoader, Lookahead
from penstock.proto.errors import InvalidArgumentError, StateMismatchError

if TYPE_CHECKING:  # it takes seconds to import, and every process of pytest's imports this module
    from penstock.client.integrations.transformers import LoaderState


def new() -> LoaderState:
    from penstock.client.integrations.transformers import LoaderState

    return LoaderState()


def begin(
    callback: LoaderState, loader: object, step: int = 5, states: dict[str, Any] | None = None, **arguments: Any
) -> None:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    training = TrainingArguments(use_cpu=True, report_to="none", **arguments)
    state = TrainerState(global_step=step)
    cast(Any, state).stateful_callbacks = states or {}  # as it is read from a checkpoint
    callback.on_train_begin(training, state, TrainerControl(), train_dataloader=loader)


@pytest.fixture
def ahead() -> Lookahead:
    return Lookahead(DataLoader(streams.counter))


def test_the_state_is_json(ahead: Lookahead) -> None:
    callback = new()
    assert callback.state()["attributes"] == {"saved": None, "epoch_over": False}, (
        "the Trainer asks before the training begins"
    )
    begin(callback, ahead, step=0)
    state = json.loads(json.dumps(callback.state()))
    other = Lookahead(DataLoader(streams.counter))
    begin(new(), other, states={"LoaderState": state})
    assert other.state_dict() == ahead.state_dict()


def test_accumulation_over_an_epoch_end_warns(ahead: Lookahead) -> None:
    callback = new()
    begin(callback, ahead, step=0, gradient_accumulation_steps=4)
    states = {"LoaderState": callback.state()}
    begin(new(), ahead, states=states, gradient_accumulation_steps=5)
    with pytest.warns(UserWarning, match="10 batches of an epoch must be a multiple of gradient_accumulation_steps=4"):
        begin(new(), ahead, states=states, gradient_accumulation_steps=4)


@pytest.mark.parametrize("states", [{}, {"LoaderState": {"args": {}, "attributes": {"saved": None}}}])
def test_checkpoint_without_position_is_refused(ahead: Lookahead, states: dict[str, Any]) -> None:
    with pytest.raises(StateMismatchError, match="the checkpoint of step 5 has no position of the loader"):
        begin(new(), ahead, states=states)


def test_the_newest_checkpoint_is_a_whole_one(tmp_path: Path) -> None:
    from penstock.client.integrations.transformers import newest_checkpoint

    assert newest_checkpoint(tmp_path / "nothing") is None
    for step, content in [(5, '{"global_step": 5}'), (10, '{"global_step": 10}'), (20, '{"global_st'), (100, None)]:
        (tmp_path / f"checkpoint-{step}").mkdir()
        if content is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(content)
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


# ---- evaluation, accumulation, a stop before the end, lengths: the batches are those of a plain loop


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    with Appliance(num_workers_per_box=2, seed=7, timeout_s=60) as found:
        yield found


class Constant(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.train_numbers: list[int] = []
        self.eval_numbers: list[int] = []

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        (self.train_numbers if self.training else self.eval_numbers).append(int(number))
        return {"loss": self.weight * x.float().mean()}


def trainer(model: Constant, folder: Path, train: Any, evaluation: Any = None, **settings: Any) -> Any:
    """The Trainer over these loaders; `callbacks`: more than its own."""
    from transformers import Trainer, TrainingArguments

    from penstock.client.integrations.transformers import penstock_trainer

    callbacks = settings.pop("callbacks", ())
    arguments = TrainingArguments(
        output_dir=str(folder),
        learning_rate=0.0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        **settings,
    )
    return penstock_trainer(Trainer)(
        model, arguments, train_dataset=train, eval_dataset=evaluation, callbacks=[*callbacks]
    )


def test_other_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="train_dataset must be a Penstock DataLoader, got list"):
        trainer(Constant(), tmp_path, [1, 2])


def test_trainer(appliance: Appliance, tmp_path: Path) -> None:
    """Evaluation twice an epoch, accumulation over three, and an early stop in the second epoch."""
    from transformers import EarlyStoppingCallback

    ahead = Lookahead(DataLoader(streams.counter, PASS // 2), appliance=appliance)
    other = Lookahead(DataLoader(validation_rows.rows, PASS), appliance=appliance)
    model = Constant()
    training = trainer(
        model,
        tmp_path,
        ahead,
        other,
        num_train_epochs=3,
        gradient_accumulation_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that a constant one is no progress
        load_best_model_at_end=True,
        prediction_loss_only=True,
        label_names=["number"],  # it evaluates a loss only for batches with labels
        callbacks=[EarlyStoppingCallback(2)],
    )
    training.train()
    assert model.train_numbers == WHOLE[: PASS + 3]
    assert model.eval_numbers == [*range(PASS)] * 3
    assert training.state.max_steps == 3 * PASS // 3, "optimizer steps of all epochs, by the length"
    assert training.state.global_step == 3
    assert following(ahead.state_dict(), 2, appliance) == WHOLE[PASS + 3 : PASS + 5]


def test_one_line_resumes_at_the_newest_whole_checkpoint(appliance: Appliance, tmp_path: Path) -> None:
    """`True` for the Trainer alone is the newest folder, which a kill left without its last file; and no checkpoint at
    all is its error."""

    def train(**settings: Any) -> list[int]:
        model, loader = Constant(), DataLoader(streams.counter, PASS // 2)
        rows = Lookahead(DataLoader(validation_rows.rows, PASS), appliance=appliance)
        ahead = Lookahead(loader, appliance=appliance)
        fed = trainer(model, tmp_path, ahead, {"rows": rows}, save_steps=2, **settings)
        fed.train(resume_from_checkpoint=settings["max_steps"] > 5)
        fed.evaluate()
        loader.close()
        assert model.eval_numbers == [*range(PASS)]
        return model.train_numbers

    with pytest.raises(ValueError, match="No valid checkpoint"):
        train(max_steps=6)
    assert train(max_steps=5) == WHOLE[:5]
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    assert train(max_steps=PASS + 2) == WHOLE[4 : PASS + 2]


def test_trainer_drops_what_is_beyond_len(appliance: Appliance, tmp_path: Path) -> None:
    """Also where training goes on from the end of an epoch."""
    epoch = [1, 1001, 2, 1002]  # as many batches of lengths.too_short(3) as its len() says

    def train(checkpoint: Path | None = None) -> list[int]:
        ahead = Lookahead(DataLoader(lengths.too_short, PASS // 2), appliance=appliance)
        model = Constant()
        trainer(model, tmp_path, ahead, num_train_epochs=2, save_strategy="epoch").train(
            resume_from_checkpoint=checkpoint
        )
        ahead._loader.close()
        return model.train_numbers

    assert train() == 2 * epoch
    assert train(tmp_path / f"checkpoint-{len(epoch)}") == epoch
