"""The training job: one process of this for each box. With everything started and stopped here:

PYTHONPATH=examples torchrun --nproc-per-node 2 -m streaming.train --data URL --cache FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from streaming.data import SIDE, input_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.state import decode_state, encode_state

GLOBAL_BATCH = 48


def train(data: str, cache: str, steps: int, out: Path, resume: Path | None) -> None:
    """`steps` steps, from the beginning or from a checkpoint, and a checkpoint at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(input_fn, url=data, cache=cache, global_batch_size=GLOBAL_BATCH)
    if resume is not None:
        saved: Any = decode_state(resume.read_bytes())
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # saved on whatever boxes and workers
    averaged = DistributedDataParallel(model)

    with Appliance(), open(out / f"box{dist.get_rank()}.jsonl", "w", buffering=1) as log:
        executor = DataExecutor(loader, num_steps=steps)
        for batch in executor:
            loss = nn.functional.cross_entropy(averaged(batch["picture"]), batch["kind"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rows = [(int(n), zlib.crc32(p.numpy())) for n, p in zip(batch["number"], batch["picture"], strict=True)]
            log.write(json.dumps({"step": executor.step, "rows": rows, "loss": loss.item()}) + "\n")
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            part = out / "checkpoint.part"
            part.write_bytes(encode_state(state))
            os.replace(part, out / "checkpoint")
        dist.barrier()  # a box that has left can be asked for its state for one more minute only


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small classifier of noisy pictures.")
    parser.add_argument("--data", required=True, help="folder or URL of the dataset")
    parser.add_argument("--cache", required=True, help="folder for shards on each worker's host")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True, help="for checkpoint and logs")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(options.data, options.cache, options.steps, options.out, options.resume)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
