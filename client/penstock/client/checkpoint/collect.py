"""What the user gave to be saved -> named values: a flat dict as torch.distributed.checkpoint would name them.

Modules and optimizers are taken by names that fit any number of ranks: those of DistributedDataParallel and
torch.compile are left out, and an optimizer's states go by the names of the parameters and not by their numbers. A
loader's state is one object, whatever is in it (loaders.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from penstock.client.checkpoint.frames import is_plain, saved_bytes
from penstock.client.checkpoint.loaders import Loader, loader_leaves
from penstock.client.checkpoint.planning import Key, LocalItem
from penstock.client.checkpoint.torch_private import find_state_dict_object, flatten_state_dict
from penstock.proto.errors import InvalidArgumentError

__all__ = ["OURS", "Collected", "ObjectBytes", "collect", "names_of", "unwrapped", "with_containers"]

OURS = "__penstock__"
"""Under it, at the top: what is needed to restore a state as it was."""
KINDS: dict[str, Any] = {"Counter": Counter, "OrderedDict": OrderedDict}
"""Mappings that are restored as what they were; others as dicts."""
PLAIN = (int, float, str, bool, type(None))


@dataclass
class Collected:
    """What this rank has, under names of its own making."""

    values: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]
    """Name -> the keys that lead to it."""
    signature: list[Any]
    """As long as it is the same, so is the plan."""
    loaders: dict[str, tuple[int, int]]
    """Of each loader: its box and the number of boxes of its run."""

    def items(self) -> list[LocalItem]:
        """All of it as write items."""
        plan = create_default_local_save_plan(self.values, is_coordinator=True)
        return [
            LocalItem(
                item,
                item.type is not WriteItemType.BYTE_IO and is_plain(find_state_dict_object(self.values, item.index)),
            )
            for item in plan.items
        ]


def collect(state: Mapping[str, Any], rank: int, ranks: int) -> Collected:
    """Raises InvalidArgumentError for a state that has no names, or none that can be told apart."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) and key for key in state):
        raise InvalidArgumentError(
            f"the state to save is a {type(state).__name__}: give a dict of names and what is under them, like "
            '{"model": model, "optimizer": optimizer, "loader": loader}'
        )
    if OURS in state:
        raise InvalidArgumentError(f"{OURS!r} is a name of Penstock's own: give what is under it another one")
    nested: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Loader):
            if leaves := loader_leaves(value, rank, ranks):
                nested[key] = leaves
        else:
            nested[key] = _state_of(value, state)
    try:
        values, paths = flatten_state_dict(nested)
    except ValueError as error:
        raise InvalidArgumentError(f"the state to save has two values under one name: {error}") from error
    for name, value in values.items():
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            raise InvalidArgumentError(
                f"{name!r} of the state to save is a {type(value).__name__}, whose state is only taken where it has a "
                f"name at the top: give it one, or its state_dict()"
            )
    for path in _empty(nested, ()):
        name = ".".join(map(str, path))
        if name in values:
            raise InvalidArgumentError(f"the state to save has two values under one name: {name}")
        values[name], paths[name] = {}, path
    if containers := dict(_containers(nested, ())):
        path = OURS, f"containers-{rank}"
        values[".".join(path)], paths[".".join(path)] = containers, path
    loaders = {key: value.place for key, value in state.items() if isinstance(value, Loader)}
    return Collected(values, paths, [list(paths.items()), [_kind(value) for value in values.values()]], loaders)


def _empty(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Where there are dicts without anything in them, which flattening loses."""
    if isinstance(value, Mapping):
        if not value and path:
            yield path
        for key, inner in value.items():
            yield from _empty(inner, (*path, str(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _empty(inner, (*path, number))


def _containers(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Dicts that are not as flattening takes them, with string keys and of no special kind: place -> how they were."""
    if isinstance(value, Mapping):
        keys = {str(key): key for key in value if _is_plain(key)}
        kind = type(value).__name__ if type(value) in KINDS.values() else ""
        if keys or kind:
            yield ".".join(map(str, path)), {"keys": keys, "kind": kind}
        for key, inner in value.items():
            yield from _containers(inner, (*path, str(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _containers(inner, (*path, number))


def _is_plain(key: Any) -> bool:
    """A key that is no string and can be loaded without asking what it is."""
    if type(key) is tuple:
        return all(type(part) is str or _is_plain(part) for part in key)
    return type(key) in (int, float, bool, type(None))


def with_containers(value: Any, containers: dict[str, dict[str, Any]], path: tuple[Any, ...] = ()) -> Any:
    """A nested state with the dicts that it had. containers: place, its path joined by dots -> how it was."""
    if not containers:
        return value
    if isinstance(value, dict):
        was = containers.get(".".join(map(str, path)), {"keys": {}, "kind": ""})
        inside = {
            was["keys"].get(key, key): with_containers(inner, containers, (*path, key)) for key, inner in value.items()
        }
        return KINDS[was["kind"]](inside) if was["kind"] else inside
    if isinstance(value, list):
        return [with_containers(inner, containers, (*path, number)) for number, inner in enumerate(value)]
    return value


def _state_of(value: Any, state: Mapping[str, Any]) -> Any:
    """The state of one entry of the dict to save."""
    if isinstance(value, torch.optim.Optimizer):
        return _optimizer_state(value, names_of(value, state))
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return unwrapped(value).state_dict()
    return value


def unwrapped(value: Any) -> Any:
    """A module without what wraps it whole: its parameters have the same names on any number of ranks."""
    while True:
        if isinstance(value, DistributedDataParallel):
            value = value.module
        elif isinstance(value, nn.Module) and isinstance(inner := getattr(value, "_orig_mod", None), nn.Module):
            value = inner  # torch.compile's
        else:
            return value


def names_of(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[str]:
    """The names of an optimizer's parameters, in its order: the module's that is saved with it, or else numbers."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for value in state.values():
        if isinstance(value, nn.Module):
            names = {id(parameter): name for name, parameter in unwrapped(value).named_parameters()}
            if all(id(parameter) in names for parameter in parameters):
                return [names[id(parameter)] for parameter in parameters]
    return [str(number) for number in range(len(parameters))]


def _optimizer_state(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """Its state_dict with names in the place of numbers."""
    plain = optimizer.state_dict()
    return {
        **plain,
        "state": {
            names[number] if isinstance(number, int) else number: value for number, value in plain["state"].items()
        },
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in plain["param_groups"]
        ],
    }


def _kind(value: Any) -> Any:
    if isinstance(value, DTensor):
        return DTensor, value.dtype, value.shape, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.layout, value.device.type == "meta"
    return None


class ObjectBytes:
    """What torch.save writes for objects. That takes 0.3 ms each, so those of short plain values are kept."""

    MOST = 4096
    SHORT = 200

    def __init__(self) -> None:
        self._kept: dict[tuple[type, str], bytes] = {}

    def of(self, value: Any) -> bytes:
        kind = type(value)
        if kind not in PLAIN or (kind is str and len(value) > self.SHORT):
            return saved_bytes(value.detach() if isinstance(value, torch.Tensor) else value)
        key = kind, repr(value)  # not the value: 0.0 and -0.0 are equal
        if key not in self._kept:
            if len(self._kept) >= self.MOST:
                self._kept.clear()
            self._kept[key] = saved_bytes(value)
        return self._kept[key]

    def all_of(self, collected: Collected, items: list[LocalItem]) -> dict[Key, bytes]:
        """Of everything that is not a plain tensor."""
        return {
            one.key: self.of(find_state_dict_object(collected.values, one.item.index))
            for one in items
            if not one.framed
        }
