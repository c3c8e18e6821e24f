"""Conversion of torch's DataLoader, or of its arguments, into the input_fn of a Penstock loader.

Arguments for making batches ahead are ignored. One is refused if Penstock cannot reproduce the order that it requests,
such as a sampler of the user's own class."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader

from penstock.data.loading.torch_datasets import read_batches, stream_batches
from penstock.proto.errors import InvalidArgumentError

__all__ = ["TakenOver", "taken_over"]

_AHEAD = {
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
}


@dataclass(frozen=True)
class TakenOver:
    """input_fn that returns a loader of the batches of a torch DataLoader, and its arguments."""

    input_fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    replay: bool
    """That loader has no state methods, so that its states are restored by replay."""


def taken_over(thing: Any, *args: Any, **kwargs: Any) -> TakenOver:
    """Return the input_fn that replaces a torch DataLoader, or reads a dataset with its arguments. Raises TypeError, or
    InvalidArgumentError if Penstock cannot reproduce an order."""
    if isinstance(thing, TorchLoader):
        return _from_loader(thing)
    is_dataset = isinstance(thing, torch.utils.data.Dataset) or (
        hasattr(type(thing), "__getitem__") and isinstance(thing, Sized) and not isinstance(thing, str | bytes | dict)
    )
    if not is_dataset:
        raise TypeError(
            f"input_fn must be a callable or a dataset, got a {type(thing).__qualname__}: pass the function itself, "
            "without calling it, and its arguments after it"
        )
    return _from_arguments(thing, *args, **kwargs)


def _from_arguments(
    dataset: Any,
    batch_size: int | None = 1,
    shuffle: bool | None = None,
    sampler: Any = None,
    batch_sampler: Any = None,
    num_workers: int = 0,
    collate_fn: Callable[[Any], Any] | None = None,
    pin_memory: bool = False,
    drop_last: bool = False,
    timeout: float = 0,
    worker_init_fn: Callable[[int], Any] | None = None,
    multiprocessing_context: Any = None,
    generator: torch.Generator | None = None,
    **ahead: Any,
) -> TakenOver:
    """Return the input_fn for a dataset. A shuffled order follows from `generator`'s initial seed, else the run's."""
    if not ahead.pop("in_order", True):
        raise _refused("in_order", False, "batches always come in order, so that a position is exact. Leave it out")
    unknown = ahead.keys() - _AHEAD
    if unknown:
        raise TypeError(
            f"neither torch's DataLoader nor Penstock's has an argument {min(unknown)!r}: check its spelling, or leave "
            "it out"
        )
    if batch_sampler is not None:
        raise _refused("batch_sampler", batch_sampler, _INPUT_FN)
    if isinstance(dataset, IterableDataset):
        if shuffle or sampler is not None:
            name, value = ("shuffle", shuffle) if shuffle else ("sampler", sampler)
            raise _refused(name, value, "an IterableDataset has an order of its own. Leave it out")
        return _streamed(dataset, batch_size, drop_last, collate_fn, worker_init_fn)
    if shuffle and sampler is not None:
        raise InvalidArgumentError(
            f"shuffle must be False with a sampler, got {shuffle!r}: the sampler decides the order. Leave one out"
        )
    order = _ordered_by(sampler) if sampler is not None else _Order(bool(shuffle))
    return _read(dataset, batch_size, order, drop_last, collate_fn, worker_init_fn, generator)


def _from_loader(loader: TorchLoader[Any]) -> TakenOver:
    of_torch = loader.collate_fn in (torch.utils.data.default_collate, torch.utils.data.default_convert)
    collate_fn = None if of_torch else loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        return _streamed(loader.dataset, loader.batch_size, loader.drop_last, collate_fn, loader.worker_init_fn)
    # torch makes a BatchSampler of its own from batch_size, and sets batch_size to None if the user passed one
    batches = loader.batch_sampler
    if batches is not None and (loader.batch_size is None or type(batches) is not BatchSampler):
        raise _refused("batch_sampler", batches, _INPUT_FN)
    order, settings = _ordered_by(loader.sampler), (loader.drop_last, collate_fn, loader.worker_init_fn)
    return _read(loader.dataset, loader.batch_size, order, *settings, loader.generator)


_INPUT_FN = (
    "several workers cannot follow its order. Write an input_fn that returns a torch DataLoader of this worker's "
    "share, or a penstock.data.MapLoader over a torch.utils.data.Subset in this order"
)


@dataclass(frozen=True)
class _Order:
    shuffle: bool
    indices: Sequence[int] | None = None
    """To read, in order unless `shuffle`; None: all samples of the dataset."""
    num_samples: int | None = None
    """Samples in an epoch; None: each index is read once."""


def _ordered_by(sampler: Any) -> _Order:
    if type(sampler) is SequentialSampler:
        return _Order(shuffle=False)
    if type(sampler) is RandomSampler and not sampler.replacement:
        count = sampler.num_samples
        return _Order(shuffle=True, num_samples=None if count == len(sampler.data_source) else count)
    if type(sampler) is SubsetRandomSampler:
        return _Order(shuffle=True, indices=sampler.indices)
    if type(sampler) is DistributedSampler:
        # boxes share the rows as evenly as torch's ranks do, and no sample is repeated to fill the last batch
        return _Order(sampler.shuffle)
    raise _refused("sampler", sampler, _INPUT_FN)


def _read(
    dataset: Any,
    batch_size: int | None,
    order: _Order,
    drop_last: bool,
    collate_fn: Callable[[Any], Any] | None,
    worker_init_fn: Callable[[int], Any] | None,
    generator: torch.Generator | None,
) -> TakenOver:
    arguments = {
        "batch_size": batch_size,
        "seed": None if generator is None else generator.initial_seed(),
        "shuffle": order.shuffle,
        "tail": "drop" if drop_last else "emit",
        "num_samples": order.num_samples,
        "collate_fn": collate_fn,
        "worker_init_fn": worker_init_fn,
    }
    if order.indices is not None:
        dataset = torch.utils.data.Subset(dataset, order.indices)
    return TakenOver(read_batches, (dataset,), arguments, replay=False)


def _streamed(
    dataset: Any,
    batch_size: int | None,
    drop_last: bool,
    collate_fn: Callable[[Any], Any] | None,
    worker_init_fn: Callable[[int], Any] | None,
) -> TakenOver:
    arguments = {
        "batch_size": batch_size,
        "drop_last": drop_last,
        "collate_fn": collate_fn,
        "worker_init_fn": worker_init_fn,
    }
    return TakenOver(stream_batches, (dataset,), arguments, replay=True)


def _refused(name: str, value: Any, why: str) -> InvalidArgumentError:
    shown = value if isinstance(value, bool) else f"a {type(value).__qualname__}"
    return InvalidArgumentError(f"{name} of a torch DataLoader is not supported, got {shown}: {why}")
