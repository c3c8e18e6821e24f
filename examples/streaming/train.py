"""Training job: one process of this for each box. With all daemons started and stopped here:

PYTHONPATH=examples torchrun --nproc-per-node 2 -m streaming.train --data URL --cache FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from streaming.data import SIDE, input_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.checkpoint import AsyncCheckpointer

GLOBAL_BATCH = 48


def train(data: str, cache: str, steps: int, out: Path) -> None:
    """Train up to step `steps`, from the newest checkpoint in `out` if there is one, and save a checkpoint at the
    end."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(input_fn, url=data, cache=cache, global_batch_size=GLOBAL_BATCH)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    log_file = out / f"box{dist.get_rank()}.jsonl"
    with AsyncCheckpointer(out / "checkpoints") as checkpointer, Appliance(), log_file.open("w", buffering=1) as log:
        done = checkpointer.restore(state) or 0  # saved on any number of boxes and workers
        executor = DataExecutor(loader, num_steps=steps - done)
        for batch in executor:
            loss = nn.functional.cross_entropy(model(batch["picture"]), batch["kind"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rows = [(int(n), zlib.crc32(p.numpy())) for n, p in zip(batch["number"], batch["picture"], strict=True)]
            log.write(json.dumps({"step": executor.step, "rows": rows, "loss": loss.item()}) + "\n")
        checkpointer.save(executor.step, state)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small classifier of noisy pictures.")
    parser.add_argument("--data", required=True, help="folder or URL of the dataset")
    parser.add_argument("--cache", required=True, help="folder for shards on each worker's host")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and logs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(options.data, options.cache, options.steps, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
