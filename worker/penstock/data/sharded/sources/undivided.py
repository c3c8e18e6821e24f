"""A stream of a user's is told that it is the only worker.

Many datasets split themselves by torch's get_worker_info(), or by current_assignment() as our own loaders do. A logical
shard must be the same stream in whatever worker: split once more, each worker would deal its rows out of another one,
and half of the samples would never come, without a word. So while a stream's code runs, whoever asks hears of one box
with one worker, and of the run's seed.

Threads of a stream's own ask at any time, and may hear either.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from penstock.proto.state.assignment import Assignment, step_aside, step_back

__all__ = ["Undivided"]


class Undivided:
    """`with` it, and within another context, a stream's code runs. It is entered for each sample: that takes 0.5 us."""

    def __init__(self, within: AbstractContextManager[None]) -> None:
        self._within = within
        self._place: Assignment
        self._info: Any = None

    def __enter__(self) -> None:
        self._within.__enter__()
        self._place, self._info = step_aside(), torch_worker._worker_info
        torch_worker._worker_info = None

    def __exit__(self, *why: Any) -> None:
        torch_worker._worker_info = self._info
        step_back(self._place)
        self._within.__exit__(*why)
