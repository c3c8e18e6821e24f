"""Loader of batches from any map-style dataset, in one order, with a position that can be saved and moved to any
topology."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch.utils.data

from penstock.data.arguments import whole
from penstock.data.loading.collating import checked_collate
from penstock.data.loading.counting import Counts, LoaderCounts
from penstock.data.loading.fetching import ReadAhead, check_threads, in_processes, in_threads
from penstock.data.loading.map_reading import MapReader
from penstock.data.loading.position_loader import Fetcher, PositionLoader, balanced_order, check_settings
from penstock.data.loading.worker_identity import WorkerIdentity, global_batch
from penstock.data.ordering.balancing.balanced_order import Balance
from penstock.data.ordering.epoch_plan import BatchPlan, SampleOrder, WorkerBatches
from penstock.data.ordering.order_file import FiledOrder, OrderFile
from penstock.data.ordering.order_states import ORDER_FILE
from penstock.data.ordering.partition import Tail
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.unsharded_order import UnshardedOrder
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.proto.state.generators import derive_seed
from penstock.worker.batch.building import collate

__all__ = ["MapLoader"]


class MapLoader(PositionLoader):
    """Loader of batches from a map-style dataset (`__len__`, `__getitem__`), in an order that does not depend on boxes
    and workers.

    Example::

        def input_fn():
            return MapLoader(dataset, batch_size=32, shuffle=True)

    Inside an input_fn it makes this worker's share of the batches, and implements RestartableDataLoader: its state can
    be resumed on any number of boxes and workers. In a plain torch DataLoader (`DataLoader(loader, batch_size=None,
    num_workers=4)`) the worker processes share the batches, and the order is the same; use `set_epoch` and
    `state_after` there, because the worker processes count batches in their own copies of the loader. Anywhere else it
    yields all batches of this rank (RANK and WORLD_SIZE, if they are set).

    One iteration is one epoch, or the rest of it after a loaded state.
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
        order_file: str | os.PathLike[str] | None = None,
        fetch_threads: int = 0,
        fetch_processes: int = 0,
        reseed: bool | None = None,
        keys: str | None = None,
        counts: Counts | None = None,
        rank: tuple[int, int] | None = None,
        balance: Balance | None = None,
        collate_fn: Callable[[list[Any]], Any] = collate,
    ) -> None:
        """
        Args:
            dataset: map-style dataset. Its length, and its attribute `fingerprint` (a text) if it has one, are part of
                a state. Its method `__getitems__`, if it has one, reads many samples at once; it is not used with
                `reseed`.
            batch_size: rows of a box's batch; the global batch grows with the number of boxes.
            global_batch_size: rows of all boxes' batches together; give one of the two. Boxes share the rows as evenly
                as possible, and each gets at least one.
            seed: seed of the shuffle and of `reseed`; None: the run's seed (0 outside a worker).
            shuffle_block: number of neighbouring samples that are shuffled with each other, for data where neighbours
                are faster to read; None: all samples are shuffled with each other.
            num_samples: number of samples in an epoch; None: as many as the dataset has. With another number, an epoch
                continues where the one before stopped: no sample repeats before all have come.
            tail: treatment of an incomplete last batch: "emit" it, "pad" it with samples of the epoch's beginning,
                "drop" it, or "carry" its samples into the next epoch's first batch. Only "pad" repeats a sample. With
                "emit" a box may get a batch of no rows, if the rest of an epoch has fewer samples than boxes.
            skip: ranges of sample numbers to leave out, counted over all epochs (epoch * samples of an epoch +
                position). The other samples come in the same order as without `skip`. A resumed run may add ranges
                after its position.
            order_file: file that `penstock import-state` wrote: the order of one epoch, which another library began. It
                must be at this path on each worker. All other epochs have the loader's own order; once a state lies
                in a later epoch, the file may be left out.
            fetch_threads: threads that read ahead; the dataset must be thread-safe.
            fetch_processes: processes that make batches ahead.
            reseed: seed the global generators of python, numpy and torch from seed, epoch and position before each
                sample is read, so that random augmentation depends on nothing else. They are also seeded before the
                collate function is called, from the position of the batch's first row. After a batch they get back the
                state that they had before. Takes 10 us a sample and 0.25 ms a batch (docs/datasets.md).
                None: True, unless `fetch_threads` are used, which would share the generators.
            keys: name of a field that each batch gets, with a restore key for each row: see `restore_sample`. A batch
                that is not a dict becomes {"batch": it, keys: ...}.
            counts: what to count of the samples, by source and key; None: nothing. See `Counts`.
            rank: (this rank, number of data-parallel ranks); the ranks share each global batch. None: the worker's box
                and the number of boxes, or outside a worker RANK and WORLD_SIZE. Ranks that need the same rows, as in
                tensor parallelism, pass the same value.
            balance: deal the rows of a step to the boxes by cost, see Balance: the rows of some steps, if it says so. A
                step's rows are then the same on any number of boxes. Balance over several steps needs the same global
                batch when it is resumed, so give `global_batch_size`.
            collate_fn: function from a list of samples to a batch.

        Raises InvalidArgumentError or DatasetError for invalid arguments.
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
        order: SampleOrder = UnshardedOrder(
            self._length, num_samples or self._length, seed=seed, shuffle=shuffle, block=shuffle_block
        )
        fingerprint = getattr(dataset, "fingerprint", None)
        described: dict[str, Any] = {
            "data": fingerprint if isinstance(fingerprint, str) else None,
            "length": self._length,
            "samples": len(order),
            "seed": seed,
            "shuffle_block": (shuffle_block or "all") if shuffle else None,
            "tail": tail,
        }
        if order_file is not None:
            file = OrderFile.read(order_file)
            order, described[ORDER_FILE] = FiledOrder(order, file, name, self._length), file.described
        balanced = balanced_order(balance, order, dataset, self._length, batch, described)
        self.dataset, self._seed = dataset, seed
        self._threads, self._processes = fetch_threads, fetch_processes
        reseed = not fetch_threads if reseed is None else reseed
        own_counts = LoaderCounts(counts)
        self._reader = MapReader(
            dataset,
            name,
            len(order),
            checked_collate(collate_fn),
            seed=seed,
            reseed=reseed,
            counter=own_counts.counter,
        )
        super().__init__(
            name,
            balanced.order if balanced else order,
            described,
            identity=identity,
            batch=batch,
            tail=tail,
            skip=skip,
            keys=keys,
            balance=balanced,
            counts=own_counts,
        )

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, or over the rest of the epoch in which a loaded state lies."""
        length = _length_of(self.dataset)
        if length != self._length:
            raise DatasetError(
                f"{self._name}: it had {self._length} samples when the loader was made, and has {length} now; the "
                "order needs a fixed number. Make a new loader"
            )
        return super().__iter__()

    def _read_samples(self, plan: BatchPlan) -> list[Any]:
        return self._reader.samples(plan)

    def _make_batch(self, plan: BatchPlan) -> Any:
        return self._reader.batch(plan)

    def _sources_of(self, numbers: Ints) -> Sequence[str] | None:
        return self._reader.sources(numbers)

    def _fetcher(self, own_batches: WorkerBatches) -> Fetcher | None:
        if self._threads:
            return ReadAhead(own_batches, partial(in_threads, reader=self._reader, threads=self._threads))
        if self._processes:
            seed = derive_seed(self._seed, "fetch", self._identity.number, own_batches.remainder.epoch)
            return ReadAhead(
                own_batches, partial(in_processes, reader=self._reader, processes=self._processes, seed=seed)
            )
        return None


def _check_fetching(threads: int, processes: int, reseed: bool | None) -> None:
    check_threads(threads, reseed)
    if processes < 0:
        raise InvalidArgumentError(f"fetch_processes must be at least 0, got {processes}")
    if threads and processes:
        raise InvalidArgumentError(
            f"fetch_threads={threads} and fetch_processes={processes} exclude each other: give at most one of them"
        )


def _length_of(dataset: Any) -> int:
    """Return the dataset's length. Raises InvalidArgumentError unless it is map-style, DatasetError if it is empty."""
    name = type(dataset).__qualname__
    if not hasattr(type(dataset), "__getitem__") or isinstance(dataset, torch.utils.data.IterableDataset):
        raise InvalidArgumentError(f"dataset must have samples by number (__getitem__), got {name}")
    try:
        length = len(dataset)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise InvalidArgumentError(f"dataset must have a length, got {name}: {error}") from error
    if length == 0:
        raise DatasetError(f"{name}: the dataset has no samples")
    return length
