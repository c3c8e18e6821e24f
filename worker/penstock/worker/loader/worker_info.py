"""Replacement of torch's get_worker_info() where a user's loader runs. Its answer depends on what the loader has read
of its assignment (`Reads` in proto/state/assignment.py), so that no loader divides its samples twice:

    nothing                     the worker's number in the run: datasets that shard by get_worker_info() alone work
    its box, or their number    the worker's number in its box: datasets that were split by box first
    the worker's own number     None, as in a worker of cstorch

In worker processes of a torch DataLoader torch itself answers. Calls by default_collate get None, because it would
build each batch in new shared memory, which costs more than the batch. Neither counts as a read. State methods get None
too if the loader refuses to be saved otherwise (litData's StreamingDataLoader): torch answers None in the main process,
where a loader with worker processes is saved.

transformers' collators, with a seed, ask for multiprocessing's name of the process first, and add the worker's number
to the seed unless it is "MainProcess": so a worker has another name. They divide no samples, so their call is not a
read either, and is always answered, with the run's number.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.utils.data._utils import worker as torch_worker

from penstock.proto.state import assignment as assignments
from penstock.proto.state.assignment import WorkerInfoAnswer
from penstock.proto.state.generators import derive_seed
from penstock.proto.v1 import records_pb2

T = TypeVar("T")

_TORCH_COLLATE = "torch.utils.data._utils.collate"
_SEEDED_COLLATE = "transformers.data.data_collator"
_PROCESS_NAME = "penstock-runner"
_OWN_NAME = multiprocessing.current_process().name


class Answers:
    def __init__(self) -> None:
        self.seed = 0
        self.infos: dict[WorkerInfoAnswer, torch_worker.WorkerInfo] = {}
        self.given = 0
        """Calls so far whose result named the worker."""
        self.hidden = False
        self.refused = False
        """True if a state method raised when a worker was named, and not with None, which it then always gets."""


_current: Answers | None = None
"""None: torch's own answer is returned."""


def exchange(answers: Answers | None) -> Answers | None:
    """Set the answers for another worker of this process, and return those before."""
    global _current
    before, _current = _current, answers
    _name_process()
    return before


def offer_worker_info(a: records_pb2.WorkerAssignment) -> None:
    """Let get_worker_info() name this worker. The function's code is replaced, as user code may have imported it
    before."""
    global _current
    if _current is None:
        _current = Answers()
    _current.seed = derive_seed(a.seed, "torch", a.box, a.slot)
    _current.infos.clear()
    _name_process()
    torch_worker.get_worker_info.__code__ = _forward.__code__
    torch_worker.get_worker_info.__defaults__ = (_answer,)


def _name_process() -> None:
    multiprocessing.current_process().name = _OWN_NAME if _current is None else _PROCESS_NAME


def _forward(answer: Callable[[], torch_worker.WorkerInfo | None]) -> torch_worker.WorkerInfo | None:
    return answer()


def _answer() -> torch_worker.WorkerInfo | None:
    answers, own_worker = _current, torch_worker._worker_info
    if own_worker is not None or answers is None:
        return own_worker
    caller = sys._getframe(2)
    module = caller.f_globals.get("__name__")
    if module == _SEEDED_COLLATE:
        return _info(WorkerInfoAnswer.OF_RUN, answers.seed)
    if module == _TORCH_COLLATE or answers.hidden or assignments.stands_aside():
        return None
    answer = assignments.reads().ask(caller)
    if answer is WorkerInfoAnswer.NONE:
        return None
    answers.given += 1
    if answer not in answers.infos:
        answers.infos[answer] = _info(answer, answers.seed)
    return answers.infos[answer]


def _info(answer: WorkerInfoAnswer, seed: int) -> torch_worker.WorkerInfo:
    place, of_box = assignments.process_assignment(), answer is WorkerInfoAnswer.OF_BOX
    dataset: Any = None  # not known yet: user code makes it later
    return torch_worker.WorkerInfo(
        id=place.slot if of_box else place.global_worker_id,
        num_workers=place.num_workers_per_box if of_box else place.total_num_workers,
        seed=seed,
        dataset=dataset,
    )


def describe_reads(capabilities: records_pb2.LoaderCapabilities) -> None:
    capabilities.looked_at_assignment |= assignments.looked_at()
    capabilities.worker_info = records_pb2.WorkerInfo.ValueType(assignments.reads().answer)


@contextmanager
def uncounted() -> Iterator[None]:
    """Save or load a loader's state: what it reads there changes no answer of get_worker_info()."""
    reads = assignments.reads()
    before, reads.paused = reads.paused, True
    try:
        yield
    finally:
        reads.paused = before


def as_main_process(method: Callable[[], T]) -> T:
    """Call a state method of the loader. If it calls get_worker_info() and raises, call it again with None as the
    answer, as in a main process; if that succeeds, all later calls get None."""
    answers = _current if _current is not None else Answers()
    with uncounted():
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
