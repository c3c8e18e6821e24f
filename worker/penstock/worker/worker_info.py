"""torch's get_worker_info() in a process that runs a user's loader: a worker's place among all of the run's.

Datasets that shard by it do the right thing unchanged. In the worker processes of a torch DataLoader its own answer
stands, and does not count as a look at ours. Nor does torch's own default_collate: it asks whether to build batches in
shared memory that it makes for each, which costs more than the batch and is of no use here.

A loader with worker processes is saved in the main one, where torch answers None. Some loaders refuse to be saved
anywhere else (litData's StreamingDataLoader); they get that answer in their state methods.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch.utils.data
from torch.utils.data._utils import worker as torch_worker

from penstock.proto import assignment as place_of
from penstock.proto.rng import derive_seed
from penstock.proto.v1 import records_pb2

__all__ = ["as_main_process", "offer_worker_info"]

T = TypeVar("T")

_TORCH_COLLATE = "torch.utils.data._utils.collate"


class _Answers:
    """What get_worker_info() does in this process."""

    given = 0
    """Answers so far that named a worker."""
    hidden = False
    refused = False
    """A state method raised where a worker was named, and did not where none was."""


def offer_worker_info(a: records_pb2.WorkerAssignment) -> None:
    """Answer get_worker_info() in this process with the worker's place."""
    own = os.getpid()
    info = torch_worker.WorkerInfo(
        id=a.box * a.num_workers_per_box + a.slot,
        num_workers=a.num_boxes * a.num_workers_per_box,
        seed=derive_seed(a.seed, "torch", a.box, a.slot),
        dataset=None,  # type: ignore[arg-type]  # the dataset is made after this, by the user
    )
    theirs = torch_worker.get_worker_info

    def get_worker_info() -> torch_worker.WorkerInfo | None:
        if os.getpid() != own or _Answers.hidden or place_of.stands_aside():
            return theirs()
        if sys._getframe(1).f_globals.get("__name__") == _TORCH_COLLATE:
            return None
        place_of.mark_looked_at()
        _Answers.given += 1
        return info

    torch_worker.get_worker_info = get_worker_info
    torch.utils.data.get_worker_info = get_worker_info


def as_main_process(method: Callable[[], T]) -> T:
    """Call a state method of the loader. One that asks get_worker_info() and raises is called again as torch calls it,
    in a main process that has no worker info; and so from then on, if that helps."""
    if not _Answers.refused:
        before = _Answers.given
        try:
            return method()
        except Exception:
            if _Answers.given == before:
                raise
    _Answers.hidden = True
    try:
        result = method()
    finally:
        _Answers.hidden = False
    _Answers.refused = True
    return result
