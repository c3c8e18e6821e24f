"""PyTorch Lightning: the loader's position in Lightning's checkpoints.

Lightning saves a loader's state at the batch that its fetcher has taken, without a length one ahead of the loop, and
does not load a state saved at the end of an epoch. So a callback counts the batches that reach the loop, and saves and
loads the state. It also records the end of Lightning's epoch, which limit_train_batches may make shorter than the
loader's."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from penstock.client.api.lookahead import Lookahead
from penstock.proto.tracebacks import warn_user

__all__ = ["LoaderState"]


class LoaderState(Callback):
    """Callback that makes training resume at the first batch that was not trained on before the checkpoint.

    Pass the callback to the Trainer, with the Lookahead that is trained on::

        ahead = Lookahead(DataLoader(input_fn))
        trainer = Trainer(callbacks=[LoaderState(ahead), ModelCheckpoint(every_n_train_steps=100, save_last=True)])
        trainer.fit(model, ahead, ckpt_path="last")

    A training_step(dataloader_iter), which takes batches itself, calls ahead.took() for each.
    """

    def __init__(self, ahead: Lookahead) -> None:
        self._ahead = ahead
        self._trainer: Trainer | None = None
        self._step_counts = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        self._step_counts = "dataloader_iter" in inspect.signature(pl_module.training_step).parameters

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        count, batches = trainer.accumulate_grad_batches, loop.batch_progress
        unsized = trainer.num_training_batches == float("inf")
        if loop.restarting and unsized and batches.is_last_batch and batches.current.ready % count:
            warn_user(
                f"LoaderState: the {batches.current.ready} batches of the checkpoint's epoch are no multiple of "
                f"accumulate_grad_batches={count}, so Lightning accumulates in another way than uninterrupted: give "
                "the loader a length, or resume from an epoch's end",
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._step_counts:
            self._ahead.took()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch is None and not self._step_counts:  # Lightning has not called on_train_batch_start
            self._ahead.took()

    def state_dict(self) -> dict[str, Any]:
        over, left = self._epoch_over(), self._ahead.mid_epoch
        return {"loader": self._ahead.state_dict(), "abandoned_epoch": over and left, "ended_epoch": over and not left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ahead.load_state_dict(state_dict["loader"])
        if state_dict.get("abandoned_epoch"):
            self._ahead.leave_epoch()
        elif state_dict.get("ended_epoch"):
            self._ahead.leave_epoch(at_its_end=True)

    def _epoch_over(self) -> bool:
        """True if the last batch of Lightning's epoch is done, by the progress from which Lightning itself resumes: the
        checkpoint may be saved after that batch, the validation or the epoch."""
        if self._trainer is None:
            return False
        batches = self._trainer.fit_loop.epoch_loop.batch_progress
        return batches.is_last_batch or batches.current.ready == self._trainer.num_training_batches
