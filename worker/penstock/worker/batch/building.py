"""What users call to build a batch where it will be sent from: `collate` and `empty`.

Usually a batch is made in ordinary memory and copied into the ring. Stacking samples is a copy, too, so it may as well
go straight into the ring entry, and the other copy is saved. entry_lease.py says when that is safe; whenever it is not,
or there is no ring, both calls do what torch's own do, so they can be used anywhere.

torch is imported when it is first needed: the daemon imports this package, and never torch. What needs it, and a ring,
is stacking.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.worker.batch.stacking import Builder

__all__ = ["collate", "empty", "lend"]

_builder: Builder | None = None
"""Of this process, if it is a runner."""


def lend(builder: Builder | None) -> None:
    """Build this process's batches with `builder` from now on. A process that is forked has none."""
    global _builder
    _builder = builder


def _before_fork() -> None:
    if _builder is not None:
        _builder.lease.forking()


os.register_at_fork(before=_before_fork, after_in_child=partial(lend, None))


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor to build a leaf of the next batch in, without a copy on its way to the training loop.

    For `torch.stack(samples, out=empty(...))` in a collate function of your own, or for numpy through
    `empty(...).numpy()`. Call it once for each such tensor, in the order in which the batch will hold them. Other
    tensors, arrays, numbers and strings may lie between them: where they do, the first batch of a size is copied.

    In a runner, while it makes the next batch in its main thread, the tensor lies in a slot of the ring, if slots have
    512 KiB and this one has room; anywhere else (and in replays, in worker processes of a torch DataLoader) it is
    `torch.empty(shape, dtype=dtype)`. The values are the same either way, and the tensor is yours for as long as you
    hold it. But a batch of which you still hold a part once it was yielded, or that is not made of just these tensors,
    is copied like any other: `yield make()` lets go of it, `batch = make(); yield batch` does not.

    shape: dims, or the only one. dtype: torch.get_default_dtype() by default.
    Returns a contiguous tensor, in the ring aligned to 64 bytes. It cannot be resized: `out=` needs its exact shape.
    Raises what torch.empty raises.
    """
    if _builder is not None and (made := _builder.empty(shape, dtype)) is not None:
        return made
    import torch

    return torch.empty(shape, dtype=dtype)


def collate(samples: list[Any]) -> Any:
    """A `collate_fn` for torch's DataLoader: default_collate, built in the ring where that is possible.

    samples: those of one batch, at least one; nested dicts, lists, tuples and namedtuples of tensors, arrays, numbers
    and strings. Returns what `torch.utils.data.default_collate(samples)` returns, equal in types, dtypes, shapes (each
    tensor with a first dim `len(samples)`) and values, to the bit; functions registered in torch's
    `default_collate_fn_map` apply. Raises what default_collate raises.

    In a runner and with `num_workers=0` tensors and arrays of batches of 512 KiB and more are stacked straight into a
    ring entry; `empty` says where not, and that a batch of which you still hold a part once it was yielded is copied
    all the same.
    """
    if _builder is not None:
        return _builder.collate(samples)
    from torch.utils.data import default_collate

    return default_collate(samples)
