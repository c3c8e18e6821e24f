"""Batches that are made ahead of need, in threads or in processes, and handed out in order.

Both get the plans of a pass's batches (ordering/course.py), which say what to read; where the loader stands is none of
their business. What was made and not taken is in no state, and is simply made again.

Threads are for data that wait for disk or network, and for code that lets go of Python's lock. They only read: batches
are collated in the main thread, where the ring is. Processes are torch's own DataLoader's, which knows how to watch
them, move tensors through shared memory, and bring back errors; it is given whole batches to make, in our order.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.utils.data

from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.worker.datasets.map_reading import MapReader
from penstock.worker.datasets.ordering.course import Plan, Walk

__all__ = ["Ahead", "in_processes", "in_threads"]

AHEAD = 2
"""Batches for each thread or process that are made ahead, as torch's DataLoader does by default."""


class Ahead:
    """A Fetcher (positions.py). `begin` makes an iterator of batches from plans; to drop it is to stop it."""

    def __init__(self, walk: Walk, begin: Callable[[Iterator[Plan]], Iterator[Any]]) -> None:
        self._walk, self._begin = walk, begin
        self._batches: Iterator[Any] | None = None

    def take(self, done: int) -> Any:
        if self._batches is None:
            self._batches = self._begin(self._walk.all_plans(done))
        try:
            return next(self._batches)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._batches = None


def in_threads(plans: Iterator[Plan], reader: MapReader, threads: int) -> Iterator[Any]:
    wanted: SimpleQueue[tuple[Future[list[Any]], Plan] | None] = SimpleQueue()
    ahead: deque[Future[list[Any]]] = deque()
    for _ in range(threads):
        # Not those of a ThreadPoolExecutor: a read that hangs must not hold up who leaves, the process's end included.
        Thread(target=_read, args=(wanted, reader), name="penstock-fetch", daemon=True).start()
    try:
        for plan in plans:
            ahead.append(Future())
            wanted.put((ahead[-1], plan))
            if len(ahead) > AHEAD * threads:
                yield reader.collate(ahead.popleft().result())
        while ahead:
            yield reader.collate(ahead.popleft().result())
    finally:
        for future in ahead:
            future.cancel()
        for _ in range(threads):
            wanted.put(None)


def _read(wanted: SimpleQueue[tuple[Future[list[Any]], Plan] | None], reader: MapReader) -> None:
    while (next_one := wanted.get()) is not None:
        future, plan = next_one
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(reader.samples(plan))
            except BaseException as error:
                future.set_exception(error)
        del next_one, future  # no batch is held while there is none to read


def in_processes(plans: Iterator[Plan], reader: MapReader, processes: int, *, seed: int) -> Iterator[Any]:
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
    while batches is not None:
        try:
            batch = _received(next(batches))
        except StopIteration:
            return
        except Exception as error:
            # Its message has the process's traceback. Our own would hold torch's iterator, and so its processes, for
            # as long as somebody holds the error; collected later, they take five seconds each to end. So would the
            # error behind it, which alone says by what signal a process was killed.
            batches = None
            if error.__cause__ is not None:
                error.add_note(f"a process that reads {reader.name} was lost: {error.__cause__}".rstrip(": "))
            error.__context__ = None
            raise error.with_traceback(None) from None
        yield batch


class _Batches(torch.utils.data.Dataset[Any]):
    """A dataset whose samples are batches, by their plans.

    They are pickled here, and not where torch's queue does it: in a thread of its own, which drops what cannot be sent
    (a function, a tensor with a graph, one that finds no shared memory), and who reads would wait for ever.
    """

    def __init__(self, reader: MapReader) -> None:
        self._reader = reader

    def __getitem__(self, plan: Plan) -> bytes:
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


def _received(batch: bytes) -> Any:
    try:
        return pickle.loads(batch)
    except (OSError, EOFError) as error:  # of asking for the memory that its tensors are in
        raise RuntimeError("a process ended before its batch was taken") from error


def _sendable(error: type[Exception]) -> bool:
    try:
        ForkingPickler.dumps(error)
    except Exception:
        return False
    return True


def _as_it_is(batch: Any) -> Any:
    return batch
