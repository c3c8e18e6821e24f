"""Loader of batches from a StreamingDataset, in one order, with a position that can be saved and moved to any
topology."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_args

import numpy as np

from penstock.data.arguments import one_of, sample_count, whole
from penstock.data.loading.collating import checked_collate
from penstock.data.loading.fetching import ReadAhead, check_threads, in_threads
from penstock.data.loading.map_reading import MapReader
from penstock.data.loading.position_loader import Fetcher, PositionLoader, check_settings
from penstock.data.loading.worker_identity import WorkerIdentity, global_batch
from penstock.data.ordering.epoch_plan import BatchPlan, EpochRemainder, WorkerBatches
from penstock.data.ordering.order_file import FiledOrder, OrderFile
from penstock.data.ordering.order_states import ORDER_FILE
from penstock.data.ordering.partition import Tail
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.sharded_order import Interleave, ShardedOrder
from penstock.data.ordering.skips import ranges_of
from penstock.data.streaming_dataset import StreamingDataset
from penstock.proto.errors import InvalidArgumentError
from penstock.worker.batch.building import collate

__all__ = ["StreamingLoader"]

BLOCK = 1 << 18
"""Default number of samples that are shuffled with each other."""
EXAMINED_POSITIONS = 1 << 14
"""Largest number of upcoming positions that are looked at to find the shards to prefetch."""


class StreamingLoader(PositionLoader):
    """Loader of batches from a StreamingDataset, in an order that does not depend on boxes and workers.

    Example::

        def input_fn():
            return StreamingLoader(StreamingDataset("s3://bucket/train"), batch_size=32, shuffle=True)

    Inside an input_fn it makes this worker's share of the batches, and implements RestartableDataLoader: its state can
    be resumed on any number of boxes and workers. In a plain torch DataLoader (`DataLoader(loader, batch_size=None,
    num_workers=4)`) the worker processes share the batches, and the order is the same; use `set_epoch` and
    `state_after` there, because the worker processes count batches in their own copies of the loader. Anywhere else it
    yields all batches of this rank (RANK and WORLD_SIZE, if they are set).

    One iteration is one epoch, or the rest of it after a loaded state.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        shuffle_block: int | str | None = BLOCK,
        partitions: int = 1,
        interleave: Interleave = "shards",
        epoch_size: int | str | None = None,
        tail: Tail = "emit",
        skip: Iterable[range] = (),
        order_file: str | os.PathLike[str] | None = None,
        predownload: int | str | None = None,
        fetch_threads: int = 0,
        reseed: bool | None = None,
        keys: str | None = None,
        rank: tuple[int, int] | None = None,
        collate_fn: Callable[[list[Any]], Any] = collate,
    ) -> None:
        """
        Args:
            batch_size: rows of a box's batch; the global batch grows with the number of boxes.
            global_batch_size: rows of all boxes' batches together; give one of the two. Boxes share the rows as evenly
                as possible, and each gets at least one.
            seed: seed of the shuffle and of `reseed`; None: the run's seed (0 outside a worker).
            shuffle_block: approximate number of samples that are shuffled with each other. A block consists of whole
                shards whose sizes add up to about this number, and all shards of a block are needed at the same time.
                None: all samples are shuffled with each other.
            partitions: number of parts that the data are divided into. Rows are drawn from the parts in turn. If the
                number of boxes divides this number, each box reads only the shards of its own parts; so give the
                largest number of boxes that you will use.
            interleave: how streams are mixed. "shards": the shards of all streams are shuffled together. "samples":
                every prefix of the order has each stream's share of samples. "batches": each global batch comes from
                one stream.
            epoch_size: number of samples in an epoch, or a text such as "100k"; each stream gets its proportion of
                them. None: as many samples as the streams have.
            tail: treatment of an incomplete last batch: "emit" it, "pad" it with samples of the epoch's beginning,
                "drop" it, or "carry" its samples into the next epoch's first batch. Only "pad" repeats a sample. With
                "emit" a box may get a batch of no rows, if the rest of an epoch has fewer samples than boxes.
            skip: ranges of sample numbers to leave out, counted over all epochs (epoch * samples of an epoch +
                position). The other samples come in the same order as without `skip`. A resumed run may add ranges
                after its position.
            order_file: file that `penstock import-state` wrote: the order of one epoch, which another library began. It
                must be at this path on each worker. All other epochs have the loader's own order; once a state lies
                in a later epoch, the file may be left out.
            predownload: number of upcoming samples whose shards are fetched ahead of need; None: as many as in two
                shuffle blocks.
            fetch_threads: threads that read and decode samples ahead; 0: samples are read when they are needed. Threads
                help where decoding releases the GIL (JPEG files with `images="array"`). A `__getitem__` of your own
                must be thread-safe, and `reseed` does not cover it.
            reseed: seed the global generators of python, numpy and torch from seed, epoch and position before each
                sample is read, so that random augmentation depends on nothing else. They are also seeded before the
                collate function is called, from the position of the batch's first row. After a batch they get back the
                state that they had before. None: seed them only for user code: for samples if the dataset's class
                overrides `__getitem__`, for batches if `collate_fn` is given. No other code draws random numbers.
            keys: name of a field that each batch gets, with a restore key for each row: see `restore_sample`. A batch
                that is not a dict becomes {"batch": it, keys: ...}.
            rank: (this rank, number of data-parallel ranks); the ranks share each global batch. None: the worker's box
                and the number of boxes, or outside a worker RANK and WORLD_SIZE. Ranks that need the same rows, as in
                tensor parallelism, pass the same value.
            collate_fn: function from a list of samples to a batch.

        Raises InvalidArgumentError or DatasetError for invalid arguments.
        """
        partitions, epoch_size = whole("partitions", partitions), sample_count("epoch_size", epoch_size)
        shuffle_block = sample_count("shuffle_block", shuffle_block)
        predownload = sample_count("predownload", predownload)
        seed, skip, fetch_threads = whole("seed", seed), list(skip), whole("fetch_threads", fetch_threads)
        check_threads(fetch_threads, reseed)
        if not isinstance(dataset, StreamingDataset):
            raise InvalidArgumentError(
                f"dataset must be a StreamingDataset, made of a folder or URL, got {type(dataset).__qualname__}. For "
                "other datasets of samples by number use MapLoader"
            )
        identity = WorkerIdentity.now(rank)
        batch = global_batch(batch_size, global_batch_size, identity.boxes)
        check_settings(
            tail, partitions=partitions, shuffle_block=shuffle_block, epoch_size=epoch_size, predownload=predownload
        )
        one_of("interleave", interleave, get_args(Interleave))
        seed = identity.seed if seed is None else seed
        shares = dataset.shares(epoch_size)
        if interleave == "batches":
            _check_batches(batch, partitions, tail, sum(shares), skip)
        order = ShardedOrder(
            dataset.sizes,
            shares,
            seed=seed,
            shuffle=shuffle,
            block=shuffle_block,
            partitions=partitions,
            interleave=interleave,
            batch=batch,
        )
        reader = _reader(
            dataset,
            len(order),
            checked_collate(collate_fn),
            seed,
            reseed,
            own_collate=collate_fn is not collate,
            threads=fetch_threads,
        )
        mixed = len(shares) > 1
        described: dict[str, Any] = {
            "data": dataset.fingerprint,
            "samples": shares,
            "seed": seed if shuffle or reader.reseeds else None,
            "shuffle_block": (shuffle_block or "all") if shuffle else None,
            "partitions": partitions,
            "interleave": interleave if mixed else None,
            "batch": batch if mixed and interleave == "batches" else None,
            "tail": tail,
        }
        filed = None
        if order_file is not None:
            if interleave == "batches" and mixed:
                raise InvalidArgumentError(
                    "interleave='batches' excludes order_file, whose order mixes the streams within a batch: use "
                    "another interleave"
                )
            file = OrderFile.read(order_file)
            filed = FiledOrder(order, file, dataset.name, int(order.starts[-1]))
            described[ORDER_FILE] = file.described
        self.dataset, self._shards, self._filed, self._reader = dataset, order, filed, reader
        self._threads = fetch_threads
        self._ahead = predownload or 2 * min(shuffle_block or len(order), len(order))
        self._prefetched_from: tuple[EpochRemainder | None, int] = None, 0
        """Position from which the shards to prefetch were listed last: the epoch's remainder, and the position in
        it."""
        super().__init__(
            dataset.name, filed or order, described, identity=identity, batch=batch, tail=tail, skip=skip, keys=keys
        )

    def _read_samples(self, plan: BatchPlan) -> list[Any]:
        return self._reader.samples(plan)

    def _make_batch(self, plan: BatchPlan) -> Any:
        return self._reader.batch(plan)

    def _fetcher(self, own_batches: WorkerBatches) -> Fetcher | None:
        if not self._threads:
            return None
        return ReadAhead(own_batches, partial(in_threads, reader=self._reader, threads=self._threads))

    def _prefetch(self, own_batches: WorkerBatches, plans: list[BatchPlan]) -> None:
        """Prefetch the shards that this process needs for its next samples, then those that the box needs for later
        positions, including those of the next epoch."""
        remainder, position = own_batches.remainder, int(plans[0].positions[0])
        remainder_before, at = self._prefetched_from
        if remainder_before is remainder and position - at < self._ahead // 4:
            return
        self._prefetched_from = remainder, position
        order, ahead, length = self._shards, self._ahead, len(self._shards)
        needed = [order.shards_of(np.concatenate([plan.ids for plan in plans]))]
        needed.append(self._needed(remainder.epoch, self._near(remainder, position, ahead)))
        if position + ahead > length:
            epoch, start = remainder.following()
            following = self._epochs.remainder(epoch, start, self._batch, remainder.boxes)
            needed.append(self._needed(epoch, self._near(following, 0, position + ahead - length)))
        shards = np.concatenate(needed)
        _, first = np.unique(shards, return_index=True)
        self.dataset.fetch_ahead(shards[np.sort(first)])

    def _needed(self, epoch: int, positions: Ints) -> Ints:
        """Return the numbers of the shards that these positions need."""
        if self._filed is None or not self._filed.covers(epoch):
            return self._shards.shards(epoch, positions)
        return self._shards.shards_of(self._filed.ids(epoch, positions))

    def _near(self, remainder: EpochRemainder, position: int, count: int) -> Ints:
        """Return this box's positions among the next `count`, from `position` on. If there are too many to look at,
        return only some evenly spread runs of them; each run touches all partitions."""
        run = max(self._shards.partitions, self._identity.boxes)
        return remainder.near(self._identity.box, position, count, run=run, runs=max(1, EXAMINED_POSITIONS // run))


def _reader(
    dataset: StreamingDataset,
    length: int,
    collate_fn: Callable[[list[Any]], Any],
    seed: int,
    reseed: bool | None,
    *,
    own_collate: bool,
    threads: int,
) -> MapReader:
    """Return a reader of the dataset's samples, for epochs of `length` samples. Random generators are seeded only for
    user code, because no other code draws random numbers."""
    return MapReader(
        dataset,
        type(dataset).__qualname__,
        length,
        collate_fn,
        seed=seed,
        reseed=dataset.is_overridden and not threads if reseed is None else reseed,
        reseed_collate=own_collate if reseed is None else reseed,
        many=dataset.get_many,
    )


def _check_batches(batch: int, partitions: int, tail: Tail, length: int, skip: list[range]) -> None:
    """Raise InvalidArgumentError if some global batch would have samples of several streams with
    interleave="batches"."""
    if batch % partitions:
        raise InvalidArgumentError(
            f"with interleave='batches' the global batch must be a multiple of partitions={partitions} rows, got "
            f"{batch}"
        )
    if tail == "carry":
        raise InvalidArgumentError(
            "interleave='batches' excludes tail='carry', which shifts all batches by the samples left over, so that "
            "each would mix two streams: use another tail"
        )
    for number in (number for piece in ranges_of(skip) for number in piece):
        if number % length % batch:
            raise InvalidArgumentError(
                f"with interleave='batches' skip must begin and end at whole batches of {batch} samples, counted from "
                f"the beginning of each epoch of {length} samples, got sample {number}"
            )
