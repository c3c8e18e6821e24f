"""Comparison of a state with what a save and a restore make of it, for `AsyncCheckpointer.check`.

The restore is into the state itself, because not every state can be copied (a module split over ranks, a compiled one).
Its tensors are cleared before, because what the restore leaves out would look restored, and put back after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from penstock.client.checkpoint.restoring.entries import is_expanded
from penstock.client.checkpoint.restoring.restore import LoadedCheckpoint
from penstock.client.checkpoint.saving.collect import OURS, collect
from penstock.client.checkpoint.values.loader_states import Loader
from penstock.client.checkpoint.values.plain_values import value_digest


def differences(loaded: LoadedCheckpoint, state: Mapping[str, Any], rank: int, ranks: int) -> list[str]:
    """Return a line for each value of a state that `loaded`, read from a checkpoint of it, does not restore. Loaders
    are left out: their states were compared when they were read."""
    values = _values(state, rank, ranks)
    saved = _digests(values)
    tensors = [tensor for _, value in values.values() for tensor in _plain(value)]
    tensors = [tensor for tensor in tensors if not is_expanded(tensor) and not tensor.is_inference()]
    copies = [tensor.clone() for tensor in tensors]  # all of them first, because several may share memory
    loaded.hold()
    try:
        with torch.no_grad():
            for tensor in tensors:
                tensor.zero_()
        loaded.put(keep=True)
        found = _digests(_values(state, rank, ranks))
    finally:
        loaded.undo()
        with torch.no_grad():
            for tensor, before in zip(tensors, copies, strict=True):
                tensor.copy_(before)
    lines = [f"{name!r} is not restored" for name in saved if name not in found]
    lines += [f"{name!r} is restored, and was not in the state" for name in found if name not in saved]
    for name, (kind, digest) in saved.items():
        again, other = found.get(name, (kind, digest))
        if again != kind:
            lines.append(f"{name!r} is restored as {again}, and was {kind}")
        elif other != digest:
            lines.append(f"{name!r} is restored with other values")
    return lines


def _values(state: Mapping[str, Any], rank: int, ranks: int) -> dict[str, tuple[Any, Any]]:
    """Return (recipe, value) of all that a save would write, by name."""
    collected = collect({key: value for key, value in state.items() if not isinstance(value, Loader)}, rank, ranks)
    return {
        name: (collected.recipes.get(name), value)
        for name, value in collected.values.items()
        if not name.startswith(f"{OURS}.")
    }


def _digests(values: dict[str, tuple[Any, Any]]) -> dict[str, tuple[str, str]]:
    return {
        name: (_kind(value), value_digest([recipe, list(_plain(value)) or value]))
        for name, (recipe, value) in values.items()
    }


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    local = value.to_local() if isinstance(value, DTensor) else value
    split = f", split by {value.placements}" if isinstance(value, DTensor) else ""
    return f"a {type(local).__name__} of {local.dtype} {list(value.shape)}{split}"


def _plain(value: Any) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor consists of, such as the numbers and scales of a quantised one."""
    if isinstance(value, DTensor):
        return _plain(value.to_local())
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return [tensor for name in names for tensor in _plain(getattr(value, name))]
    return [value.detach()] if isinstance(value, torch.Tensor) else []
