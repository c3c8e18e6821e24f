"""PyTorch Lightning: the loader's position in Lightning's checkpoints.

Lightning saves the state of a loader itself, but as of the batch that its fetcher has taken, which is one ahead for a
loader without a length, and it does not load what it saved at the end of an epoch. So a callback counts the batches
that reach the loop, and saves and loads the state as its own.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from penstock.client.lookahead import Lookahead

__all__ = ["LoaderState"]


class LoaderState(Callback):
    """Makes training resume at the batch after the checkpoint's.

    Among the Trainer's callbacks, with the Lookahead that it trains on::

        ahead = Lookahead(DataLoader(input_fn))
        trainer = Trainer(callbacks=[LoaderState(ahead), ModelCheckpoint(every_n_train_steps=100, save_last=True)])
        trainer.fit(model, ahead, ckpt_path="last")
    """

    def __init__(self, ahead: Lookahead) -> None:
        self._ahead = ahead

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._ahead.took()

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._ahead.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ahead.load_state_dict(state_dict["loader"])
