"""Loader of the four methods that deals batches to all workers in turn, and writes down which process made which."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.proto.state.restartable import get_worker_state
from penstock.worker import current_assignment


class Dealt:
    """`forgets`: batches by which a loaded state is too early, as with methods that are not exact."""

    def __init__(self, log: str, batch_s: float = 0.0, forgets: int = 0) -> None:
        place = current_assignment()
        self.worker, self.workers = place.global_worker_id, place.total_num_workers
        self.log, self.batch_s, self.forgets, self.before = Path(log), batch_s, forgets, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = self.before + self.worker
        while True:
            time.sleep(self.batch_s)
            with self.log.open("a") as file:
                file.write(f"{os.getpid()} {batch}\n")
            yield torch.full((2,), batch)
            batch += self.workers

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "now": get_worker_state().worker_step}

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        assert len({state["before"] for state in worker_states}) == 1, "counts since different states"
        return {"batches": worker_states[0]["before"] + sum(state["now"] for state in worker_states)}

    def deaggregate_state_dict(self, aggregated: dict[str, Any]) -> dict[str, Any]:
        return aggregated

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["batches"] - self.forgets
