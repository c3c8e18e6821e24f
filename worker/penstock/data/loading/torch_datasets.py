"""Ready-made input_fns for `penstock.client.DataLoader(dataset, ...)`. A map-style dataset is read by a MapLoader, an
iterable one by torch's DataLoader in each worker: it must yield its part by get_worker_info(), and is restored by
replay from the start of the epoch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.utils.data
from torch.utils.data import default_convert

from penstock.data.loading.map_loader import MapLoader
from penstock.data.ordering.partition import Tail
from penstock.proto.state.assignment import process_assignment
from penstock.worker.batch.building import collate


def _only_sample(convert: Callable[[Any], Any], samples: list[Any]) -> Any:
    return convert(samples[0])


def read_batches(
    dataset: Any,
    *,
    batch_size: int | None,
    seed: int | None,
    shuffle: bool,
    tail: Tail,
    num_samples: int | None,
    collate_fn: Callable[[Any], Any] | None,
    worker_init_fn: Callable[[int], Any] | None,
) -> MapLoader:
    """`batch_size` None: each sample is a batch."""
    _begin(worker_init_fn)
    if batch_size is None:
        collate_fn = partial(_only_sample, collate_fn or default_convert)
    return MapLoader(
        dataset,
        batch_size=1 if batch_size is None else batch_size,
        shuffle=shuffle,
        seed=seed,
        tail=tail,
        num_samples=num_samples,
        collate_fn=collate_fn or collate,
    )


def stream_batches(
    dataset: Any,
    *,
    batch_size: int | None,
    drop_last: bool,
    collate_fn: Callable[[Any], Any] | None,
    worker_init_fn: Callable[[int], Any] | None,
) -> torch.utils.data.DataLoader[Any]:
    """`dataset` must yield only this worker's samples."""
    _begin(worker_init_fn)
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=collate_fn)


def _begin(worker_init_fn: Callable[[int], Any] | None) -> None:
    if worker_init_fn is not None:
        worker_init_fn(process_assignment().slot)
