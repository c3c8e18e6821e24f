"""Stacking samples into a leased ring entry: `Builder.collate` runs torch's own recursion with other functions at its
leaves. It visits them in the order in which they lie in the entry, so offsets follow from the sizes of earlier
leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torchs

from penstock.proto.batch.assemble import CARRIERS
from penstock.worker.batch.entry_lease import NOWHERE, EntryArena, EntryLease

_dtype_of = attrgetter("dtype")


class Builder:
    """Builder of a runner's batches in ring entries. It implements `collate` and `empty` of building.py."""

    def __init__(self, lease: EntryLease) -> None:
        self.lease = lease
        self._known: dict[Any, Any] = {}
        # Copy of torch's table with other leaf functions, renewed when it differs from `_known`: users may register
        # functions with torch at any time.
        self._table: dict[Any, Any] = {}

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype | None) -> torch.Tensor | None:
        arena = self.lease.begin()
        if arena is None:
            return None
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        return self._cut(arena, dims, torch.get_default_dtype() if dtype is None else dtype)

    def collate(self, samples: list[Any]) -> Any:
        arena = self.lease.begin()
        if arena is None:
            return torchs.default_collate(samples)  # type: ignore[no-untyped-call]
        if torchs.default_collate_fn_map != self._known:
            self._known = dict(torchs.default_collate_fn_map)
            self._table = {kind: partial(self._leaf, function) for kind, function in self._known.items()}
            if self._known.get(torch.Tensor) is torchs.collate_tensor_fn:
                self._table[torch.Tensor] = self._stack
        try:
            return torchs.collate(samples, collate_fn_map=self._table)
        finally:
            del arena  # keeps the lease's cursor valid until here

    def _stack(self, samples: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
        """Stack into the leased entry. torch's own function does what torch.stack refuses or treats differently."""
        lease = self.lease
        dtype = samples[0].dtype
        if (
            set(map(type, samples)) == {torch.Tensor}
            and set(map(_dtype_of, samples)) == {dtype}  # otherwise out= would cast
            and (arena := lease.begin()) is not None
        ):
            cursor = lease.cursor
            out = self._cut(arena, (len(samples), *samples[0].shape), dtype)
            if out is not None:
                try:
                    return torch.stack(samples, 0, out=out)  # type: ignore[arg-type]  # a tuple does as well
                # unusual shapes, layouts, devices or gradients: torch's own function handles them or reports the error
                except RuntimeError:
                    lease.cursor = cursor
        return self._leaf(torchs.collate_tensor_fn, samples, collate_fn_map=collate_fn_map)

    def _leaf(self, plain: Callable[..., Any], samples: Any, *, collate_fn_map: Any = None) -> Any:
        """Call torch's function `plain`, and move the cursor by the result's size, unless a nested call has moved
        it."""
        cursor = self.lease.cursor
        made = plain(samples, collate_fn_map=collate_fn_map)
        if self.lease.cursor == cursor:
            self._skip(made)
        return made

    def _skip(self, made: Any) -> None:
        kind = type(made)
        if kind is torch.Tensor:
            self.lease.skip(made.nbytes)
        elif kind is str:
            self.lease.skip(len(made.encode("utf-8", "surrogatepass")))
        elif kind is bytes:
            self.lease.skip(len(made))
        elif kind is list or kind is tuple:
            for part in made:
                self._skip(part)
        else:
            self.lease.cursor = NOWHERE  # of unknown size: later leaves are built elsewhere

    def _cut(self, arena: EntryArena, dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        known = CARRIERS.get(dtype)
        count = prod(dims)
        if known is None or count <= 0 or min(dims, default=1) < 0:
            return None
        carrier, view = known
        offset = self.lease.place(arena, count * carrier.itemsize)
        if offset is None:
            return None
        made = torch.from_numpy(np.ndarray(dims, carrier, arena, offset))
        return made if view is None else made.view(view)
