"""Batches that are made ahead of need, in threads or in processes, and handed out in order.

Both get the plans of an epoch's batches (ordering/course.py), which say what to read; where the loader stands is none
of their business. What was made and not taken is in no state, and is simply made again.

Threads are for data that wait for disk or network, and for code that lets go of Python's lock. They only read: batches
are collated in the main thread, where the ring is. Processes are torch's own DataLoader's, which knows how to watch
them, move tensors through shared memory, and bring back errors; it is given whole batches to make, in our order.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.utils.data
from torch import _C

from penstock.data.loading.map_reading import MapReader
from penstock.data.ordering.epoch_plan import BatchPlan, WorkerBatches
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.process.exit_status import describe_exit

__all__ = ["ReadAhead", "in_processes", "in_threads"]

DIES_S = 5.0
"""For a process that no longer sends to have an exit status; it takes milliseconds."""
AHEAD = 2
"""Batches for each thread or process that are made ahead, as torch's DataLoader does by default."""


class ReadAhead:
    """A Fetcher (position_loader.py). `begin` makes an iterator of batches from plans; to drop it is to stop it."""

    def __init__(self, batches_of_worker: WorkerBatches, begin: Callable[[Iterator[BatchPlan]], Iterator[Any]]) -> None:
        self._worker_batches, self._begin = batches_of_worker, begin
        self._batches: Iterator[Any] | None = None

    def take(self, done: int) -> Any:
        if self._batches is None:
            self._batches = self._begin(self._worker_batches.all_plans(done))
        try:
            return next(self._batches)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._batches = None


def in_threads(plans: Iterator[BatchPlan], reader: MapReader, threads: int) -> Iterator[Any]:
    wanted: SimpleQueue[tuple[Future[list[Any]], BatchPlan] | None] = SimpleQueue()
    ahead: deque[tuple[Future[list[Any]], BatchPlan]] = deque()
    for _ in range(threads):
        # Not those of a ThreadPoolExecutor: a read that hangs must not hold up who leaves, the process's end included.
        Thread(target=_read, args=(wanted, reader), name="penstock-fetch", daemon=True).start()
    try:
        for plan in plans:
            ahead.append((Future(), plan))
            wanted.put(ahead[-1])
            if len(ahead) > AHEAD * threads:
                yield _collated(reader, *ahead.popleft())
        while ahead:
            yield _collated(reader, *ahead.popleft())
    finally:
        for future, _ in ahead:
            future.cancel()
        for _ in range(threads):
            wanted.put(None)


def _collated(reader: MapReader, future: Future[list[Any]], plan: BatchPlan) -> Any:
    return reader.collated(plan, future.result())


def _read(wanted: SimpleQueue[tuple[Future[list[Any]], BatchPlan] | None], reader: MapReader) -> None:
    while (next_one := wanted.get()) is not None:
        future, plan = next_one
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(reader.samples(plan))
            except BaseException as error:
                future.set_exception(error)
        del next_one, future  # no batch is held while there is none to read


def in_processes(plans: Iterator[BatchPlan], reader: MapReader, processes: int, *, seed: int) -> Iterator[Any]:
    """`seed`: of the processes' generators, where these are not set for each sample.

    Raises InvalidArgumentError in a process that may have no children.
    """
    if multiprocessing.current_process().daemon:
        raise InvalidArgumentError(
            f"fetch_processes={processes} in a worker process of a torch DataLoader, which may have none of its own; "
            "use the DataLoader's num_workers or fetch_processes, one of the two"
        )
    loader = torch.utils.data.DataLoader(
        _Batches(reader),
        sampler=plans,
        batch_size=None,
        num_workers=processes,
        prefetch_factor=AHEAD,
        collate_fn=_as_it_is,
        generator=torch.Generator().manual_seed(seed),  # else it would draw from the process's own
    )
    batches: Iterator[Any] | None = iter(loader)
    workers = list(getattr(batches, "_workers", ()))  # torch's own list: nothing else says how one of them ended
    failed: Exception | None = None
    while batches is not None:
        try:
            _watch(batches, workers)
            if _status(workers, 0.0) is not None:
                raise _CutShort
            data = next(batches)
            _watch(batches, [])
            batch = _received(data)
        except StopIteration:
            return
        except Exception as error:
            with contextlib.suppress(RuntimeError, ValueError):  # the handler's, or the iterator has ended by itself
                _watch(batches, [])
            failed = _explained(error, workers, reader.name)
        if failed is not None:
            # Its message has the process's traceback. Our own would hold torch's iterator, and so its processes, for
            # as long as somebody holds the error; collected later, they take five seconds each to end. So would the
            # error behind it.
            batches = None
            workers.clear()
            try:
                raise failed from None
            finally:
                failed = None
        yield batch


def _watch(batches: Iterator[Any], workers: list[Any]) -> None:
    """Which of its processes torch's handler of SIGCHLD looks at. It raises wherever the main thread is: while we wait
    that ends the wait, also one for the rest of a message that will not come. Elsewhere it would be raised out of
    whatever the user does with a batch."""
    _C._remove_worker_pids(id(batches))
    _C._set_worker_pids(id(batches), tuple(worker.pid for worker in workers))


def _explained(error: Exception, workers: list[Any], name: str) -> Exception:
    """What to raise for it: how a process ended, if one did, and otherwise the error without what it holds.

    There are many ways to notice, and not all say how: torch's handler of SIGCHLD, its look at its processes every five
    seconds, our own, and a batch that was queued before and cannot be received any more.
    """
    if isinstance(error, RuntimeError):
        status = _status(workers, DIES_S if isinstance(error, _CutShort) else 0.0)
        if status is not None:
            return RuntimeError(f"a process that reads {name} {describe_exit(status)}")
    error.__context__ = None
    return error.with_traceback(None)


def _status(workers: list[Any], wait_s: float) -> int | None:
    """The exit status of one of them that has ended; -9: by signal 9. None if all live."""
    until, ends = time.monotonic() + wait_s, select.poll()
    for worker in workers:
        ends.register(worker.sentinel, select.POLLIN)
    while True:
        ended = [worker.exitcode for worker in workers if worker.exitcode is not None]
        left = until - time.monotonic()
        if ended or left <= 0:
            return next((status for status in ended if status), 0) if ended else None
        ends.poll(1000 * left)


class _Batches(torch.utils.data.Dataset[Any]):
    """A dataset whose samples are batches, by their plans.

    They are pickled here, and not where torch's queue does it: in a thread of its own, which drops what cannot be sent
    (a function, a tensor with a graph, one that finds no shared memory), and who reads would wait for ever.
    """

    def __init__(self, reader: MapReader) -> None:
        self._reader = reader

    def __getitem__(self, plan: BatchPlan) -> bytes:
        try:
            batch = self._reader.batch(plan)
        except Exception as error:
            if _sendable(type(error)):
                raise
            raise DatasetError(f"{type(error).__qualname__}: {error}") from error
        try:
            return bytes(ForkingPickler.dumps(batch))
        except Exception as error:
            raise DatasetError(
                f"{self._reader.name}: a batch cannot be sent from a process of fetch_processes: {error}. Let samples "
                "be of tensors, arrays and plain values, or use fetch_threads"
            ) from error


class _CutShort(RuntimeError):
    """A process closed what it sends batches through; it is about to end, but may not have."""


def _received(batch: bytes) -> Any:
    try:
        return pickle.loads(batch)
    except (OSError, EOFError) as error:  # of asking for the memory that its tensors are in
        raise _CutShort(f"a process ended before its batch was taken: {error}".rstrip(": ")) from error


def _sendable(error: type[Exception]) -> bool:
    try:
        ForkingPickler.dumps(error)
    except Exception:
        return False
    return True


def _as_it_is(batch: Any) -> Any:
    return batch
