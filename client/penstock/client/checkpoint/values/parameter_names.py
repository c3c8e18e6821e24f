"""Names of parameters that do not depend on wrappers of a module or on the order of parameters, because a checkpoint
outlives the program that wrote it. Of a parameter with several names (tied weights), the first in alphabetical order
counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.tracebacks import warn_user

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_forward_module", "_fsdp_wrapped_module"}
"""Attributes of wrapped modules: torch.compile, activation checkpointing, Lightning Fabric, FSDP1."""

MemoryKey = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Address, dtype, shape and strides of a tensor's values in memory."""


def unwrapped(value: Any) -> Any:
    """Return the module inside wrappers such as DDP or torch.compile; any other value unchanged."""
    while True:
        if isinstance(value, DistributedDataParallel | DataParallel):
            value = value.module
        elif type(value).__module__ == "torch._dynamo.eval_frame":  # torch.compile's wrapper
            value = value._orig_mod
        else:
            return value


def clean_keys(module: nn.Module, keys: list[str]) -> dict[str, str]:
    """Return each key of a module's state_dict without the names of wrappers inside the module."""
    clean = clean_names(module, keys)
    if len(set(clean.values())) < len(clean):
        return {key: key for key in keys}  # with the short names two keys would be equal
    return clean


def clean_names(module: nn.Module, names: list[str]) -> dict[str, str]:
    parallel = {
        f"{path}.module" if path else "module"
        for path, inner in module.named_modules(remove_duplicate=False)
        if isinstance(inner, DistributedDataParallel | DataParallel)
    }
    return {name: _clean(name, parallel) for name in names}


def _clean(key: str, parallel: set[str]) -> str:
    parts = key.split(".")
    if not parallel:
        return key if WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in WRAPPERS)
    return ".".join(
        part
        for number, part in enumerate(parts)
        if part not in WRAPPERS and ".".join(parts[: number + 1]) not in parallel
    )


def parameter_names(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], key: str) -> list[str]:
    """Return the names of an optimizer's parameters, in its order.

    They come from the module, or dict of tensors, in `state` that has all parameters; if only several modules together
    do, each name begins with its module's key. Others have the names given to the optimizer
    (`Adam(model.named_parameters())`), or are named by number and shape, with a warning. Raises InvalidArgumentError if
    two parameters have one name."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    holders = {other: _held(value) for other, value in sorted(state.items()) if isinstance(value, nn.Module)}
    names = _from_one(parameters, holders)
    if names is None:
        dicts = {other: _held(value) for other, value in sorted(state.items()) if isinstance(value, Mapping)}
        holders = {**holders, **dicts}
        names = _from_one(parameters, holders) or _from_several(optimizer, parameters, holders, key)
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidArgumentError(
            f"{key!r} of the state has several parameters named {twice[0]!r}: give each parameter its own name"
        )
    return names


Held = tuple[dict[int, str], dict[MemoryKey, str]]
"""Names of a value's parameters by id(), and by MemoryKey."""


def _from_one(parameters: list[torch.Tensor], holders: dict[str, Held]) -> list[str] | None:
    for held in holders.values():
        names = [_name_in(held, parameter) for parameter in parameters]
        found = [name for name in names if name is not None]
        if len(found) == len(names):
            return found
    return None


def _from_several(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], holders: dict[str, Held], key: str
) -> list[str]:
    given = [name for group in optimizer.param_groups for name in _given(group)]
    names: list[str] = []
    unnamed: list[tuple[int, ...]] = []
    for parameter, own in zip(parameters, given, strict=True):
        found = ((other, _name_in(held, parameter)) for other, held in holders.items())
        name = next((f"{other}.{inner}" for other, inner in found if inner is not None), own)
        if name is None:
            name = f"#{len(unnamed)} {list(parameter.shape)}"
            unnamed.append(tuple(parameter.shape))
        names.append(name)
    shape, count = next(iter(Counter(unnamed).most_common(1)), ((), 0))
    if count > 1:
        warn_user(
            f"{key!r} of the state has {count} parameters of shape {list(shape)} known by their order only: save the "
            f"module with it, or make it by {type(optimizer).__name__}(model.named_parameters())",
        )
    return names


def _given(group: dict[str, Any]) -> list[str | None]:
    names = group.get("param_names") or []
    return list(names) if len(names) == len(group["params"]) else [None] * len(group["params"])


def _name_in(held: Held, parameter: torch.Tensor) -> str | None:
    by_id, by_memory = held
    name = by_id.get(id(parameter))
    if name is None and by_memory and (memory := _memory_key(parameter)) is not None:
        return by_memory.get(memory)
    return name


def _held(value: Any) -> Held:
    by_id: dict[int, str] = {}
    by_memory: dict[MemoryKey, str] = {}
    if isinstance(value, nn.Module):
        module = unwrapped(value)
        parameters = list(module.named_parameters(remove_duplicate=False))
        clean = clean_keys(module, [name for name, _ in parameters])
        for name, parameter in parameters:
            by_id[id(parameter)] = min(clean[name], by_id.get(id(parameter), clean[name]))
    else:
        for name, tensor in _tensors(value, ""):
            by_id[id(tensor)] = min(name, by_id.get(id(tensor), name))
            if (memory := _memory_key(tensor)) is not None:
                by_memory[memory] = min(name, by_memory.get(memory, name))
    return by_id, by_memory


def _tensors(value: Mapping[Any, Any], before: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, inner in value.items():
        if isinstance(inner, torch.Tensor):
            yield f"{before}{key}", inner
        elif isinstance(inner, Mapping):
            yield from _tensors(inner, f"{before}{key}.")


def _memory_key(tensor: torch.Tensor) -> MemoryKey | None:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.device.type == "meta" or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
