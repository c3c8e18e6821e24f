"""Context in which the code of a user's stream appears to run in a job with a single worker.

Many datasets split themselves by torch's get_worker_info(), or by current_assignment() as Penstock's own loaders do. A
logical shard must be the same stream in any worker. If such a dataset split the stream again, each of two workers would
take its rows from a different part, and half of the samples would silently be left out. So while a stream's code runs,
get_worker_info() returns None, and current_assignment() one box with one worker, and the run's seed.

Threads that a stream starts may call these functions at any time, also outside of the context, and then get the real
values.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from penstock.proto.state.assignment import Assignment, step_aside, step_back

__all__ = ["SoleWorker"]


class SoleWorker:
    """Context manager inside which user code sees a job with one box and one worker. `within`: another context manager,
    which is entered and left with this one. To enter and leave it takes 0.5 us, once for each sample."""

    def __init__(self, within: AbstractContextManager[None]) -> None:
        self._within = within
        self._assignment: Assignment
        self._info: Any = None

    def __enter__(self) -> None:
        self._within.__enter__()
        self._assignment, self._info = step_aside(), torch_worker._worker_info
        torch_worker._worker_info = None

    def __exit__(self, *why: Any) -> None:
        torch_worker._worker_info = self._info
        step_back(self._assignment)
        self._within.__exit__(*why)
