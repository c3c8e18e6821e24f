"""What users call to build a batch where it will be sent from: `collate` and `empty`.

Usually a batch is made in ordinary memory and copied into the ring. Stacking samples is a copy, too, so it may as well
go straight into the ring slot, and the other copy is saved. lease.py says when that is safe; whenever it is not, or
there is no ring, both calls do what torch's own do, so they can be used anywhere.

`collate` runs torch's own recursion with other functions at its leaves. The recursion visits leaves in the order in
which they lie in the slot, so with the sizes of all leaves it knows the place of each before it is made.

torch is imported when it is first needed: the daemon imports this package, and never torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.worker.lease import Arena, Lease

__all__ = ["collate", "empty", "lend"]

_lease: Lease | None = None
"""Of this process, if it is a runner."""
_known: dict[Any, Any] = {}
"""torch's table of leaf functions as it was when `_table` was made: users may register more at any time."""
_table: dict[Any, Any] = {}
_dtype_of = attrgetter("dtype")


def lend(lease: Lease | None) -> None:
    """Build this process's batches in the slots of `lease` from now on. A process that is forked has none."""
    global _lease
    _lease = lease


def _before_fork() -> None:
    if _lease is not None:
        _lease.forking()


os.register_at_fork(before=_before_fork, after_in_child=partial(lend, None))


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor to build a leaf of the next batch in, without a copy on its way to the training loop.

    For `torch.stack(samples, out=empty(...))` in a collate function of your own, or for numpy through
    `empty(...).numpy()`. Call it once for each such tensor, in the order in which the batch will hold them. Other
    tensors, arrays, numbers and strings may lie between them: where they do, the first batch of a size is copied.

    In a runner, while it makes the next batch in its main thread, the tensor lies in a slot of the ring, if there is
    room; anywhere else (and in replays, in worker processes of a torch DataLoader) it is `torch.empty(shape,
    dtype=dtype)`. The values are the same either way, and the tensor is yours for as long as you hold it. But a batch
    of which you still hold a part once it was yielded, or that is not made of just these tensors, is copied like any
    other: `yield make()` lets go of it, `batch = make(); yield batch` does not.

    shape: dims, or the only one. dtype: torch.get_default_dtype() by default.
    Returns a contiguous tensor, in the ring aligned to 64 bytes. It cannot be resized: `out=` needs its exact shape.
    Raises what torch.empty raises.
    """
    import torch

    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    lease = _lease
    if lease is not None and (arena := lease.begin()) is not None:
        made = _cut(lease, arena, dims, torch.get_default_dtype() if dtype is None else dtype, guess=True)
        if made is not None:
            return made
    return torch.empty(dims, dtype=dtype)


def collate(samples: list[Any]) -> Any:
    """A `collate_fn` for torch's DataLoader: default_collate, built in the ring where that is possible.

    samples: those of one batch, at least one; nested dicts, lists, tuples and namedtuples of tensors, arrays, numbers
    and strings. Returns what `torch.utils.data.default_collate(samples)` returns, equal in types, dtypes, shapes (each
    tensor with a first dim `len(samples)`) and values, to the bit; functions registered in torch's
    `default_collate_fn_map` apply. Raises what default_collate raises.

    In a runner and with `num_workers=0` tensors and arrays are stacked straight into a ring slot; `empty` says where
    not, and that a batch of which you still hold a part once it was yielded is copied all the same.
    """
    from torch.utils.data._utils import collate as torchs

    lease = _lease
    if lease is None or (arena := lease.begin()) is None:
        return torchs.default_collate(samples)  # type: ignore[no-untyped-call]
    global _known, _table
    if torchs.default_collate_fn_map != _known:
        _known = dict(torchs.default_collate_fn_map)
        _table = {kind: partial(_leaf, function) for kind, function in _known.items()}
        _table.update(_stackers(torchs))
    try:
        return torchs.collate(samples, collate_fn_map=_table)
    finally:
        del arena  # it had to live until here: `lease.cursor` belongs to it


def _stackers(torchs: Any) -> dict[Any, Any]:
    """The leaf functions that build in the slot, for those of torch's that nobody has replaced."""
    import torch

    own: Callable[..., Any] = torchs.collate_tensor_fn
    return {torch.Tensor: partial(_stack, own)} if _known.get(torch.Tensor) is own else {}


def _stack(plain: Callable[..., Any], samples: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """torch.stack into the slot. What that refuses or would do differently goes to torch's own function."""
    import torch

    lease = _lease
    dtype = samples[0].dtype
    if (
        lease is not None
        and set(map(type, samples)) == {torch.Tensor}
        and set(map(_dtype_of, samples)) == {dtype}  # or out= would cast
        and (arena := lease.begin()) is not None
    ):
        cursor = lease.cursor
        out = _cut(lease, arena, (len(samples), *samples[0].shape), dtype)
        if out is not None:
            try:
                return torch.stack(samples, 0, out=out)  # type: ignore[arg-type]  # a tuple does as well
            except RuntimeError:  # shapes, layouts, devices, gradients: it has an answer, or says what is wrong
                lease.cursor = cursor
    return _leaf(plain, samples, collate_fn_map=collate_fn_map)


def _leaf(plain: Callable[..., Any], samples: Any, *, collate_fn_map: Any = None) -> Any:
    """torch's function for a leaf, and its size for the cursor, unless something below has moved that."""
    lease = _lease
    assert lease is not None
    cursor = lease.cursor
    made = plain(samples, collate_fn_map=collate_fn_map)
    if lease.cursor == cursor:
        _skip(lease, made)
    return made


def _skip(lease: Lease, made: Any) -> None:
    import torch

    from penstock.worker.lease import NOWHERE

    if type(made) is torch.Tensor:
        lease.skip(made.nbytes)
    elif type(made) is str:
        lease.skip(len(made.encode("utf-8", "surrogatepass")))
    elif type(made) is bytes:
        lease.skip(len(made))
    elif type(made) is list or type(made) is tuple:
        for one in made:
            _skip(lease, one)
    else:
        lease.cursor = NOWHERE  # what a user's function made; leaves behind it go elsewhere


def _cut(
    lease: Lease, arena: Arena, dims: tuple[int, ...], dtype: torch.dtype, *, guess: bool = False
) -> torch.Tensor | None:
    """A tensor in the slot, if it fits."""
    from math import prod

    import numpy as np
    import torch

    from penstock.proto.assemble import CARRIERS

    known = CARRIERS.get(dtype)
    count = prod(dims)
    if known is None or count <= 0 or min(dims, default=1) < 0:
        return None
    carrier, view = known
    at = lease.place(arena, count * carrier.itemsize, guess=guess)
    if at is None:
        return None
    made = torch.from_numpy(np.ndarray(dims, carrier, arena, at))
    return made if view is None else made.view(view)
