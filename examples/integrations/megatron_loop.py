"""Megatron-core: GPT with tensor, pipeline, context and data parallelism, fed and resumed by Penstock.

    PYTHONPATH=examples torchrun --nproc-per-node 4 -m integrations.megatron_loop --tp 2 --pp 2 --out run1

The same command resumes from the newest checkpoint, and so does one with other numbers of ranks. --tp, --pp and --cp
split the model; the other ranks are data-parallel, and each of those is a box. --chunks makes a virtual pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integrations.command import StepLog, options
from integrations.sequences import SEQUENCE, input_fn
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from penstock.client import DataLoader
from penstock.client.integrations.megatron_data import DataIterator, box_appliance

MICRO_BATCH = 2
GLOBAL_BATCH = 16
"""Number of samples in an iteration, over all ranks and microbatches."""


@dataclass(frozen=True)
class Split:
    """Division of the work: number of ranks in each parallel dimension, and number of model chunks of each rank."""

    tp: int
    pp: int
    cp: int
    chunks: int | None


def models_of(split: Split) -> list[GPTModel]:
    """Return the model chunks of this rank: one, or those of a virtual pipeline."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,  # the same weights for each split
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=split.tp,
        pipeline_model_parallel_size=split.pp,
        virtual_pipeline_model_parallel_size=split.chunks,
        context_parallel_size=split.cp,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    models = []
    for chunk in range(split.chunks or 1):
        torch.manual_seed(1 + chunk)
        stage = None if split.chunks is None else chunk
        models.append(
            GPTModel(
                config,
                get_gpt_layer_local_spec(),
                vocab_size=256,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
            )
        )
    return models


class Trainer:
    """Training job of one rank."""

    def __init__(self, split: Split, out: Path, device: torch.device) -> None:
        self.split, self.out, self.device = split, out, device
        self.models = [model.to(device) for model in models_of(split)]
        # Without momentum an optimizer has no state. Megatron's have a sharded_state_dict(), which is saved like the
        # model's.
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.5)
        self.parameters = parameters
        self.taken: list[dict[str, torch.Tensor]] = []
        """Microbatches that this rank has taken in this iteration, for the log."""

    def forward_step(self, data_iterator: Iterator[Any], model: GPTModel) -> tuple[torch.Tensor, Any]:
        batch: dict[str, Any] = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
        if model.pre_process or model.post_process:  # stages between them have only activations
            batch = dict(next(data_iterator))  # a copy, because the next lines change it
            self.taken.append({"piece": batch.pop("piece"), "tokens": batch["tokens"]})
            batch = get_batch_on_this_cp_rank(batch)
            batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(self.loss, batch["loss_mask"])

    @staticmethod
    def loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (output * mask).sum() / mask.sum()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides `loss` in place

    def iterate(self, data_iterator: Any, num_microbatches: int) -> float:
        """Make one iteration. Return the mean loss over this rank's microbatches; 0.0 on ranks that do not compute the
        loss."""
        self.taken.clear()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=data_iterator,
            model=self.models if self.split.chunks else self.models[0],
            num_microbatches=num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, group=group)
                parameter.grad /= group.size()
        self.optimizer.step()
        return sum(one["loss"].item() for one in losses) / len(losses) if losses else 0.0

    # ---- checkpoints

    def sharded(self) -> dict[str, Any]:
        return {f"model{chunk}": model.sharded_state_dict() for chunk, model in enumerate(self.models)}

    def save(self, iteration: int, data: DataIterator) -> None:
        """Save the model in shards, one from each rank. The rest is the same on all ranks, and is saved once."""
        folder = self.out / "checkpoints" / f"iter_{iteration:07}"
        state = {**self.sharded(), "data": data.state_dict(), "iteration": iteration}
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state, str(folder))
        if dist.get_rank() == 0:
            (folder / "complete").touch()
        dist.barrier()

    def restore(self, data: DataIterator) -> int:
        """Load the newest checkpoint. Return its iteration; 0 if there is no checkpoint."""
        folders = sorted(path.parent for path in (self.out / "checkpoints").glob("iter_*/complete"))
        dist.barrier()  # all ranks have listed the folder, so that none sees another rank's next save
        if not folders:
            return 0
        state = dist_checkpointing.load(self.sharded(), str(folders[-1]))
        for chunk, model in enumerate(self.models):
            model.load_state_dict(state[f"model{chunk}"])
        data.load_state_dict(state["data"])
        return int(state["iteration"])


def train(split: Split, steps: int, checkpoint_every: int, out: Path) -> None:
    """Train up to iteration `steps`, from the newest checkpoint in `out` if there is one."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    trainer = Trainer(split, out, device)
    dp = parallel_state.get_data_parallel_world_size()
    num_microbatches = GLOBAL_BATCH // (MICRO_BATCH * dp)
    loader = DataLoader(input_fn, global_batch_size=MICRO_BATCH * dp)
    with (
        box_appliance(),
        DataIterator(
            loader, num_steps=steps * num_microbatches, checkpoint_steps=checkpoint_every * num_microbatches
        ) as data,
        StepLog(out / f"rank{dist.get_rank()}.jsonl") as log,
    ):
        done = trainer.restore(data)
        assert (data.consumed_samples or 0) == done * GLOBAL_BATCH
        iterators = data.chunks(split.chunks) if split.chunks else data
        for iteration in range(done + 1, steps + 1):
            loss = trainer.iterate(iterators, num_microbatches)
            log.write(iteration, loss, *trainer.taken)
            if iteration % checkpoint_every == 0 or iteration == steps:
                trainer.save(iteration, data)


def main() -> None:
    parser = options("Train a small GPT with Megatron-core.")
    for name, meaning in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        parser.add_argument(f"--{name}", type=int, default=1, metavar="RANKS", help=f"{meaning}-parallel ranks (1)")
    parser.add_argument("--chunks", type=int, default=None, help="model chunks of a rank, for a virtual pipeline")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # one core a rank; and sums are equal on all machines of a kind
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=60)
    )
    parallel_state.initialize_model_parallel(
        chosen.tp,
        chosen.pp,
        virtual_pipeline_model_parallel_size=chosen.chunks,
        context_parallel_size=chosen.cp,
    )
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(1)
    split = Split(chosen.tp, chosen.pp, chosen.cp, chosen.chunks)
    train(split, chosen.steps, chosen.checkpoint_every, chosen.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
