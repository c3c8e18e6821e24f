"""`collate` and `empty`, with which users build a batch directly in the memory that it is sent from: this saves a copy.

entry_lease.py says when that is safe. Otherwise, and outside a runner, both do the same as torch's. The daemon imports
this package and must not import torch, so torch is imported on first use; code that needs it is in stacking.py.
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
"""Builder of this process's batches in the ring; None unless this process is a runner."""


def lend(builder: Builder | None) -> None:
    """Let `collate` and `empty` build with `builder` from now on; None: in ordinary memory, as at first in every
    process."""
    global _builder
    _builder = builder


def _before_fork() -> None:
    if _builder is not None:
        _builder.lease.forking()


os.register_at_fork(before=_before_fork, after_in_child=partial(lend, None))


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised CPU tensor to build a part of the next batch in, if possible in the ring, the shared
    memory through which batches are sent, so that the batch is not copied.

    Write `torch.stack(samples, out=empty(...))` in a collate function of your own, or `empty(...).numpy()` for numpy.
    Call `empty` once for each such tensor, in the order of the tensors in the batch. If other values lie between them,
    the first batch of a size is copied.

    The tensor lies in the batch's ring entry, if that has at least 512 KiB and enough free space, while the main thread
    of a runner (the process that runs your loader) makes the batch. Anywhere else (in replays, and in worker processes
    of a torch DataLoader) the result is `torch.empty(shape, dtype=dtype)`. The tensor is yours for as long as you hold
    it. A batch is copied like any other if it holds other tensors instead (`tensor * 2`), or if you still hold a part
    of it after yielding it: `yield make()` releases the batch, `batch = make(); yield batch` does not.

    shape: dims, or an int; the exact shape of the result that `out=` receives, as the tensor cannot be resized. dtype:
    torch.get_default_dtype() by default. The tensor is contiguous, in the ring aligned to 64 bytes. Raises what
    torch.empty raises.
    """
    if _builder is not None and (made := _builder.empty(shape, dtype)) is not None:
        return made
    import torch

    return torch.empty(shape, dtype=dtype)


def collate(samples: list[Any]) -> Any:
    """Collate samples like torch's default_collate (for `collate_fn=`), but build large batches directly in the ring,
    the shared memory through which batches are sent, which saves a copy.

    samples: at least one; nested dicts, lists, tuples and namedtuples of tensors, arrays, numbers and strings. Returns
    and raises what `torch.utils.data.default_collate(samples)` does, equal in types, dtypes, shapes (first dim
    `len(samples)`) and values to the bit; torch's `default_collate_fn_map` applies.

    In a runner with `num_workers=0`, batches of 512 KiB and more are stacked straight into the ring. As with `empty`, a
    batch is copied if you still hold a part of it after yielding it.
    """
    if _builder is not None:
        return _builder.collate(samples)
    from torch.utils.data import default_collate

    return default_collate(samples)
