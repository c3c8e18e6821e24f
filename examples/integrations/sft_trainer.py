"""TRL's SFTTrainer, fed by Penstock. If it is killed and started again, it resumes from the newest checkpoint.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m integrations.sft_trainer --out /tmp/sft

The rows are tokenized on the workers, so the trainer prepares nothing: its dataset is a placeholder.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from datasets import Dataset
from integrations.command import StepLog, options
from integrations.sequences import SEQUENCE, sft_input_fn
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from penstock.client import Appliance, DataLoader, Lookahead
from penstock.client.integrations.transformers import LoaderState, newest_checkpoint

GLOBAL_BATCH = 8


class PenstockSFTTrainer(SFTTrainer):
    def __init__(self, ahead: Lookahead, log: StepLog, **arguments: Any) -> None:
        super().__init__(callbacks=[LoaderState()], **arguments)
        self.ahead, self.lines = ahead, log

    def get_train_dataloader(self) -> Any:
        return self.ahead

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *more: Any) -> torch.Tensor:
        piece = inputs.pop("piece")
        loss: torch.Tensor = super().training_step(model, inputs, *more)
        self.lines.write(self.ahead.step + 1, loss.item(), {"piece": piece, "input_ids": inputs["input_ids"]})
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
    ahead = Lookahead(
        DataLoader(sft_input_fn, global_batch_size=GLOBAL_BATCH), checkpoint_steps=arguments.checkpoint_every
    )
    checkpoints = arguments.out / "checkpoints"
    training = SFTConfig(
        output_dir=str(checkpoints),
        max_steps=arguments.steps,
        save_steps=arguments.checkpoint_every,
        learning_rate=1e-2,
        ignore_data_skip=True,  # the loader restores its position itself
        dataset_kwargs={"skip_prepare_dataset": True},
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
    )
    rank = os.environ.get("RANK", "0")
    with Appliance(), StepLog(arguments.out / f"rank{rank}.jsonl") as log:
        trainer = PenstockSFTTrainer(
            ahead,
            log,
            model=small_model(),
            args=training,
            train_dataset=Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]}),
            processing_class=byte_tokenizer(),
        )
        trainer.train(resume_from_checkpoint=newest_checkpoint(checkpoints))


if __name__ == "__main__":
    main()
