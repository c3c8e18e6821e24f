"""Prefetching of batches in threads, in order. The position counts only batches that the caller has taken: after a
resume, prefetched ones are made again.

Threads suit waits for disk or network, and code that releases the GIL. They only read samples: the main thread
collates, in a runner directly into the ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

from penstock.data.loading.map_reading import MapReader
from penstock.data.ordering.epoch_plan import BatchPlan, WorkerBatches
from penstock.proto.errors import InvalidArgumentError

PREFETCHED_BATCHES = 2
"""Batches that each thread reads ahead, as torch's default."""


class ReadAhead:
    """A worker's batches of an epoch, read ahead by `threads` threads."""

    def __init__(self, own_batches: WorkerBatches, reader: MapReader, threads: int) -> None:
        self._worker_batches, self._reader, self._threads = own_batches, reader, threads
        self._batches: Iterator[Any] | None = None

    def take(self, done: int) -> Any:
        """Return batch `done` of the worker's, which must exist. The caller adds one at each call, but repeats it after
        an error."""
        if self._batches is None:
            self._batches = _in_threads(self._worker_batches.all_plans(done), self._reader, self._threads)
        try:
            return next(self._batches)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop reading batches, until the next `take`. Dropping the iterator ends its threads."""
        self._batches = None


def check_threads(threads: int, reseed: bool | None) -> None:
    if threads < 0:
        raise InvalidArgumentError(f"fetch_threads must be at least 0, got {threads}")
    if threads and reseed:
        raise InvalidArgumentError(
            f"fetch_threads must be 0 with reseed=True, got {threads}: threads share the generators. Use more workers"
        )


def _in_threads(plans: Iterator[BatchPlan], reader: MapReader, threads: int) -> Iterator[Any]:
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
