"""Hugging Face Accelerate with two processes, fed by Penstock. If it is killed and started again, it resumes from the
newest checkpoint.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m integrations.accelerate_loop --out /tmp/accelerate

(`accelerate launch --multi_gpu` sets the same variables; with `--cpu --num_processes 2` it started one process, so on
CPUs use torchrun.) With PENSTOCK_COORDINATOR=HOST:PORT and PENSTOCK_TOKEN in the environment
the same line takes its batches from the workers of that coordinator.

Accelerate's loader moves batches to the device, and reports the last batch of an epoch to `accumulate`. To detect the
last batch it reads one batch ahead of the loop, so saved states must be one batch older: that is what Lookahead does.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from integrations.command import StepLog, options
from integrations.data import input_fn
from integrations.model import WithLoss

from penstock.client import Appliance, DataLoader, Lookahead


def main() -> None:
    arguments = options("Train a small model with Accelerate.").parse_args()
    torch.set_num_threads(1)  # so that sums are equal on all machines of a kind
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = WithLoss()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ahead = Lookahead(DataLoader(input_fn, global_batch_size=32), checkpoint_steps=arguments.checkpoint_every)
    # Each process is a Penstock box and has batches of its own already: num_processes=1 keeps Accelerate from sharing
    # them among the processes again.
    batches = prepare_data_loader(
        torch.utils.data.DataLoader(ahead, batch_size=None),
        device=accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
    )
    accelerator.register_for_checkpointing(ahead)
    log_file = arguments.out / f"rank{accelerator.process_index}.jsonl"
    with Appliance(), StepLog(log_file) as log:
        if (newest := newest_checkpoint(arguments.out)) is not None:
            accelerator.load_state(str(newest))
        due = False
        while ahead.step < arguments.steps:
            for batch in ahead.handed_out(batches):
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                log.write(ahead.step, loss.item(), batch)
                due = due or ahead.step % arguments.checkpoint_every == 0
                if due and accelerator.sync_gradients:  # a checkpoint has no partly accumulated gradients
                    save(accelerator, arguments.out, ahead.step)
                    due = False
                if ahead.step == arguments.steps:
                    break
    accelerator.end_training()


def save(accelerator: Accelerator, out: Path, step: int) -> None:
    """Save a checkpoint so that it appears as a whole or not at all."""
    unfinished = out / "unfinished"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unfinished.rename(out / f"step-{step}")
    accelerator.wait_for_everyone()


def newest_checkpoint(out: Path) -> Path | None:
    steps = [int(found[1]) for path in out.iterdir() if (found := re.fullmatch(r"step-(\d+)", path.name))]
    return out / f"step-{max(steps)}" if steps else None


if __name__ == "__main__":
    main()
