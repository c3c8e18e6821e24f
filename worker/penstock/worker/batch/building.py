"""`collate` and `empty`, with which users build a batch directly in the memory that it is sent from.

Stacking samples is a copy: if the stack is written straight into the ring, the copy into the ring is saved.
entry_lease.py describes when that is safe. Otherwise, and outside a runner, both functions do the same as torch's, so
both can be used anywhere.

torch is imported on first use, because the daemon imports this package and must not import torch. Code that needs torch
and a ring is in stacking.py.
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
"""Object that builds this process's batches in the ring; None unless this process is a runner."""


def lend(builder: Builder | None) -> None:
    """Let `collate` and `empty` of this process build batches with `builder` from now on; None: in ordinary memory, as
    at first in every process, also in a forked one."""
    global _builder
    _builder = builder


def _before_fork() -> None:
    if _builder is not None:
        _builder.lease.forking()


os.register_at_fork(before=_before_fork, after_in_child=partial(lend, None))


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised CPU tensor to build a part of the next batch in. Where possible the tensor lies in the
    ring, the shared memory through which batches are sent, so that the batch reaches the training loop without a copy.

    Write `torch.stack(samples, out=empty(...))` in a collate function of your own, or `empty(...).numpy()` for numpy.
    Call `empty` once for each such tensor, in the order of the tensors in the batch. Other tensors, arrays, numbers and
    strings may lie between them; then the first batch of a size is copied.

    In a runner (the process that runs your loader), while the main thread makes the next batch, the tensor lies in the
    batch's ring entry, if that has at least 512 KiB and enough free space. Anywhere else (also in replays, and in
    worker processes of a torch DataLoader) the result is `torch.empty(shape, dtype=dtype)`. The values are the same
    either way, and the tensor is yours for as long as you hold it. A batch is copied like any other if it holds other
    tensors instead (for example `tensor * 2`), or if you still hold a part of it after yielding it: `yield make()`
    releases the batch, `batch = make(); yield batch` does not.

    shape: dims; an int for one dim. dtype: torch.get_default_dtype() by default.
    Returns a contiguous tensor, in the ring aligned to 64 bytes. The tensor cannot be resized, so `shape` must be the
    exact shape of the result that `out=` receives. Raises what torch.empty raises.
    """
    if _builder is not None and (made := _builder.empty(shape, dtype)) is not None:
        return made
    import torch

    return torch.empty(shape, dtype=dtype)


def collate(samples: list[Any]) -> Any:
    """Collate samples like torch's default_collate (for `collate_fn=`), but build large batches directly in the ring,
    the shared memory through which batches are sent, which saves a copy.

    samples: the samples of one batch, at least one; nested dicts, lists, tuples and namedtuples of tensors, arrays,
    numbers and strings. Returns what `torch.utils.data.default_collate(samples)` returns, equal in types, dtypes,
    shapes (each tensor with a first dim `len(samples)`) and values, to the bit; functions registered in torch's
    `default_collate_fn_map` apply. Raises what default_collate raises.

    In a runner (the process that runs your loader) and with `num_workers=0`, tensors and arrays of batches of 512 KiB
    and more are stacked straight into the ring. As with `empty`, a batch is copied if you still hold a part of it after
    yielding it.
    """
    if _builder is not None:
        return _builder.collate(samples)
    from torch.utils.data import default_collate

    return default_collate(samples)
