"""Replacement of torch's get_worker_info() in a process that runs a user's loader: the result's `id` is the worker's
index in the run, so datasets that shard by get_worker_info() work unchanged.

In the worker processes of a torch DataLoader, torch's own answer is returned, and the call does not count as a read of
the assignment. Calls by torch's default_collate do not count either, and return None. Otherwise default_collate would
build each batch in new shared memory, which costs more than the batch.

If a loader has worker processes, its state is saved in the main process, where torch answers None. Some loaders refuse
to be saved if the answer is not None (litData's StreamingDataLoader). Their state methods get None, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data._utils import worker as torch_worker

from penstock.proto.state import assignment as assignments
from penstock.proto.state.generators import derive_seed
from penstock.proto.v1 import records_pb2

__all__ = ["Answers", "as_main_process", "exchange", "offer_worker_info"]

T = TypeVar("T")

_TORCH_COLLATE = "torch.utils.data._utils.collate"


class Answers:
    """Values that get_worker_info() returns to the code of one worker."""

    def __init__(self) -> None:
        self.seed = 0
        self.infos: dict[int, torch_worker.WorkerInfo] = {}
        self.given = 0
        """Number of calls of get_worker_info() so far whose result named the worker."""
        self.hidden = False
        self.refused = False
        """True if a state method raised when get_worker_info() named a worker, and succeeded when it returned None.
        State methods then always get None."""


_current: Answers | None = None
"""What get_worker_info() returns to the worker whose code runs now; None = torch's own answer is returned."""
_offered = 0
"""Process id of the process in which get_worker_info() is replaced; 0 = none."""


def exchange(answers: Answers | None) -> Answers | None:
    """Let get_worker_info() return the answers for another worker, in a process that several workers share in turn.
    Return the answers that were set before."""
    global _current
    before, _current = _current, answers
    return before


def offer_worker_info(a: records_pb2.WorkerAssignment) -> None:
    """Replace get_worker_info() in this process, so that its result names the worker for which the loader was made."""
    global _current, _offered
    if _current is None:
        _current = Answers()
    _current.seed = derive_seed(a.seed, "torch", a.box, a.slot)
    _current.infos.clear()
    own, theirs = os.getpid(), torch_worker.get_worker_info
    if _offered == own:
        return
    _offered = own

    def get_worker_info() -> torch_worker.WorkerInfo | None:
        answers = _current
        if answers is None or os.getpid() != own or answers.hidden or assignments.stands_aside():
            return theirs()
        if sys._getframe(1).f_globals.get("__name__") == _TORCH_COLLATE:
            return None
        answers.given += 1
        position = assignments.current_assignment()
        number = position.global_worker_id
        if number not in answers.infos:
            dataset: Any = None  # not known yet: user code makes it later
            answers.infos[number] = torch_worker.WorkerInfo(
                id=number, num_workers=position.total_num_workers, seed=answers.seed, dataset=dataset
            )
        return answers.infos[number]

    torch_worker.get_worker_info = get_worker_info
    torch.utils.data.get_worker_info = get_worker_info


def as_main_process(method: Callable[[], T]) -> T:
    """Call a state method of the loader, and return its result. If the method calls get_worker_info() and raises, call
    the method again while get_worker_info() returns None, as in a main process. If that succeeds, get_worker_info()
    returns None in all later calls of state methods."""
    answers = _current if _current is not None else Answers()
    if not answers.refused:
        before = answers.given
        try:
            return method()
        except Exception:
            if answers.given == before:
                raise
    answers.hidden = True
    try:
        result = method()
    finally:
        answers.hidden = False
    answers.refused = True
    return result
