"""A rank that trains from a coordinator, saves each step, and goes on from the newest one: a script for torchrun.

FOLDER has a file of (step, row) for each rank, and of its process and of how often it was started."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from streams import shared

from penstock.client import Appliance, DataExecutor, DataLoader


def main(folder: Path, address: str, steps: int, kind: str) -> None:
    """`kind`: "gloo", a collective in each step; "plain", none; "early", and rank 1's first process dies before it has
    opened its box, and rank 0's second one comes late."""
    rank = int(os.environ["RANK"])
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    lives = folder / f"lives-{rank}"
    life = int(lives.read_text()) + 1 if lives.exists() else 1
    lives.write_text(str(life))
    if kind == "early" and (rank, life) == (1, 1):
        while not (folder / "rows-0").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "early" and (rank, life) == (0, 2):
        time.sleep(4)
    if kind == "gloo":
        torch.distributed.init_process_group("gloo")
    newest = folder / "newest.pt"
    step, state = torch.load(newest, weights_only=False) if newest.exists() else (0, None)
    with Appliance(address, num_workers_per_box=1, seed=3, timeout_s=100) as appliance:
        loader = DataLoader(shared, 1000)
        if state is not None:
            loader.load_state_dict(state)
        for batch in DataExecutor(loader, num_steps=steps - step, appliance=appliance):
            step += 1
            with (folder / f"rows-{rank}").open("a") as rows:
                rows.write(json.dumps([step, int(batch["number"])]) + "\n")
            if kind == "gloo":
                torch.distributed.all_reduce(torch.ones(1))
            else:
                wait_for(folder / f"rows-{1 - rank}", step)  # as collectives do
            saved: Any = loader.state_dict()
            if rank == 0:
                torch.save((step, saved), folder / "new.pt")
                (folder / "new.pt").rename(newest)
            if kind == "gloo" and "HOLDS" in os.environ and (life, step) == (3, 20):
                time.sleep(300)  # until its launcher ends it, because the other machine's is gone
            time.sleep(0.1)


def wait_for(rows: Path, step: int) -> None:
    while not rows.exists() or step not in (json.loads(line)[0] for line in rows.read_text().splitlines()):
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
