"""Loader of batches from a StreamingDataset."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from penstock.data.arguments import byte_count, one_of, sample_count, seconds_count, whole
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.indexes.order_layout import OrderLayout, joined_files, mean_sample_bytes
from penstock.data.loading.counting import Counts, LoaderCounts
from penstock.data.loading.fetching import PREFETCHED_BATCHES, check_threads
from penstock.data.loading.map_reading import MapReader
from penstock.data.loading.position_loader import PositionLoader, check_settings
from penstock.data.loading.upcoming_shards import ReadingRate, UpcomingShards
from penstock.data.loading.worker_identity import WorkerIdentity, global_batch
from penstock.data.ordering.balance import Balance
from penstock.data.ordering.epoch_plan import BatchPlan, EpochRemainder, WorkerBatches
from penstock.data.ordering.order_states import (
    VERSIONS,
    OrderProgress,
    epoch_to_begin,
    progress_of,
    state_of,
)
from penstock.data.ordering.partition import Tail
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.sharded_order import Interleave, ShardedOrder
from penstock.data.ordering.skips import ranges_of
from penstock.data.streaming_dataset import StreamingDataset
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.state.counts import COUNTS, cut_name
from penstock.runtime.moved_names import says_where
from penstock.worker.batch.building import collate

BLOCK = 1 << 18
"""Default of shuffle_block, in samples."""
SHUFFLE_MEMORY = 64 << 20
"""Default of shuffle_memory, in bytes: three sets of row groups (previous, present, next) fit into decoded_limit's 256
MiB."""
DECODED_AHEAD = 1 << 12
"""Upcoming samples whose row groups are decoded ahead, without shuffle or shuffle_memory."""
DECODED_RUNS = 64
"""Limit on the ranges of upcoming positions examined for row groups to decode."""
PREFETCH_S = 60.0
"""Default of prefetch_seconds: longer than the usual pauses of a remote storage."""
FIRST_BATCHES = 2
"""Batches whose shards are fetched while the rate is unknown, without threads."""
EXAMINED_POSITIONS = 1 << 14
"""Limit on the positions examined for shards to prefetch."""
EXAMINED_OF_UNIT = 64
"""Limit for each shard or row group: in a small dataset more finds no others, but takes half of the time of shuffled
reading."""


@says_where
class StreamingLoader(PositionLoader):
    """Loader of batches from a StreamingDataset, in an order that does not depend on boxes and workers. One iteration
    is one epoch, or the rest of it after a loaded state.

    Example::

        def input_fn():
            return StreamingLoader(StreamingDataset("s3://bucket/train"), batch_size=32, shuffle=True)

    It works inside and outside of an input_fn as a MapLoader does.
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
        predownload: int | str | None = None,
        prefetch_seconds: float | None = None,
        fetch_threads: int = 0,
        reseed: bool | None = None,
        keys: str | None = None,
        counts: Counts | None = None,
        rank: tuple[int, int] | None = None,
        balance: Balance | None = None,
        collate_fn: Callable[[list[Any]], Any] = collate,
    ) -> None:
        """
        Args:
            batch_size, global_batch_size, seed, tail, skip, keys, counts, rank, balance: as in MapLoader. With
                `partitions` and balance, a box reads other parts' shards too; balance excludes interleave="batches".
            shuffle_block: approximate number of samples shuffled with each other: whole shards, all needed at the same
                time. None: all samples.
            shuffle_memory: approximate size of the decoded row groups (Parquet) whose samples are shuffled with each
                other, for all partitions together, in bytes, or a text such as "1gb": they must be in memory as a whole
                (decoded_limit of StreamingDataset). None: all of a block.
            partitions: parts of the data, from which rows are taken round robin. If it is a multiple of the number of
                boxes, each box reads only its own parts' shards; so give the largest number of boxes that you will use.
            interleave: way to mix streams. "shards": all streams' shards are shuffled together. "samples": every prefix
                of the order has each stream's share. "batches": each global batch comes from one stream.
            epoch_size: samples in an epoch, or a text such as "100k", divided among streams in proportion to their
                sizes or settings. None: all.
            predownload: largest number of upcoming samples whose shards are downloaded ahead; None: two shuffle blocks.
            prefetch_seconds: seconds of reading, at the measured rate, for which shards are downloaded ahead; before a
                rate is known, those of two batches, more with `fetch_threads`. None: 60, or no limit if predownload is
                given; inf: no limit. `predownload` limits it further, and `cache_limit` of StreamingDataset the bytes.
            fetch_threads: threads that read and decode samples ahead; 0: none. They help where decoding releases the
                GIL for long: clips, large JPEG files with `images="array"`. A `__getitem__` of your own subclass must
                be thread-safe, and generators are not seeded for it.
            reseed: as in MapLoader, but for the global generators alone. None: seed only for user code, as no other
                draws: samples if the dataset's class overrides `__getitem__` or its `clips` may draw, batches if
                `collate_fn` is given.
            collate_fn: function from a list of samples to a batch.
        """
        self._settings = {
            name: value for name, value in locals().items() if name not in ("self", "dataset", "__class__")
        }
        partitions, epoch_size = whole("partitions", partitions), sample_count("epoch_size", epoch_size)
        shuffle_block = sample_count("shuffle_block", shuffle_block)
        predownload = sample_count("predownload", predownload)
        prefetch_s = seconds_count("prefetch_seconds", PREFETCH_S if prefetch_seconds is None else prefetch_seconds)
        shuffle_memory = byte_count("shuffle_memory", shuffle_memory)
        seed, skip, fetch_threads = whole("seed", seed), list(skip), whole("fetch_threads", fetch_threads)
        self._settings["skip"] = skip
        check_threads(fetch_threads, reseed)
        if not isinstance(dataset, StreamingDataset):
            raise InvalidArgumentError(
                f"dataset must be a StreamingDataset, got {type(dataset).__qualname__}. Use MapLoader for others"
            )
        if fetch_threads and reseed is None and dataset.clips_draw:
            raise InvalidArgumentError(
                f"fetch_threads must be 0 with random clips, got {fetch_threads}. Use more workers or reseed=False"
            )
        # `_follow` makes the loader again, perhaps where the identity of the worker is no longer known.
        identity = getattr(self, "_identity", None) or WorkerIdentity.now(rank)
        batch = global_batch(batch_size, global_batch_size, identity.boxes)
        check_settings(
            tail, partitions=partitions, shuffle_block=shuffle_block, epoch_size=epoch_size, predownload=predownload
        )
        one_of("interleave", interleave, get_args(Interleave))
        seed = identity.seed if seed is None else seed
        shares, layouts = dataset.shares(epoch_size), dataset.layouts
        inner = _inner_block(layouts, shuffle_memory, partitions)
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
            files=joined_files(layouts),
            inner=inner,
        )
        wanted = zip(dataset.stream_names, shares, strict=True)
        millionths = {cut_name(name): (round(1e6 * share / sum(shares)), 0) for name, share in wanted}
        own_counts = LoaderCounts(counts, millionths, skips=dataset.skip_failures > 0)
        reader = MapReader(
            dataset,
            type(dataset).__qualname__,
            len(order),
            collate_fn,
            seed=seed,
            reseed=reseed,
            threads=fetch_threads,
            counter=own_counts.counter,
            own_samples=dataset.is_overridden or dataset.clips_draw,
            many=dataset.get_many,
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
        if any(version is not None for version in dataset.versions):
            described[VERSIONS] = dataset.versions
        if shuffle and any(layout.blocks for layout in layouts):
            described["shuffle_memory"] = shuffle_memory or "all"
        if shuffle and dataset.has_blocks:
            _check_memory(dataset, shuffle_block, shuffle_memory)
        if balance is not None and interleave == "batches" and mixed:
            raise InvalidArgumentError(
                "balance must be None with interleave='batches', because it moves rows to other streams' batches"
            )
        self.dataset, self._shards, self._shuffle = dataset, order, shuffle
        self._decoded: Ints = np.zeros(0, np.int64)
        self._decoded_ahead = partitions * inner if shuffle and inner else DECODED_AHEAD
        self._ahead = predownload or 2 * min(shuffle_block or len(order), len(order))
        self._seconds = math.inf if predownload and prefetch_seconds is None else prefetch_s
        self._first_batches = FIRST_BATCHES + PREFETCHED_BATCHES * fetch_threads
        self._examined = min(EXAMINED_POSITIONS, EXAMINED_OF_UNIT * sum(map(len, dataset.sizes)))
        self._turns = 1
        """Processes that share the box's batches in turn."""
        self._rate = ReadingRate()
        self._upcoming: UpcomingShards | None = None
        self._listed_for: EpochRemainder | None = None
        super().__init__(
            dataset.name,
            order,
            described,
            reader,
            identity=identity,
            batch=batch,
            tail=tail,
            skip=skip,
            keys=keys,
            balance=balance,
            counts=own_counts,
            samples=int(order.starts[-1]),
            threads=fetch_threads,
        )

    # ---- versions of the data

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Go to the position of a state, see Loader. If the data have versions, switch to the state's, unless `version`
        was given; with version="newest" only for a state within an epoch."""
        super().load_state_dict(self._follow(state_dict, moves=True), strict)

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True) -> dict[str, Any]:
        """Return this worker's part of an aggregated state. The version is switched as by `load_state_dict`."""
        return super().deaggregate_state_dict(self._follow(aggregated, moves=True), strict)

    def aggregate_state_dict(self, worker_states: list[Any]) -> dict[str, Any]:
        """Merge the states of all workers into one. If the data have versions, switch to that of the states first."""
        for state in worker_states[:1]:
            self._follow(state, moves=False)
        return super().aggregate_state_dict(worker_states)

    def _follow(self, state: Any, *, moves: bool) -> Any:
        """Switch to the version of a state, and return the state. `moves`: with version="newest" keep that for a state
        between epochs, and return one at the next epoch's beginning in it. If another version was opened by number,
        nothing is switched, and loading refuses the state."""
        own = self.dataset.versions
        order = state.get("order") if isinstance(state, Mapping) else None
        if not isinstance(order, Mapping) or not order or all(version is None for version in own):
            return state
        # The data got versions after the state was saved; the data of the state became version 1.
        saved = order.get(VERSIONS, [None if version is None else 1 for version in own])
        if not isinstance(saved, list) or len(saved) != len(own) or saved == own:
            return state
        if VERSIONS not in order:
            state = {**state, "order": {**order, VERSIONS: saved}}
        asked = self.dataset.asked_versions
        if moves and "newest" in asked:
            epoch = epoch_to_begin(state, self._epochs.tail)
            if epoch is not None and not self._epochs.skip:
                return self._begun(state, epoch)
        if any(isinstance(version, int) and version != old for version, old in zip(asked, saved, strict=True)):
            return state  # the state of another order is then refused
        StreamingLoader.__init__(self, self.dataset.at_versions(saved), **self._settings)
        return state

    def _begun(self, state: Mapping[str, Any], epoch: int) -> dict[str, Any]:
        """Return a state at the beginning of `epoch` here, for one at the end of the epoch before in another order."""
        topology = progress_of(state).topology
        begun = state_of(OrderProgress(epoch, 0, 0, topology), self._described)
        return {**begun, **{name: state[name] for name in ("workers", "others", COUNTS) if name in state}}

    def _prefetch(self, own_batches: WorkerBatches, plans: list[BatchPlan]) -> None:
        """Decode the next batches' row groups in the background, and list shards to download."""
        remainder, position = own_batches.remainder, int(plans[0].positions[0])
        self._turns = own_batches.turn.of
        if self.dataset.has_blocks:
            self._decode_ahead(remainder, plans)
        if self._upcoming is None or self._listed_for is not remainder or self._upcoming.is_old(position):
            self._upcoming, self._listed_for = self._list(remainder, plans), remainder
            self.dataset.keep_open(self._upcoming.shards)

    def _approach(self, plan: BatchPlan) -> None:
        """Download in the background this batch's shards, and those needed within `prefetch_seconds` or
        `predownload`."""
        assert self._upcoming is not None
        before = plan.epoch * len(self._order)
        position, last = int(plan.positions[0]), int(plan.positions[-1])
        rate, ahead = self._rate.passed(before + position), self._ahead
        if self._seconds < math.inf:
            seen = self._first_batches * (last + 1 - position) * self._turns
            ahead = min(ahead, max(seen, int((rate or 0.0) * self._seconds)))
        window = self._upcoming.window(position, last, ahead)
        if window is not None:
            # The shards of this batch may be in the list of an earlier batch, which another worker has made.
            own = np.unique(self.dataset.units_of(plan.ids))
            ahead_of_need = self._upcoming.shards[window.begin : window.end]
            self.dataset.fetch_ahead(np.concatenate([own, ahead_of_need]))

    def _list(self, remainder: EpochRemainder, plans: list[BatchPlan]) -> UpcomingShards:
        """Return the units (`StreamingDataset.units_of`) to download next: of this process's batches, then its box's
        positions, into the next epoch."""
        position, ahead, length = int(plans[0].positions[0]), self._ahead, len(self._shards)
        shards = [self.dataset.units_of(np.concatenate([plan.ids for plan in plans]))]
        needed_at = [np.concatenate([plan.positions for plan in plans])]
        self._add_needs(shards, needed_at, remainder.epoch, self._near(remainder, position, ahead), 0)
        if position + ahead > length:
            epoch, start = remainder.following()
            following = self._epochs.remainder(epoch, start, self._batch, remainder.boxes)
            self._add_needs(shards, needed_at, epoch, self._near(following, 0, position + ahead - length), length)
        return UpcomingShards(np.concatenate(shards), np.concatenate(needed_at), position, ahead)

    def _add_needs(self, shards: list[Ints], needed_at: list[Ints], epoch: int, positions: Ints, shift: int) -> None:
        """Append the units that positions need, and where (plus `shift`). If only some were examined, other units of
        their blocks count as needed after a quarter of them."""
        if not len(positions):
            return
        shards.append(self.dataset.units_of(self._shards.ids(epoch, positions)))
        needed_at.append(positions + shift)
        first, span = int(positions[0]), int(positions[-1]) + 1 - int(positions[0])
        boxes = self._identity.boxes if self._box is not None else 1
        # Add the shards of the positions between those that were examined.
        if self._shuffle and len(positions) * boxes < span:
            others = self.dataset.read_units(self._shards.shards(epoch, positions))
            shards.append(others)
            needed_at.append(np.full(len(others), first + span // 4 + shift))

    def _decode_ahead(self, remainder: EpochRemainder, plans: list[BatchPlan]) -> None:
        """Decode in the background the row groups of the next batches, then of the positions after them."""
        order, begin = self._shards, int(plans[-1].positions[-1]) + 1
        needed = [order.shards_of(np.concatenate([plan.ids for plan in plans]))]
        if begin < len(order):
            run = max(order.partitions, self._identity.boxes)
            near = remainder.near(
                self._box, begin, min(self._decoded_ahead, len(order) - begin), run=run, runs=DECODED_RUNS
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

    @property
    def _box(self) -> int | None:
        """None if costs decide which box gets a row."""
        return self._identity.box if self._balance is None or not self._balance.assigns else None

    def _near(self, remainder: EpochRemainder, position: int, count: int) -> Ints:
        """Return the box's next `count` positions; of many only some ranges at equal distances, each with all
        partitions."""
        run = max(self._shards.partitions, self._identity.boxes)
        return remainder.near(self._box, position, count, run=run, runs=max(1, self._examined // run))


def _inner_block(layouts: Sequence[OrderLayout], shuffle_memory: int | None, partitions: int) -> int | None:
    """Return the samples of a partition that fill `shuffle_memory`, shuffled with each other; None: all of a block. It
    depends only on the data and on settings in the state, to be the same after a resume."""
    sample_bytes = mean_sample_bytes(layouts)
    if shuffle_memory is None or not sample_bytes:
        return None
    return max(1, int(shuffle_memory / sample_bytes) // partitions)


def _check_memory(dataset: StreamingDataset, shuffle_block: int | None, shuffle_memory: int | None) -> None:
    """Warn if row groups shuffled with each other exceed decoded_limit: each would be dropped before it is needed
    again."""
    block = min(len(dataset), shuffle_block or len(dataset)) * dataset.sample_bytes
    needed = int(min(block, shuffle_memory or block))
    limit = max(MEMORY.limit, dataset.decoded_limit or 0)
    if needed > limit:
        warnings.warn(
            f"{dataset.name}: decoded_limit must be at least {needed} bytes, got {limit} bytes, or each row group is "
            "decoded many times. Give StreamingDataset twice as much, or the loader a smaller shuffle_memory",
            stacklevel=3,
        )


def _check_batches(batch: int, partitions: int, tail: Tail, length: int, skip: list[range]) -> None:
    """Refuse settings with which a global batch could have samples of two streams."""
    if batch % partitions:
        raise InvalidArgumentError(
            f"with interleave='batches' the global batch must be a multiple of {partitions=}, got {batch}"
        )
    if tail == "carry":
        raise InvalidArgumentError(
            "tail must not be 'carry' with interleave='batches': the carried samples would shift all batches"
        )
    for number in (number for piece in ranges_of(skip) for number in piece):
        if number % length % batch:
            raise InvalidArgumentError(
                f"with interleave='batches' skip must begin and end at multiples of {batch} samples, got {number}"
            )
