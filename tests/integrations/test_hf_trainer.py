"""Hugging Face's Trainer: what its callback asks for, and what a checkpoint is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import streams

from penstock.client import DataLoader, Lookahead
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

    training = TrainingArguments(**{"use_cpu": True, "report_to": "none", "ignore_data_skip": True, **arguments})
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


def test_it_can_be_made_anew_from_its_state(ahead: Lookahead) -> None:
    """Make the callback from its state, as the Trainer does with restore_callback_states_from_checkpoint=True."""
    callback = new()
    begin(callback, ahead, step=0)
    again: LoaderState = cast(Any, type(callback)).from_state(callback.state())
    begin(again, ahead, states={"LoaderState": callback.state()})
    assert again.state() == callback.state()


def test_a_loader_that_it_cannot_save_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"must return a Lookahead\(loader\), got a DataLoader"):
        begin(new(), DataLoader(streams.counter))


def test_skipping_batches_is_refused(ahead: Lookahead) -> None:
    begin(new(), ahead, step=0, ignore_data_skip=False)  # nothing is skipped in a first run
    with pytest.raises(InvalidArgumentError, match="ignore_data_skip=True"):
        begin(new(), ahead, ignore_data_skip=False)


def test_accumulation_over_an_epoch_end_warns(ahead: Lookahead) -> None:
    callback = new()
    begin(callback, ahead, step=0, gradient_accumulation_steps=4)
    states = {"LoaderState": callback.state()}
    begin(new(), ahead, states=states, gradient_accumulation_steps=5)
    with pytest.warns(UserWarning, match="10 batches of an epoch must be a multiple of gradient_accumulation_steps=4"):
        begin(new(), ahead, states=states, gradient_accumulation_steps=4)


@pytest.mark.parametrize("states", [{}, {"LoaderState": {"args": {}, "attributes": {"saved": None}}}])
def test_checkpoint_without_position_is_refused(ahead: Lookahead, states: dict[str, Any]) -> None:
    with pytest.raises(StateMismatchError, match="the checkpoint of step 5 was saved without this callback"):
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
