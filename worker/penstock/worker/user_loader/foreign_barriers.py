"""Datasets of other libraries whose workers meet at a barrier, so that a dataset that input_fn makes in each slot waits
for ever.

mosaicml-streaming's StreamingDataset is made once in a training process, and copied into the workers of its torch
DataLoader, which meet at a barrier in shared memory at the start of each epoch. If each of several slots makes one,
each waits there for as many workers as torch's get_worker_info() named, but they do not share the barrier. A dataset
that was made in the training process, and sent to the slots, has one barrier and works. The library is recognised by
names, without an import.
"""

from __future__ import annotations

from typing import Any

from penstock.proto.errors import InputFnError

__all__ = ["refuse_separate_barriers"]

_DEPTH = 8
"""Largest number of `dataset` attributes to follow from a loader to the dataset that it reads."""


def refuse_separate_barriers(loader: Any, name: str) -> None:
    """Raise InputFnError if a slot's loader reads a StreamingDataset of mosaicml-streaming that was made as one of
    several workers. `name`: name of the loader for the error."""
    for _ in range(_DEPTH):
        if _is_mosaicml(loader) and getattr(getattr(loader, "_unique_rank_world", None), "workers_per_rank", 1) > 1:
            raise InputFnError(
                f"{name} reads a StreamingDataset of mosaicml-streaming that input_fn made in this worker slot: its "
                "workers wait for each other at a barrier, and those of several slots would wait for ever. Read the "
                "same folder by penstock.data.StreamingDataset and StreamingLoader, whose names are on the page "
                "docs/from_mosaicml_streaming.md; or use one box with num_workers_per_box=1, where the torch "
                "DataLoader may have num_workers= of its own"
            )
        loader = getattr(loader, "dataset", None)


def _is_mosaicml(value: Any) -> bool:
    return any(
        base.__name__ == "StreamingDataset" and base.__module__.partition(".")[0] == "streaming"
        for base in type(value).__mro__
    )
