"""Loader of batches from a StreamingDataset, in one order, with a position that can be saved and moved to any
topology."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np

from penstock.data.arguments import byte_count, one_of, sample_count, whole
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.loading.collating import checked_collate
from penstock.data.loading.counting import Counts, LoaderCounts, SampleCounter
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
SHUFFLE_MEMORY = 64 << 20
"""Default number of bytes of decoded row groups that are shuffled with each other: the present ones, the next ones that
are decoded ahead, and those before fit into the default decoded_limit."""
DECODED_AHEAD = 1 << 12
"""Number of samples, without shuffling, whose row groups are decoded ahead."""
DECODED_RUNS = 64
"""Largest number of runs of positions that are looked at to find the row groups to decode ahead."""
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
        shuffle_memory: int | str | None = SHUFFLE_MEMORY,
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
        counts: Counts | None = None,
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
            shuffle_memory: approximate number of bytes, or a text such as "1gb", of the decoded row groups whose
                samples are shuffled with each other, over all partitions together. Only files with several row groups
                (Parquet) use it: the row groups of a block of files are shuffled, and samples only among some
                neighbouring row groups, which must be in memory at the same time (see decoded_limit of
                StreamingDataset). None: all samples of a block are shuffled with each other.
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
            counts: what to count of the samples, by source and key; None: nothing. See `Counts`.
            rank: (this rank, number of data-parallel ranks); the ranks share each global batch. None: the worker's box
                and the number of boxes, or outside a worker RANK and WORLD_SIZE. Ranks that need the same rows, as in
                tensor parallelism, pass the same value.
            collate_fn: function from a list of samples to a batch.

        Raises InvalidArgumentError or DatasetError for invalid arguments.
        """
        partitions, epoch_size = whole("partitions", partitions), sample_count("epoch_size", epoch_size)
        shuffle_block = sample_count("shuffle_block", shuffle_block)
        predownload = sample_count("predownload", predownload)
        shuffle_memory = byte_count("shuffle_memory", shuffle_memory)
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
            files=dataset.files,
            inner=_inner_block(dataset, shuffle_memory, partitions),
        )
        wanted = zip(dataset.stream_names, shares, strict=True)
        own_counts = LoaderCounts(counts, {name: (round(1e6 * share / sum(shares)), 0) for name, share in wanted})
        reader = _reader(
            dataset,
            len(order),
            checked_collate(collate_fn),
            seed,
            reseed,
            own_collate=collate_fn is not collate,
            threads=fetch_threads,
            counter=own_counts.counter,
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
        if shuffle and dataset.has_blocks:
            described["shuffle_memory"] = shuffle_memory or "all"
            _check_memory(dataset, shuffle_block, shuffle_memory)
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
        self._shuffle = shuffle
        inner = _inner_block(dataset, shuffle_memory, partitions)
        self._decoded: Ints = np.zeros(0, np.int64)
        """Row groups that were needed for the batches of the call of `_decode_ahead` before."""
        self._decoded_ahead = partitions * inner if shuffle and inner else DECODED_AHEAD
        self._ahead = predownload or 2 * min(shuffle_block or len(order), len(order))
        self._prefetched_from: tuple[EpochRemainder | None, int] = None, 0
        """Position from which the shards to prefetch were listed last: the epoch's remainder, and the position in
        it."""
        super().__init__(
            dataset.name,
            filed or order,
            described,
            identity=identity,
            batch=batch,
            tail=tail,
            skip=skip,
            keys=keys,
            counts=own_counts,
        )

    def _read_samples(self, plan: BatchPlan) -> list[Any]:
        return self._reader.samples(plan)

    def _make_batch(self, plan: BatchPlan) -> Any:
        return self._reader.batch(plan)

    def _sources_of(self, numbers: Ints) -> Sequence[str] | None:
        return self._reader.sources(numbers)

    def _fetcher(self, own_batches: WorkerBatches) -> Fetcher | None:
        if not self._threads:
            return None
        return ReadAhead(own_batches, partial(in_threads, reader=self._reader, threads=self._threads))

    def _prefetch(self, own_batches: WorkerBatches, plans: list[BatchPlan]) -> None:
        """Prefetch the shards that this process needs for its next samples, then those that the box needs for later
        positions, including those of the next epoch."""
        remainder, position = own_batches.remainder, int(plans[0].positions[0])
        if self.dataset.has_blocks:
            self._decode_ahead(remainder, plans)
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

    def _decode_ahead(self, remainder: EpochRemainder, plans: list[BatchPlan]) -> None:
        """Decode the row groups that the next batches need, then those of the next blocks of row groups."""
        order, begin = self._shards, int(plans[-1].positions[-1]) + 1
        needed = [order.shards_of(np.concatenate([plan.ids for plan in plans]))]
        if begin < len(order) and not (self._filed and self._filed.covers(remainder.epoch)):
            run = max(order.partitions, self._identity.boxes)
            near = remainder.near(
                self._identity.box, begin, min(self._decoded_ahead, len(order) - begin), run=run, runs=DECODED_RUNS
            )
            if self._shuffle:
                needed.append(order.shards(remainder.epoch, near))
            else:
                needed.append(order.shards_of(order.ids(remainder.epoch, near)))
        units = np.concatenate(needed)
        known, first = np.unique(units, return_index=True)
        self.dataset.forget(np.setdiff1d(self._decoded, known, assume_unique=True))
        self._decoded = known
        self.dataset.decode_ahead(units[np.sort(first)])

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
    counter: SampleCounter | None,
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
        counter=counter,
    )


def _inner_block(dataset: StreamingDataset, shuffle_memory: int | None, partitions: int) -> int | None:
    """Return the number of samples of a partition that are shuffled with each other in files with several row groups;
    None: as many as in a block of files. It depends only on the data and on settings that a state holds."""
    if shuffle_memory is None or not dataset.sample_bytes:
        return None
    return max(1, int(shuffle_memory / dataset.sample_bytes) // partitions)


def _check_memory(dataset: StreamingDataset, shuffle_block: int | None, shuffle_memory: int | None) -> None:
    """Warn if the row groups whose samples are shuffled with each other do not fit into the process's memory for
    them. Each would be read and decoded again for almost every sample."""
    block = min(len(dataset), shuffle_block or len(dataset)) * dataset.sample_bytes
    needed = int(min(block, shuffle_memory or block))
    limit = max(MEMORY.limit, dataset.decoded_limit or 0)
    if needed > limit:
        warnings.warn(
            f"{dataset.name}: row groups of {needed} bytes are shuffled with each other, but decoded_limit keeps "
            f"{limit} bytes in memory, so each row group will be decoded many times. Give StreamingDataset a "
            "decoded_limit of twice as much, or the loader a smaller shuffle_memory",
            stacklevel=3,
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
