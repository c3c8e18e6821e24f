"""Hugging Face Trainer, also TRL's: it trains on the batches of a Penstock DataLoader.

By default the Trainer resumes by reading all batches of the epoch again. With ignore_data_skip=True it assumes that the
loader is at the right position, to which a callback moves it. The position is in trainer_state.json, the last file of
a checkpoint."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from penstock.client.api.data_loader import DataLoader
from penstock.client.api.lookahead import Lookahead
from penstock.client.states.saved_state import Layers
from penstock.proto.errors import InvalidArgumentError, StateMismatchError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.tracebacks import warn_user

__all__ = ["newest_checkpoint", "penstock_trainer"]

T = TypeVar("T")


def penstock_trainer(base: type[T]) -> type[T]:
    """Return a subclass of a Trainer (transformers.Trainer, trl.SFTTrainer, a subclass of your own), whose
    `train_dataset` and `eval_dataset` are Penstock DataLoaders::

        trainer = penstock_trainer(Trainer)(model=model, args=arguments, train_dataset=DataLoader(input_fn, 32))
        trainer.train(resume_from_checkpoint=True)

    Training resumes at the first batch that was not trained on before the checkpoint; resume_from_checkpoint=True takes
    the newest complete one. A batch is what a process trains on at once, so batch sizes in TrainingArguments do not
    count. A Lookahead of the loader is taken, too; without one the steps of `save_steps` are announced to the workers.
    `eval_dataset` may be a dict, or none of Penstock's. `train(..., layers="restart")` is for other layers, see
    DataLoader.load_state_dict().

    Raises InvalidArgumentError for another train_dataset; when training resumes, StateMismatchError for a checkpoint
    without the loader's position."""
    return cast(type[T], type(base.__name__, (_Fed, base), {"__module__": base.__module__, "__doc__": base.__doc__}))


class _Fed:
    """Methods of a Trainer, put before those of its class."""

    args: TrainingArguments

    def __init__(self, *arguments: Any, train_dataset: Any = None, eval_dataset: Any = None, **named: Any) -> None:
        if not isinstance(train_dataset, DataLoader | Lookahead):
            raise InvalidArgumentError(
                f"train_dataset must be a Penstock DataLoader, got {type(train_dataset).__qualname__}. For other data "
                "take the Trainer itself"
            )
        mine: Any = self
        beside = _Placeholders(named["args"] if "args" in named else next(iter(arguments[1:]), None))
        given = {"train_dataset": beside.of(train_dataset), "eval_dataset": beside.of(eval_dataset)}
        parent: Any = super()
        parent.__init__(*arguments, **given, **named)
        self.args.ignore_data_skip = True
        every = self.args.save_steps * self.args.gradient_accumulation_steps
        announced = int(every) if self.args.save_strategy == "steps" and self.args.save_steps >= 1 else None
        mine.train_dataset, mine.eval_dataset = _ahead(train_dataset, announced), _ahead(eval_dataset)
        self._position = LoaderState()
        mine.add_callback(self._position)

    def get_train_dataloader(self) -> Any:
        return cast(Any, self).train_dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        mine: Any = self
        chosen = mine.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        chosen = _ahead(mine.eval_dataset if chosen is None else chosen)
        if isinstance(chosen, Lookahead):
            return chosen
        parent: Any = super()
        return parent.get_eval_dataloader(eval_dataset)

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, layers: Layers = "keep", **named: Any) -> Any:
        self._position.layers = layers
        if resume_from_checkpoint is True:  # True again, if there is none: the Trainer's own error
            resume_from_checkpoint = newest_checkpoint(cast(str, self.args.output_dir)) or True
        parent: Any = super()
        return parent.train(resume_from_checkpoint, *arguments, **named)


def _ahead(data: Any, announced: int | None = None) -> Any:
    if isinstance(data, dict):
        return {name: _ahead(each) for name, each in data.items()}
    return Lookahead(data, checkpoint_steps=announced) if isinstance(data, DataLoader) else data


class _Placeholders:
    """What the Trainer's constructor gets in place of our loaders, because it may read samples, which would begin an
    epoch. TRL's accepts only Datasets, which it would tokenize."""

    def __init__(self, args: Any) -> None:
        self._sample: Any = [{"input_ids": [0], "labels": [0]}]
        if hasattr(args, "dataset_kwargs"):
            from datasets import Dataset

            args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
            self._sample = Dataset.from_list(self._sample)

    def of(self, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: self.of(each) for name, each in data.items()}
        return self._sample if isinstance(data, DataLoader | Lookahead) else data


class LoaderState(TrainerCallback, ExportableState):
    """Callback that saves the loader's position, and moves it there when training resumes."""

    def __init__(self) -> None:
        self._ahead: Lookahead | None = None
        self.epoch_over = False
        self.layers: Layers = "keep"

    def state(self) -> dict[str, Any]:
        """Return the state that the Trainer saves as JSON. It also calls this once before the training."""
        saved = None if self._ahead is None else base64.b64encode(encode_state(self._ahead.state_dict())).decode()
        return {"args": {}, "attributes": {"saved": saved, "epoch_over": self.epoch_over}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._ahead = ahead = cast(Lookahead, kwargs["train_dataloader"])
        if not state.global_step:
            return
        # The Trainer's attribute is first a list of callbacks, and later a dict of the callbacks' states.
        states = cast(dict[str, Any], state.stateful_callbacks)
        of_callback = states.get(type(self).__name__) or {}
        saved = of_callback.get("attributes", {}).get("saved")
        if saved is None:
            raise StateMismatchError(
                f"penstock_trainer: the checkpoint of step {state.global_step} has no position of the loader: another "
                "Trainer saved it. Take another, or begin anew"
            )
        if args.gradient_accumulation_steps > 1 and _length(ahead) % args.gradient_accumulation_steps:
            warn_user(
                f"penstock_trainer: the {_length(ahead)} batches of an epoch must be a multiple of "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}: else a Trainer that resumed "
                "accumulates over the end of the epoch, losses differ, and training may end before max_steps",
            )
        ahead.load_state_dict(cast(dict[str, Any], decode_state(base64.b64decode(saved))), layers=self.layers)
        if of_callback["attributes"].get("epoch_over"):
            ahead.leave_epoch(at_its_end=True)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._took()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._took()
        self.epoch_over = state.epoch is not None and float(state.epoch).is_integer()

    def _took(self) -> None:
        """Count a batch: the Trainer calls one of on_substep_end and on_step_end for each."""
        assert self._ahead is not None
        self._ahead.took()


def _length(ahead: Lookahead) -> int:
    try:
        return len(ahead)
    except TypeError:
        return 0


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint of a Trainer in `output_dir`; None if it has none. A job may
    have been killed while it wrote a newer folder."""
    folders = {
        int(match[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    for step in sorted(folders, reverse=True):
        try:
            # written last, and not atomically, so it may be incomplete
            json.loads((folders[step] / "trainer_state.json").read_bytes())
        except (FileNotFoundError, ValueError):
            continue
        return str(folders[step])
    return None
