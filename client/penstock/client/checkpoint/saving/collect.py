"""Collection of the state to save as a flat dict of values with torch's names, such as "model.layer.weight".

The names do not depend on the number of ranks (parameter_names.py, optimizers.py). A data loader's state is one object
(loader_states.py). Other objects are saved as plain values with a recipe to make them again, if possible
(plain_values.py)."""

from __future__ import annotations

import pickle
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from penstock.client.checkpoint.saving.planning import Key, LocalItem, TensorItems
from penstock.client.checkpoint.values.loader_states import Loader, loader_leaves
from penstock.client.checkpoint.values.objects import plain_bytes
from penstock.client.checkpoint.values.optimizers import is_numbered, named_state, shared, warn_of_numbers
from penstock.client.checkpoint.values.parameter_names import clean_keys, clean_names, parameter_names, unwrapped
from penstock.client.checkpoint.values.plain_values import FACTORIES, LEAVES, PLAIN, decode, encode
from penstock.client.checkpoint.values.torch_frames import is_plain, saved_bytes
from penstock.client.checkpoint.values.torch_private import find_state_dict_object
from penstock.proto.errors import InvalidArgumentError

OURS = "__penstock__"
"""Top-level key of Penstock's own data, with which a restore gives the state exactly its original form."""
CONTAINERS, RECIPES, OPTIMIZERS, VERSIONS = "containers", "recipes", "optimizers", "versions"
"""Tables of each rank under OURS: types and keys of dicts, recipes, tensors that parameters share in optimizers'
states, versions of modules' states."""
_SMALL = re.compile(r"torch\.u?int[1-7]")
KINDS: dict[str, Any] = {"Counter": Counter, "OrderedDict": OrderedDict}
"""Mapping types that a restore makes again, by name. Other mappings are restored as dicts."""

KeyPath = tuple[Any, ...]


@dataclass
class CollectedState:
    """Values that this rank could save, by name. Which rank saves a shared value is decided later."""

    values: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]
    signature: list[Any]
    """Structure of the state. If it equals that of the save before, the plan is used again."""
    loaders: dict[str, tuple[int, int]]
    """(box, number of boxes) of each data loader, by its key in the state."""
    recipes: dict[str, Any]
    opaque: dict[str, str]
    """Objects that cannot be saved as plain values, each with the name of the class without a recipe."""

    def items(self) -> list[LocalItem]:
        tensors, found = TensorItems(), []
        for name, value in self.values.items():
            if type(value) in PLAIN:
                found.append(LocalItem((name, None), None, None, None, WriteItemType.BYTE_IO))
            elif isinstance(value, torch.Tensor) and is_plain(value):
                found.append(tensors.of(name, value))
            else:
                found += self._by_torch(name)
        return found

    def tensor(self, one: LocalItem) -> torch.Tensor:
        value = self.values[one.key[0]]
        found: torch.Tensor = value if type(value) in LEAVES else find_state_dict_object(self.values, one.torch_index)
        return found

    def _by_torch(self, name: str) -> list[LocalItem]:
        """Items of torch's planner, for split tensors and tensor classes with their own rules for saving."""
        plan = create_default_local_save_plan({name: self.values[name]}, is_coordinator=True)
        return [
            LocalItem.of(
                item,
                item.type is not WriteItemType.BYTE_IO and is_plain(find_state_dict_object(self.values, item.index)),
            )
            for item in plan.items
        ]


def collect(state: Mapping[str, Any], rank: int, ranks: int) -> CollectedState:
    """Raises InvalidArgumentError if the state is not a dict, or two values in it have the same name."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) and key for key in state):
        odd = [key for key in state if not isinstance(key, str) or not key] if isinstance(state, Mapping) else []
        got = f"the name {odd[0]!r}" if odd else type(state).__name__
        raise InvalidArgumentError(
            f'the state to save must be a dict of names and values, such as {{"model": model}}, got {got}'
        )
    if OURS in state:
        raise InvalidArgumentError(f"the state to save must not have the key {OURS!r}: rename that entry")
    nested: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Loader):
            if leaves := loader_leaves(value, rank, ranks):
                nested[key] = leaves
        else:
            nested[key] = _state_of(key, value, state)
    values, paths = flattened(nested)
    for name, value in values.items():
        if type(value) in LEAVES:
            continue
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            raise InvalidArgumentError(
                f"{name!r} of the state to save is a {type(value).__name__} inside a dict or list: move it to the top"
            )
    recipes, opaque = _made_plain(values)
    optimizers = [key for key, value in state.items() if isinstance(value, torch.optim.Optimizer)]
    noted = {
        key: {"shared": alike} for key in optimizers if is_numbered(nested[key]) and (alike := shared(nested[key]))
    }
    versions = {key: nested[key]._metadata for key, value in state.items() if isinstance(value, nn.Module)}
    tables = (
        (CONTAINERS, dict(_containers(nested, ()))),
        (RECIPES, recipes),
        (OPTIMIZERS, noted),
        (VERSIONS, versions),
    )
    for table, content in tables:
        if content:
            path = OURS, f"{table}-{rank}"
            values[".".join(path)], paths[".".join(path)] = content, path
    loaders = {key: value.box_and_num_boxes for key, value in state.items() if isinstance(value, Loader)}
    signature = [list(paths.items()), [_kind(value) for value in values.values()]]
    return CollectedState(values, paths, signature, loaders, recipes, opaque)


def flattened(nested: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Return nested values, and the keys that lead to them, by their names in a checkpoint."""
    flat = _Flat({}, {}, {})
    for key, value in nested.items():
        try:
            flat.add(value, (key,))
        except RecursionError:
            raise _too_deep(key) from None
    return flat.values, flat.paths


@dataclass
class _Flat:
    """Nested values by the names of torch's `flatten_state_dict`, which takes four times as long."""

    values: dict[str, Any]
    paths: dict[str, KeyPath]
    containers: dict[str, KeyPath]

    def add(self, value: Any, path: KeyPath) -> None:
        name = ".".join(map(str, path))
        if not _is_flattened(value):
            self._put(name, path, value)
        elif not value:
            self._put(name, path, {})  # torch would leave an empty dict out
        else:
            _claim(name, path, self.containers)
            by_name = isinstance(value, Mapping)
            for key, inner in value.items() if by_name else enumerate(value):
                last = str(key) if by_name else key
                if type(inner) in LEAVES:  # most values: without a call for each
                    self._put(f"{name}.{last}", (*path, last), inner)
                else:
                    self.add(inner, (*path, last))

    def _put(self, name: str, path: KeyPath, value: Any) -> None:
        _claim(name, path, self.paths)
        self.values[name] = value


def _claim(name: str, path: KeyPath, known: dict[str, KeyPath]) -> None:
    if name in known:
        raise InvalidArgumentError(f"the state to save has two values under the name {name}: rename a key")
    known[name] = path


def _is_flattened(value: Any) -> bool:
    """True if torch saves the contents under separate names: a dict, or a list of tensors or dicts."""
    return isinstance(value, Mapping) or (
        isinstance(value, list) and any(isinstance(inner, torch.Tensor) or _is_flattened(inner) for inner in value)
    )


def _made_plain(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace objects in `values` by plain values. Return the recipes, and for other objects the class without one."""
    recipes, opaque = {}, {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if why := _unrestorable(value):
                raise InvalidArgumentError(f"{name!r} of the state to save {why}")
        elif type(value) not in PLAIN:
            values[name], recipe, kind = encode(value)
            if recipe is not None:
                recipes[name] = recipe
            if kind:
                opaque[name] = kind
    return recipes, opaque


@lru_cache
def _is_small(dtype: torch.dtype) -> bool:
    return _SMALL.fullmatch(str(dtype)) is not None


def _unrestorable(tensor: torch.Tensor) -> str:
    if is_plain(tensor) and not tensor.is_nested and not _is_small(tensor.dtype):
        return ""
    if is_lazy(tensor):
        return "has no values yet, because its module is lazy: call the module once, or leave the tensor out"
    if tensor.is_quantized or _is_small(tensor.dtype):
        return f"is of {tensor.dtype}, which no checkpoint can restore: save plain tensors, such as its int_repr()"
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"is a {kind} tensor, which no checkpoint can restore: save the strided tensors that it consists of"
    if tensor.is_meta:
        return "is on the meta device, and has no values: call to_empty(device=...) and set the values, or leave it out"
    return ""


def _containers(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, description) of each dict that names alone cannot restore: keys that are not strings, or KINDS."""
    if isinstance(value, Mapping):
        keys = {str(key): key for key in value if type(key) is not str and _is_plain(key)}
        coded = {str(key): _coded(key, path) for key in value if type(key) is not str and not _is_plain(key)}
        kind = _container(value)
        if keys or coded or kind:
            yield ".".join(map(str, path)), {"keys": keys, "kind": kind, **({"coded": coded} if coded else {})}
        for key, inner in value.items():
            if type(inner) not in LEAVES:
                yield from _containers(inner, (*path, str(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if type(inner) not in LEAVES:
                yield from _containers(inner, (*path, number))


def _container(value: Mapping[Any, Any]) -> str:
    if type(value) is defaultdict:
        return next((name for name, kind in FACTORIES.items() if kind is value.default_factory), "")
    return type(value).__name__ if type(value) in KINDS.values() else ""


def _coded(key: Any, path: tuple[Any, ...]) -> list[Any]:
    encoded = encode(key)
    if encoded.opaque:
        raise InvalidArgumentError(
            f"{'.'.join(map(str, path))!r} of the state to save has a key of type {type(key).__qualname__}, {key!r}, "
            "which would be restored as a str: use int, str, or tuples of them"
        )
    return [encoded.value, encoded.recipe]


def _is_plain(key: Any) -> bool:
    if type(key) is tuple:
        return all(type(part) is str or _is_plain(part) for part in key)
    return type(key) in (int, float, bool, type(None))


def with_containers(value: Any, containers: dict[str, dict[str, Any]], path: tuple[Any, ...] = ()) -> Any:
    if not containers:
        return value
    if isinstance(value, dict):
        was = containers.get(".".join(map(str, path)), {"keys": {}, "kind": ""})
        keys = {**was["keys"], **{key: decode(*coded) for key, coded in was.get("coded", {}).items()}}
        inside = {keys.get(key, key): with_containers(inner, containers, (*path, key)) for key, inner in value.items()}
        if was["kind"] in FACTORIES:
            return defaultdict(FACTORIES[was["kind"]], inside)
        return KINDS[was["kind"]](inside) if was["kind"] else inside
    if isinstance(value, list):
        return [with_containers(inner, containers, (*path, number)) for number, inner in enumerate(value)]
    return value


def _state_of(key: str, value: Any, state: Mapping[str, Any]) -> Any:
    if isinstance(value, torch.optim.Optimizer) and is_numbered(plain := value.state_dict()):
        return named_state(plain, parameter_names(value, state, key))
    if isinstance(value, nn.Module):
        return module_state(unwrapped(value))
    plain = value.state_dict() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else value
    try:
        warn_of_numbers(key, plain)
    except RecursionError:
        raise _too_deep(key) from None
    return plain


def _too_deep(key: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{key!r} of the state contains itself, or is nested too deeply: leave it out")


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state_dict() without the names of wrappers: "layer.weight", not "module.layer.weight". Its
    `_metadata` has the versions of the modules in it; of a wrapper and the module within, the latter's."""
    plain = module.state_dict()
    clean = clean_keys(module, list(plain))
    found = OrderedDict((clean[name], value) for name, value in plain.items())
    versions = getattr(plain, "_metadata", {})
    names = clean_names(module, list(versions))
    found._metadata = {  # type: ignore[attr-defined]
        names[name]: {key: value for key, value in one.items() if type(value) in PLAIN}
        for name, one in versions.items()
    }
    return found


def _kind(value: Any) -> Any:
    if type(value) in PLAIN:
        return None
    if isinstance(value, DTensor):
        return DTensor, value.dtype, value.shape, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.layout, value.is_meta
    return None


def object_bytes(collected: CollectedState, items: list[LocalItem]) -> dict[Key, bytes]:
    """Return the bytes that torch.save writes for each unframed item."""
    found = {}
    for one in items:
        if one.frame is not None:
            continue
        key, name = one.key, one.key[0]
        try:
            if one.data is not None:
                found[key] = saved_bytes(find_state_dict_object(collected.values, one.torch_index).detach())
            elif name in collected.opaque:
                found[key] = saved_bytes(collected.values[name])
            else:
                found[key] = plain_bytes(collected.values[name])
        except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"{name!r} of the state to save cannot be saved: {type(error).__name__}: {error}. Leave it out"
            ) from error
    return found
