"""TRL's SFTTrainer, fed by Penstock. If it is killed and started again, it resumes from the newest checkpoint.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m integrations.sft_trainer --out /tmp/sft

The rows are tokenized on the workers, so the trainer prepares nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from integrations.command import StepLog, options
from integrations.sequences import SEQUENCE, sft_input_fn
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from penstock.client import Appliance, DataLoader
from penstock.client.integrations.transformers import newest_checkpoint, penstock_trainer

GLOBAL_BATCH = 8


class Logged(SFTTrainer):
    """The trainer, with a log of what each step trained on, which the tests compare."""

    lines: StepLog

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *more: Any) -> torch.Tensor:
        piece = inputs.pop("piece")
        loss: torch.Tensor = super().training_step(model, inputs, *more)
        self.lines.write(self.state.global_step + 1, loss.item(), {"piece": piece, "input_ids": inputs["input_ids"]})
        return loss


def small_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=SEQUENCE,
        )
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer, because the trainer requires one. It tokenizes nothing here."""
    words = {chr(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="\0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\0", pad_token="\0")


def main() -> None:
    arguments = options("Fine-tune a small model with TRL's SFTTrainer.").parse_args()
    torch.set_num_threads(1)  # so that sums are equal on all machines of a kind
    torch.manual_seed(0)
    checkpoints = arguments.out / "checkpoints"
    training = SFTConfig(
        output_dir=str(checkpoints),
        max_steps=arguments.steps,
        save_steps=arguments.checkpoint_every,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
    )
    rank = os.environ.get("RANK", "0")
    with Appliance(), StepLog(arguments.out / f"rank{rank}.jsonl") as log:
        trainer = penstock_trainer(Logged)(
            model=small_model(),
            args=training,
            train_dataset=DataLoader(sft_input_fn, global_batch_size=GLOBAL_BATCH),
            processing_class=byte_tokenizer(),
        )
        trainer.lines = log
        trainer.train(resume_from_checkpoint=newest_checkpoint(checkpoints))


if __name__ == "__main__":
    main()
