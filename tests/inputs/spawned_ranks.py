"""Ranks of launchers that set no RANK: mp.spawn, and Lightning's ddp and ddp_spawn. A script.

HOW: "tcp" or "env" (of init_process_group, with mp.spawn), or a strategy of Lightning."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from streams import shared

from penstock.client import DataExecutor, DataLoader

STEPS = 4


def say(rank: int, rows: list[int]) -> None:
    os.write(1, f"rank {rank} {rows}\n".encode())  # in one piece: two ranks write here


def work(rank: int, how: str) -> None:
    place: Any = {"init_method": f"tcp://127.0.0.1:{os.environ['A_PORT']}"} if how == "tcp" else {}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, **place)
    say(rank, [int(batch["number"]) for batch in DataExecutor(DataLoader(shared, 20), num_steps=STEPS)])
    torch.distributed.barrier()


def fit(strategy: str) -> None:
    from lightning.pytorch import Trainer
    from rows_of_ranks import RowsOfRank

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", max_steps=STEPS, **quiet)  # type: ignore[arg-type]
    trainer.fit(RowsOfRank(), DataLoader(shared, 20))


if __name__ == "__main__":
    if sys.argv[1] in ("tcp", "env"):
        torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
    else:
        fit(sys.argv[1])
