"""Loader of batches from a map-style dataset, in an order and with positions that do not depend on boxes and
workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.utils.data

from penstock.data.arguments import whole
from penstock.data.batch_columns import columns_match_samples
from penstock.data.loading.counting import Counts, LoaderCounts
from penstock.data.loading.fetching import check_threads
from penstock.data.loading.keyed_random import draws_nothing
from penstock.data.loading.map_reading import MapReader
from penstock.data.loading.position_loader import PositionLoader, check_settings
from penstock.data.loading.worker_identity import WorkerIdentity, global_batch
from penstock.data.ordering.balance import Balance
from penstock.data.ordering.epoch_plan import SampleOrder
from penstock.data.ordering.partition import Tail
from penstock.data.ordering.unsharded_order import UnshardedOrder
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.worker.batch.building import collate


class MapLoader(PositionLoader):
    """Loader of batches from a map-style dataset (`__len__`, `__getitem__`), in an order that does not depend on boxes
    and workers. One iteration is one epoch, or the rest of it after a loaded state.

    Example::

        def input_fn():
            return MapLoader(dataset, batch_size=32, shuffle=True)

    Inside an input_fn the loader makes this worker's share of the batches as a RestartableDataLoader: a state can be
    resumed on any number of boxes and workers. In a torch DataLoader (`DataLoader(loader, batch_size=None,
    num_workers=4)`) the worker processes share the batches in the same order; use `set_epoch` and `state_after` there,
    because they count in copies of the loader. Elsewhere it yields all batches of this rank (RANK and WORLD_SIZE, if
    set).
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
        reseed: bool | None = None,
        keys: str | None = None,
        counts: Counts | None = None,
        rank: tuple[int, int] | None = None,
        balance: Balance | None = None,
        collate_fn: Callable[[list[Any]], Any] = collate,
    ) -> None:
        """
        Args:
            dataset: map-style dataset. Its length, and its optional attribute `fingerprint` (a text), are part of a
                state. An optional `__getitems__` reads many samples at once; not used with `reseed`.
            batch_size: rows of a box's batch; the global batch grows with the number of boxes.
            global_batch_size: rows of all boxes' batches together, in place of batch_size. Boxes share them as evenly
                as possible; each gets at least one.
            seed: seed of the shuffle and of `reseed`; None: the run's seed (0 outside a worker).
            shuffle_block: number of neighbouring samples shuffled with each other, for data where neighbours are faster
                to read; None: all.
            num_samples: samples in an epoch; None: the dataset's length. With another number, an epoch continues where
                the one before stopped, so no sample repeats before all have come.
            tail: treatment of an incomplete last batch: "emit" it, "pad" it with samples of the epoch's beginning,
                "drop" it, or "carry" its samples into the next epoch. Only "pad" repeats a sample. With "emit" a box
                may get a batch of no rows, if fewer samples than boxes are left.
            skip: ranges of samples to leave out, named by epoch * num_samples + position in the epoch's order. The
                others keep their order. A resumed run may add ranges after its position.
            fetch_threads: threads that read samples ahead; 0: none. The dataset must be thread-safe.
            reseed: True: seed generators before each sample from seed, epoch and position, so that random augmentation
                depends on nothing else: the global ones of python, numpy and torch, and those that dataset, transforms
                and collate function or their modules hold. They are also seeded for the collate function, from the
                batch's first position, and restored after a batch. This takes 10 us a sample and 0.25 ms a batch, and
                for each numpy Generator of your own 30 us a sample (docs/datasets.md). False: leave them alone. None:
                False with `fetch_threads`, which share them, and for data that draw nothing: lists, arrays, tensors,
                torch's TensorDataset, Subset, ConcatDataset and StackDataset of these, and Penstock's datasets, unless
                a subclass overrides `__getitem__` or `clips` may draw. Otherwise True.
            keys: field added to each batch, with a text for each row by which `restore_sample` reads it again. A batch
                that is not a dict becomes {"batch": batch, keys: ...}.
            counts: counts of samples by source and key, see `Counts`; None: nothing is counted.
            rank: (this rank, number of data-parallel ranks); they share each global batch. None: the worker's box and
                the number of boxes, or outside a worker RANK and WORLD_SIZE. Ranks that need the same rows (tensor
                parallelism) pass the same value.
            balance: assignment of the rows of one or several steps to boxes by cost, see Balance; None: round robin. A
                step has the same rows on any number of boxes. Over several steps a resume needs the same global batch,
                so give `global_batch_size`.
            collate_fn: function from a list of samples to a batch.
        """
        shuffle_block, num_samples = whole("shuffle_block", shuffle_block), whole("num_samples", num_samples)
        seed, fetch_threads = whole("seed", seed), whole("fetch_threads", fetch_threads)
        identity = WorkerIdentity.now(rank)
        batch = global_batch(batch_size, global_batch_size, identity.boxes)
        check_settings(tail, shuffle_block=shuffle_block, num_samples=num_samples)
        check_threads(fetch_threads, reseed)
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
        self.dataset = dataset
        own_counts = LoaderCounts(counts, skips=getattr(dataset, "skip_failures", 0) > 0)
        own_samples = not (columns_match_samples(dataset) or draws_nothing(dataset))
        own_samples |= getattr(dataset, "clips_draw", False) is True
        reader = MapReader(
            dataset,
            name,
            len(order),
            collate_fn,
            seed=seed,
            reseed=False if reseed is None and fetch_threads else reseed,
            threads=fetch_threads,
            counter=own_counts.counter,
            own_samples=own_samples,
        )
        super().__init__(
            name,
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
            samples=self._length,
            threads=fetch_threads,
        )

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, or over the rest of the epoch in which a loaded state lies."""
        length = _length_of(self.dataset)
        if length != self._length:
            raise DatasetError(f"{self._name} must keep its {self._length} samples, got {length}. Make a new loader")
        return super().__iter__()


def _length_of(dataset: Any) -> int:
    """Raise InvalidArgumentError unless the dataset is map-style, DatasetError if it is empty."""
    name = type(dataset).__qualname__
    if not hasattr(type(dataset), "__getitem__") or isinstance(dataset, torch.utils.data.IterableDataset):
        raise InvalidArgumentError(
            f"dataset must be map-style, got {name}. Read an iterable one by ShardLoader(LogicalShards([dataset]))"
        )
    try:
        length = len(dataset)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise InvalidArgumentError(f"dataset must have a length, got {name}: {error}. Define __len__") from error
    if length == 0:
        raise DatasetError(f"{name} must have at least one sample, got none. Pass a dataset that is not empty")
    return length
