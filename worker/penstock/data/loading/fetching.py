"""Prefetching of batches in threads or processes, in order. The position counts only batches that the caller has taken:
after a resume, prefetched ones are made again.

Threads suit waits for disk or network, and code that releases the GIL. They only read samples: the main thread
collates, in a runner directly into the ring. Processes are those of a torch DataLoader whose sampler yields plans of
batches.
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
from penstock.runtime.process.end import describe_exit

__all__ = ["ReadAhead", "check_threads", "in_processes", "in_threads"]

EXIT_WAIT_S = 5.0
"""Seconds for the exit status of a process that stopped sending; it usually comes in milliseconds."""
PREFETCHED_BATCHES = 2
"""Batches that each thread or process makes ahead, as torch's default."""


class ReadAhead:
    """A worker's batches of an epoch, made ahead. `begin`: makes an iterator of batches from one of plans; dropping
    that stops its threads or processes."""

    def __init__(self, own_batches: WorkerBatches, begin: Callable[[Iterator[BatchPlan]], Iterator[Any]]) -> None:
        self._worker_batches, self._begin = own_batches, begin
        self._batches: Iterator[Any] | None = None

    def take(self, done: int) -> Any:
        """Return batch `done` of the worker's, which must exist. The caller adds one at each call, but repeats it after
        an error."""
        if self._batches is None:
            self._batches = self._begin(self._worker_batches.all_plans(done))
        try:
            return next(self._batches)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop making batches, until the next `take`."""
        self._batches = None


def check_threads(threads: int, reseed: bool | None) -> None:
    if threads < 0:
        raise InvalidArgumentError(f"fetch_threads must be at least 0, got {threads}. Pass 0 to read without threads")
    if threads and reseed:
        raise InvalidArgumentError(
            f"fetch_threads must be 0 with reseed=True, got {threads}, because threads share the process's random "
            "generators. Use more workers (or fetch_processes of MapLoader), or a generator of the dataset's own with "
            "reseed=False"
        )


def in_threads(plans: Iterator[BatchPlan], reader: MapReader, threads: int) -> Iterator[Any]:
    wanted: SimpleQueue[tuple[Future[Any], BatchPlan] | None] = SimpleQueue()
    ahead: deque[tuple[Future[Any], BatchPlan]] = deque()
    for _ in range(threads):
        # Plain daemon threads instead of a ThreadPoolExecutor's: a read that hangs must not delay the end of the loop
        # or of the process.
        Thread(target=_read, args=(wanted, reader), name="penstock-fetch", daemon=True).start()
    try:
        for plan in plans:
            ahead.append((Future(), plan))
            wanted.put(ahead[-1])
            if len(ahead) > PREFETCHED_BATCHES * threads:
                yield _collated(reader, *ahead.popleft())
        while ahead:
            yield _collated(reader, *ahead.popleft())
    finally:
        for future, _ in ahead:
            future.cancel()
        for _ in range(threads):
            wanted.put(None)


def _collated(reader: MapReader, future: Future[Any], plan: BatchPlan) -> Any:
    return reader.collated(plan, future.result())


def _read(wanted: SimpleQueue[tuple[Future[Any], BatchPlan] | None], reader: MapReader) -> None:
    while (next_one := wanted.get()) is not None:
        future, plan = next_one
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(reader.read(plan))
            except BaseException as error:
                future.set_exception(error)
        del next_one, future  # free the batch before waiting for the next plan


def in_processes(plans: Iterator[BatchPlan], reader: MapReader, processes: int, *, seed: int) -> Iterator[Any]:
    """Yield batches made by a torch DataLoader's processes. `seed`: of their generators, for samples read without
    `reseed`."""
    if multiprocessing.current_process().daemon:
        raise InvalidArgumentError(
            "fetch_processes must be 0 inside a daemonic process, such as a worker process of a torch DataLoader, "
            f"because it must not have children, got {processes}. Use either the DataLoader's num_workers or "
            "fetch_processes"
        )
    loader = torch.utils.data.DataLoader(
        _Batches(reader),
        sampler=plans,
        batch_size=None,
        num_workers=processes,
        prefetch_factor=PREFETCHED_BATCHES,
        collate_fn=_unchanged,
        generator=torch.Generator().manual_seed(seed),  # by default torch draws from this process's generator
    )
    batches: Iterator[Any] | None = iter(loader)
    workers = list(getattr(batches, "_workers", ()))  # torch's own list is the only source of exit codes
    failed: Exception | None = None
    while batches is not None:
        try:
            _watch(batches, workers)
            if _status(workers, 0.0) is not None:
                raise _WorkerEnded
            data = next(batches)
            _watch(batches, [])
            batch = _received(data)
        except StopIteration:
            return
        except Exception as error:
            with contextlib.suppress(RuntimeError, ValueError):  # the handler raised, or the iterator has ended
                _watch(batches, [])
            failed = _explained(error, workers, reader.name)
        if failed is not None:
            # The error's message contains the process's traceback. Its own traceback and cause would keep torch's
            # iterator, and so the processes, alive for as long as the caller holds the error. Collected that late, each
            # process takes five seconds to end.
            batches = None
            workers.clear()
            try:
                raise failed from None
            finally:
                failed = None
        yield batch


def _watch(batches: Iterator[Any], workers: list[Any]) -> None:
    """Set the processes that torch's SIGCHLD handler checks. When one has ended, it raises in the main thread, even in
    user code, so they are set only while this module waits for a batch. That wait needs it: otherwise a process that
    ends while it sends would be waited for forever."""
    _C._remove_worker_pids(id(batches))
    _C._set_worker_pids(id(batches), tuple(worker.pid for worker in workers))


def _explained(error: Exception, workers: list[Any], name: str) -> Exception:
    """Return the error to raise: how a process has ended, or `error` without traceback and context. Not all who notice
    an end report it."""
    if isinstance(error, RuntimeError):
        status = _status(workers, EXIT_WAIT_S if isinstance(error, _WorkerEnded) else 0.0)
        if status is not None:
            return RuntimeError(
                f"a process that reads {name} {describe_exit(status)}. See its messages on standard error; if memory "
                "is short, use fewer fetch_processes"
            )
    error.__context__ = None
    return error.with_traceback(None)


def _status(workers: list[Any], wait_s: float) -> int | None:
    """Wait up to `wait_s` for a worker's exit status (-9: signal 9); None if all are alive then."""
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
    """Dataset of whole batches. They are pickled here: torch's queue has a feeder thread that drops objects that cannot
    be sent (a function, a tensor that requires grad), and the reader would wait forever."""

    def __init__(self, reader: MapReader) -> None:
        self._reader = reader

    def __getitem__(self, plan: BatchPlan) -> bytes:
        try:
            batch = self._reader.batch(plan)
        except Exception as error:
            if _sendable(type(error)):
                raise
            raise DatasetError(
                f"{self._reader.name}: making a batch raised {type(error).__qualname__} in a process of "
                f"fetch_processes: {error}"
            ) from error
        try:
            return bytes(ForkingPickler.dumps(batch))
        except Exception as error:
            raise DatasetError(
                f"{self._reader.name}: a batch cannot be sent from a process of fetch_processes: {error}. Make samples "
                "of tensors, arrays and plain values, or use fetch_threads"
            ) from error


class _WorkerEnded(RuntimeError):
    """A process can no longer send batches. It is ending, but may still be alive."""


def _received(batch: bytes) -> Any:
    try:
        return pickle.loads(batch)
    except (OSError, EOFError) as error:  # the receiver could not open the shared memory of the batch's tensors
        raise _WorkerEnded(
            f"a process of fetch_processes ended before its batch was read: {error}".rstrip(": ")
        ) from error


def _sendable(error: type[Exception]) -> bool:
    try:
        ForkingPickler.dumps(error)
    except Exception:
        return False
    return True


def _unchanged(batch: Any) -> Any:
    return batch
