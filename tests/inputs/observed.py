"""An input_fn whose processes say what they have loaded, and one of which kills itself once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.proto.state.counts import IMBALANCE, MEASURED, SAMPLES, TOKENS, Tally, new_row
from penstock.worker import current_assignment


class Numbers:
    def __init__(self, count: int, mortal: str) -> None:
        self._count, self._mortal = count, Path(mortal)
        self.tally = Tally(shares={"numbers": (1_000_000, 0)})

    def __iter__(self) -> Iterator[torch.Tensor]:
        me = current_assignment()
        for number in range(me.global_worker_id, self._count, me.total_num_workers):
            if me.slot == 1 and self._mortal.exists():
                self._mortal.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            row = new_row()
            row[SAMPLES], row[TOKENS], row[MEASURED], row[IMBALANCE] = 1, 256, 1, 12_500
            self.tally.add({("numbers", "odd" if number % 2 else "even"): row})
            yield torch.full((256,), number)


def input_fn(count: int, mortal: str) -> Numbers:
    """mortal: a file; once it is there, slot 1 dies in its next batch, and takes it along."""
    print("loaded \x1b[2J")
    return Numbers(count, mortal)
