"""Loaders whose process is killed at a chosen point of the user's code, and one that is slow to leave an epoch."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from proof.batches import batch_of
from proof.mutations import mutable, replaced

from penstock.worker import current_assignment

DEATHS = 2
"""Deaths of a slot in a history: four at one position would be a poison batch."""


class Dying:
    """Kills its process by SIGKILL: in iter(), in next(), after the last batch, or when its iterator is closed."""

    def __init__(self, length: int, point: str, folder: str, big: bool) -> None:
        self.length, self.point, self.folder, self.big = length, point, folder, big

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        self.at("iter")
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        order = list(range(self.length))
        random.shuffle(order)
        try:
            for number, index in enumerate(order):
                if number == 3:
                    self.at("next")
                yield batch_of(index, [float(torch.rand(()))], self.big)
            self.at("end")
        finally:
            self.at("leave")

    def at(self, point: str) -> None:
        """Die here if this is the point, in two of five cases."""
        if not self.folder or point != self.point or random.Random(time.monotonic_ns()).random() > 0.4:
            return
        slot = current_assignment().global_worker_id
        # A helper does its task once more, and then the save fails.
        helps = Path("/proc/self/cmdline").read_text().startswith("penstock-replayer")
        for death in range(1 if helps else DEATHS):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.folder}/death {slot} {death}", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)


@mutable
def dying(length: int = 9, point: str = "end", folder: str = "", big: bool = False) -> Any:
    loader = Dying(length, point, folder, big)
    if point == "hand over" and folder:
        from penstock.worker.runner import epoch_process

        def hand_over(*given: Any) -> None:
            loader.at(point)
            original(*given)

        original = replaced(epoch_process, "_hand_over", hand_over)
    return loader


class LeavesSlowly(Dying):
    """Takes longer to close its iterator than a child is given."""

    def at(self, point: str) -> None:
        if point == "leave":
            time.sleep(0.7)


@mutable
def leaves_slowly(length: int = 14, big: bool = False) -> Any:
    return LeavesSlowly(length, "", "", big)
