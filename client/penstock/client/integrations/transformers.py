"""Hugging Face Trainer: the loader's position in the Trainer's checkpoints.

By default the Trainer resumes by reading all batches of the epoch again. With ignore_data_skip=True it assumes that the
loader is at the right position, to which this callback moves it. The position is in trainer_state.json, the last file
of a checkpoint."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from penstock.client.api.lookahead import Lookahead
from penstock.proto.errors import InvalidArgumentError, StateMismatchError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.tracebacks import warn_user

__all__ = ["LoaderState", "newest_checkpoint"]


class LoaderState(TrainerCallback, ExportableState):
    """Callback that makes training resume at the first batch that was not trained on before the checkpoint::

        class MyTrainer(Trainer):
            def get_train_dataloader(self): return ahead     # Lookahead(DataLoader(input_fn))

        trainer = MyTrainer(..., args=TrainingArguments(..., ignore_data_skip=True), callbacks=[LoaderState()])
        trainer.train(resume_from_checkpoint=True)

    Raises, as training begins:
        InvalidArgumentError: get_train_dataloader returns no Lookahead; or training resumes without ignore_data_skip.
        StateMismatchError: the checkpoint has no position of the loader.
    """

    def __init__(self) -> None:
        self._ahead: Lookahead | None = None
        self.epoch_over = False

    def state(self) -> dict[str, Any]:
        """Return the state that the Trainer saves as JSON. It also calls this once before the training."""
        saved = None if self._ahead is None else base64.b64encode(encode_state(self._ahead.state_dict())).decode()
        return {"args": {}, "attributes": {"saved": saved, "epoch_over": self.epoch_over}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        ahead = kwargs["train_dataloader"]
        if not isinstance(ahead, Lookahead):
            raise InvalidArgumentError(
                f"LoaderState: get_train_dataloader must return a Lookahead(loader), got a {type(ahead).__qualname__}"
            )
        self._ahead = ahead
        if not state.global_step:
            return
        if not args.ignore_data_skip:
            raise InvalidArgumentError(
                "LoaderState: TrainingArguments(ignore_data_skip=True) must be set: the loader itself skips batches"
            )
        # The Trainer's attribute is first a list of callbacks, and later a dict of the callbacks' states.
        states = cast(dict[str, Any], state.stateful_callbacks)
        of_callback = states.get(type(self).__name__) or {}
        saved = of_callback.get("attributes", {}).get("saved")
        if saved is None:
            raise StateMismatchError(
                f"LoaderState: the checkpoint of step {state.global_step} was saved without this callback: take another"
            )
        if args.gradient_accumulation_steps > 1 and _length(ahead) % args.gradient_accumulation_steps:
            warn_user(
                f"LoaderState: the {_length(ahead)} batches of an epoch must be a multiple of "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}: else a Trainer that resumed "
                "accumulates over the end of the epoch, losses differ, and training may end before max_steps",
            )
        ahead.load_state_dict(cast(dict[str, Any], decode_state(base64.b64decode(saved))))
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
    """Return the path of the newest complete checkpoint of a Trainer in `output_dir`; None if it has none. The
    Trainer's own resume_from_checkpoint=True takes the newest folder, even if the job was killed while writing it."""
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
