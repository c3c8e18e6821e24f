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

from penstock.client import Appliance, DataLoader
from penstock.client.integrations.transformers import newest_checkpoint, penstock_trainer


class Logged(Trainer):
    """The Trainer, with a log of what each step trained on, which the tests compare."""

    lines: StepLog

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *more: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, *more)
        self.lines.write(self.state.global_step + 1, loss.item(), inputs)
        return loss


def main() -> None:
    arguments = options("Train a small model with Hugging Face's Trainer.").parse_args()
    torch.set_num_threads(1)  # so that sums are equal on all machines of a kind
    torch.manual_seed(0)
    checkpoints = arguments.out / "checkpoints"
    training = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=arguments.steps,
        save_steps=arguments.checkpoint_every,
        learning_rate=1e-2,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
    )
    with Appliance(), StepLog(arguments.out / "rank0.jsonl") as log:
        batches = DataLoader(input_fn, global_batch_size=32)
        trainer = penstock_trainer(Logged)(model=WithLoss(), args=training, train_dataset=batches)
        trainer.lines = log
        trainer.train(resume_from_checkpoint=newest_checkpoint(checkpoints))


if __name__ == "__main__":
    main()
