"""Conversion of torch's DataLoader, or of its arguments, into the input_fn of a Penstock loader.

Arguments for making batches ahead are ignored. One is refused if Penstock cannot reproduce the order that it requests,
such as a sampler of the user's own class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
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

_AHEAD = (
    *("num_workers", "pin_memory", "pin_memory_device", "timeout"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
)
_INPUT_FN = (
    "several workers cannot follow its order. Write an input_fn that returns a torch DataLoader of this worker's "
    "share, or a penstock.data.MapLoader over a torch.utils.data.Subset in this order"
)


def taken_over(
    thing: Any, *args: Any, **kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], bool, str]:
    """Return the input_fn that replaces a torch DataLoader, or that of a dataset and torch's arguments, its own
    arguments, whether its states are restored by replay, because it has no state methods, and its name for people.

    Raises InvalidArgumentError if Penstock cannot reproduce the order, and the errors of torch's DataLoader."""
    loader = thing if isinstance(thing, TorchLoader) else _loader_of(thing, args, kwargs)
    dataset, sampler, batches = loader.dataset, loader.sampler, loader.batch_sampler
    of_torch = loader.collate_fn in (torch.utils.data.default_collate, torch.utils.data.default_convert)
    arguments: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "collate_fn": None if of_torch else loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
    }
    title = f"{type(dataset).__name__}, batch_size={loader.batch_size}"
    if not getattr(loader, "in_order", True):
        raise _refused("in_order", False, "batches always come in order, so that a position is exact. Leave it out")
    if isinstance(dataset, IterableDataset):
        return stream_batches, (dataset,), {**arguments, "drop_last": loader.drop_last}, True, title
    # torch makes a BatchSampler of its own from batch_size, and sets batch_size to None if the user passed one
    if batches is not None and (loader.batch_size is None or type(batches) is not BatchSampler):
        raise _refused("batch_sampler", batches, _INPUT_FN)
    shuffle, num_samples = True, None
    if type(sampler) is SequentialSampler:
        shuffle = False
    elif type(sampler) is RandomSampler and not sampler.replacement:
        num_samples = None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples
    elif type(sampler) is SubsetRandomSampler:
        dataset = torch.utils.data.Subset(dataset, sampler.indices)
    elif type(sampler) is DistributedSampler:
        shuffle = sampler.shuffle  # boxes share the rows as evenly as torch's ranks do, and no sample is repeated
    else:
        raise _refused("sampler", sampler, _INPUT_FN)
    arguments |= {
        "seed": None if loader.generator is None else loader.generator.initial_seed(),
        "shuffle": shuffle,
        "tail": "drop" if loader.drop_last else "emit",
        "num_samples": num_samples,
    }
    return read_batches, (dataset,), arguments, False, f"{title}, shuffled" if shuffle else title


def _loader_of(dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchLoader[Any]:
    is_list = isinstance(dataset, Sized) and not isinstance(dataset, str | bytes | dict)
    if not isinstance(dataset, torch.utils.data.Dataset) and not (is_list and hasattr(type(dataset), "__getitem__")):
        raise TypeError(
            f"input_fn must be a callable or a dataset, got a {type(dataset).__qualname__}: pass the function itself"
        )
    given = inspect.signature(TorchLoader).bind(dataset, *args, **kwargs).arguments
    return TorchLoader(**{name: value for name, value in given.items() if name not in _AHEAD})


def _refused(name: str, value: Any, why: str) -> InvalidArgumentError:
    shown = value if isinstance(value, bool) else f"a {type(value).__qualname__}"
    return InvalidArgumentError(f"{name} of a torch DataLoader is not supported, got {shown}: {why}")
