"""Batches of any map-style dataset in one order, with a position that can be saved and moved to any topology."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch.utils.data

from penstock.data.arguments import whole
from penstock.data.loading.collating import checked_collate
from penstock.data.loading.fetching import ReadAhead, in_processes, in_threads
from penstock.data.loading.map_reading import MapReader
from penstock.data.loading.position_loader import Fetcher, PositionLoader, check_settings
from penstock.data.loading.worker_identity import WorkerIdentity, global_batch
from penstock.data.ordering.epoch_plan import BatchPlan, WorkerBatches
from penstock.data.ordering.partition import Tail
from penstock.data.ordering.unsharded_order import UnshardedOrder
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.proto.state.generators import derive_seed
from penstock.worker.batch.building import collate

__all__ = ["MapLoader"]


class MapLoader(PositionLoader):
    """Batches of a dataset that has `__len__` and `__getitem__`, in an order that does not depend on who makes them.

    Inside an input_fn it makes this worker's share, and follows RestartableDataLoader: it resumes on any number of
    boxes and workers. In a plain torch DataLoader (`DataLoader(loader, batch_size=None, num_workers=4)`) the worker
    processes share the batches, and the order is the same again; `set_epoch` and `state_after` are for that, since the
    counting is done in the copies that the worker processes have. By itself it yields all batches of this rank (RANK
    and WORLD_SIZE, if they are set).

    An epoch is an epoch, or what is left of it behind a loaded state.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        shuffle_block: int | None = None,
        num_samples: int | None = None,
        tail: Tail = "emit",
        skip: Iterable[range] = (),
        fetch_threads: int = 0,
        fetch_processes: int = 0,
        reseed: bool | None = None,
        keys: str | None = None,
        rank: tuple[int, int] | None = None,
        collate_fn: Callable[[list[Any]], Any] = collate,
    ) -> None:
        """
        Args:
            dataset: samples by number. Its length and, where it has one, its `fingerprint` (a text) are part of a
                state. `__getitems__`, which reads many at once, is used where there is one and `reseed` is off.
            batch_size: rows of a box's batch; the global batch grows with the number of boxes.
            global_batch_size: rows of all boxes' batches together; give one of the two. Boxes share them as evenly as
                can be, and no box goes without.
            seed: of the shuffle and of `reseed`; None takes the run's (0 outside a worker).
            shuffle_block: neighbouring samples that are shuffled with each other, for data that are read faster so;
                None shuffles all with all.
            num_samples: samples of an epoch, fewer or more than the dataset has; None: as many. Epochs go on where the
                one before stopped: no sample comes again before all have come.
            tail: of a last batch that is not full: "emit" it, "pad" it with samples of the epoch's beginning, "drop"
                it, or "carry" its samples into the next epoch's first batch. Only "pad" repeats a sample. With "emit"
                a box may get a batch of no rows, where an epoch, or what is left of it, has fewer samples than boxes.
            skip: ranges of sample numbers that are left out, counted over all epochs (epoch * samples of an epoch +
                position). The rest comes in the same order as with them. On a resume more may be left out ahead.
            fetch_threads: threads that read ahead; the dataset must be safe for that.
            fetch_processes: processes that make batches ahead.
            reseed: set the global generators of python, numpy and torch before each sample is read, from seed, epoch
                and position, so that random augmentation depends on nothing else; and for the collate function, by the
                batch's first row. Around a batch they stay as they were. It takes 10 us a sample and 0.25 ms a
                batch (docs/datasets.md).
                None: yes, unless threads share them.
            keys: name of a field that each batch gets, with a restore key for each row: see `restore_sample`. A batch
                that is no dict becomes {"batch": it, keys: ...}.
            rank: (this one, how many) data-parallel ranks share each global batch; None: the worker's box among all
                boxes, or outside of a worker RANK and WORLD_SIZE. Replicas, as with tensor parallelism, give the same.
            collate_fn: list of samples -> batch.

        Raises InvalidArgumentError or DatasetError for settings that cannot be meant.
        """
        shuffle_block, num_samples = whole("shuffle_block", shuffle_block), whole("num_samples", num_samples)
        fetch_threads, fetch_processes = (
            whole("fetch_threads", fetch_threads),
            whole("fetch_processes", fetch_processes),
        )
        seed = whole("seed", seed)
        identity = WorkerIdentity.now(rank)
        batch = global_batch(batch_size, global_batch_size, identity.boxes)
        check_settings(tail, shuffle_block=shuffle_block, num_samples=num_samples)
        _check_fetching(fetch_threads, fetch_processes, reseed)
        seed = identity.seed if seed is None else seed
        name, self._length = type(dataset).__qualname__, _length_of(dataset)
        order = UnshardedOrder(
            self._length, num_samples or self._length, seed=seed, shuffle=shuffle, block=shuffle_block
        )
        fingerprint = getattr(dataset, "fingerprint", None)
        described = {
            "data": fingerprint if isinstance(fingerprint, str) else None,
            "length": self._length,
            "samples": len(order),
            "seed": seed,
            "shuffle_block": (shuffle_block or "all") if shuffle else None,
            "tail": tail,
        }
        self.dataset, self._seed = dataset, seed
        self._threads, self._processes = fetch_threads, fetch_processes
        reseed = not fetch_threads if reseed is None else reseed
        self._reader = MapReader(dataset, name, len(order), checked_collate(collate_fn), seed=seed, reseed=reseed)
        super().__init__(name, order, described, identity=identity, batch=batch, tail=tail, skip=skip, keys=keys)

    def __iter__(self) -> Iterator[Any]:
        """The next epoch, or the rest of the one that a loaded state is in."""
        length = _length_of(self.dataset)
        if length != self._length:
            raise DatasetError(
                f"{self._name}: it had {self._length} samples when the loader was made, and has {length}; the order is "
                "one of a fixed number. Make a new loader"
            )
        return super().__iter__()

    def _read(self, plan: BatchPlan) -> list[Any]:
        return self._reader.samples(plan)

    def _made(self, plan: BatchPlan) -> Any:
        return self._reader.batch(plan)

    def _fetcher(self, batches_of_worker: WorkerBatches) -> Fetcher | None:
        if self._threads:
            return ReadAhead(batches_of_worker, partial(in_threads, reader=self._reader, threads=self._threads))
        if self._processes:
            seed = derive_seed(self._seed, "fetch", self._identity.number, batches_of_worker.remainder.epoch)
            return ReadAhead(
                batches_of_worker, partial(in_processes, reader=self._reader, processes=self._processes, seed=seed)
            )
        return None


def _check_fetching(threads: int, processes: int, reseed: bool | None) -> None:
    for name, value in (("fetch_threads", threads), ("fetch_processes", processes)):
        if value < 0:
            raise InvalidArgumentError(f"{name}={value}: it must be at least 0")
    if threads and processes:
        raise InvalidArgumentError(
            f"fetch_threads={threads} and fetch_processes={processes}: give one of the two, or none"
        )
    if threads and reseed:
        raise InvalidArgumentError(
            f"reseed=True with fetch_threads={threads}: threads share the process's generators, so that none can be "
            "set for a sample; use fetch_processes, or a generator of the dataset's own"
        )


def _length_of(dataset: Any) -> int:
    """Raises InvalidArgumentError for what is no map-style dataset, DatasetError for an empty one."""
    name = type(dataset).__qualname__
    if not hasattr(type(dataset), "__getitem__") or isinstance(dataset, torch.utils.data.IterableDataset):
        raise InvalidArgumentError(f"dataset is a {name}, which has no samples by number (__getitem__)")
    try:
        length = len(dataset)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise InvalidArgumentError(f"dataset is a {name}, which does not say its length: {error}") from error
    if length == 0:
        raise DatasetError(f"{name}: it has no sample")
    return length
