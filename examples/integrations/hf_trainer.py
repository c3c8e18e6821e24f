"""Hugging Face's Trainer, fed by Penstock. If it is killed and started again, it resumes from the newest checkpoint.

    PYTHONPATH=examples python -m integrations.hf_trainer --out /tmp/trainer

With PENSTOCK_COORDINATOR=HOST:PORT and PENSTOCK_TOKEN in the environment the same line takes its batches from the
workers of that coordinator.
"""

from __future__ import annotations

from typing import Any

import torch
from integrations.command import StepLog, options
from integrations.data import input_fn
from integrations.model import WithLoss
from transformers import Trainer, TrainingArguments

from penstock.client import Appliance, DataLoader, Lookahead
from penstock.client.integrations.transformers import LoaderState, newest_checkpoint


class PenstockTrainer(Trainer):
    def __init__(self, ahead: Lookahead, log: StepLog, **arguments: Any) -> None:
        super().__init__(callbacks=[LoaderState()], **arguments)
        self.ahead, self.lines = ahead, log

    def get_train_dataloader(self) -> Any:
        return self.ahead

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *more: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, *more)
        self.lines.write(self.ahead.step + 1, loss.item(), inputs)  # a step counts after its end hook
        return loss


def main() -> None:
    arguments = options("Train a small model with Hugging Face's Trainer.").parse_args()
    torch.set_num_threads(1)  # so that sums are equal on all machines of a kind
    torch.manual_seed(0)
    ahead = Lookahead(DataLoader(input_fn, global_batch_size=32), checkpoint_steps=arguments.checkpoint_every)
    checkpoints = arguments.out / "checkpoints"
    training = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=arguments.steps,
        save_steps=arguments.checkpoint_every,
        learning_rate=1e-2,
        ignore_data_skip=True,  # the loader restores its position itself
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
    )
    with Appliance(), StepLog(arguments.out / "rank0.jsonl") as log:
        trainer = PenstockTrainer(ahead, log, model=WithLoss(), args=training)
        trainer.train(resume_from_checkpoint=newest_checkpoint(checkpoints))


if __name__ == "__main__":
    main()
