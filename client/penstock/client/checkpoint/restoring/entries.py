"""Entries of the state to restore: each top-level key with its value, such as a module or an optimizer.

`wanted` returns the values to read, `fit` checks those that were read, and `put` loads them once `fit` has succeeded on
every rank, so that no object is changed before all values are checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.client.checkpoint.restoring.index import SavedValue
from penstock.client.checkpoint.saving.collect import module_state, with_containers
from penstock.client.checkpoint.values.loader_states import Loader, load_loader, names_for
from penstock.client.checkpoint.values.optimizers import (
    check_order,
    group_order,
    load_optimizer,
    numbered_state,
    regrouped,
    some,
    warn_of_numbers,
)
from penstock.client.checkpoint.values.parameter_names import clean_keys, parameter_names, unwrapped
from penstock.client.checkpoint.values.torch_private import flatten_state_dict, set_element
from penstock.proto.errors import CheckpointError, PenstockError

KeyPath = tuple[Any, ...]
EXTRA = "_extra_state"


@dataclass(frozen=True)
class ReadRequest:
    tensor: torch.Tensor | None
    own: bool
    """True if the restore made this tensor, so that it may be filled before all values are checked."""


@dataclass(frozen=True)
class SavedEntries:
    path: Path
    index: dict[str, SavedValue]
    paths: dict[str, KeyPath]
    """Keys that lead to each saved value: "model.weight" has ("model", "weight")."""

    def under(self, key: str) -> dict[str, KeyPath]:
        """Return the values saved under a top-level key with the keys below it: "model.weight" with ("weight",)."""
        found = {name: path[1:] for name, path in self.paths.items() if path[0] == key}
        if not found:
            there = ", ".join(sorted({repr(path[0]) for path in self.paths.values()}))
            raise CheckpointError(f"the checkpoint {self.path} has no value {key!r}; its values are {there}")
        return found

    def empty(self, name: str, like: torch.Tensor | None = None) -> ReadRequest:
        """Request a new tensor, with device and split of `like` if that has the saved shape, or an object."""
        saved = self.index[name].tensor
        if saved is None:
            return ReadRequest(None, True)
        if like is not None and not is_lazy(like) and not like.is_meta and like.shape == saved.size:
            return ReadRequest(torch.empty_like(like, dtype=saved.properties.dtype, requires_grad=False), True)
        return ReadRequest(torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu"), True)

    def filled(self, name: str, tensor: torch.Tensor) -> ReadRequest:
        saved = self.index[name].tensor
        if saved is None:
            raise CheckpointError(
                f"{name!r} was saved in {self.path} as a Python object, but is a tensor in the state to restore"
            )
        if tensor.is_meta:
            raise CheckpointError(f"{name!r} of the state to restore is on the meta device: call to_empty() first")
        dtype = saved.properties.dtype
        if tensor.shape != saved.size or not torch.can_cast(dtype, tensor.dtype):
            raise CheckpointError(
                f"{name!r} must fit what is saved in {self.path}, {dtype} of shape {list(saved.size)}, got "
                f"{tensor.dtype} of shape {list(tensor.shape)}"
            )
        return ReadRequest(tensor, False)


@dataclass
class RestoreContext:
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Types and keys of dicts at the save (`with_containers`), by path in the state, such as "config.layers"."""
    notes: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """What torch's `load_state_dict` would change in an optimizer's state (`optimizers.notes`), by its key."""
    orders: dict[int, list[int]] = field(default_factory=dict)
    """Each optimizer's `group_order`, by id(). Schedulers need it, so they are restored after the optimizers."""


class StateEntry(ABC):
    comes_first = False
    """True if others need what this entry sets in the RestoreContext."""

    def __init__(self, key: str, value: Any, saved: SavedEntries) -> None:
        self.key = key
        self.value = value
        self.saved = saved
        self.names = saved.under(key)
        self.loaded: Any = None

    @abstractmethod
    def wanted(self) -> dict[str, ReadRequest]:
        pass

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        root: dict[str, Any] = {}
        for name, path in self.names.items():
            set_element(root, (self.key, *path), values[name])
        self.loaded = with_containers(root, around.containers)[self.key]

    @abstractmethod
    def put(self) -> None:
        pass

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            raise self.misfit(
                f"{type(error).__name__}: {error}. Make it as it was at the save, or leave it out"
            ) from error

    def misfit(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.key!r} cannot be restored from {self.saved.path}: {what}")


def entry_for(key: str, value: Any, state: Mapping[str, Any], saved: SavedEntries, rank: int) -> StateEntry:
    if isinstance(value, Loader):
        return _LoaderEntry(key, value, saved, rank)
    if isinstance(value, torch.optim.Optimizer):
        return _OptimizerEntry(key, value, saved, parameter_names(value, state, key))
    if isinstance(value, nn.Module):
        return _ModuleEntry(key, unwrapped(value), saved)
    if hasattr(value, "load_state_dict"):
        return _StatefulEntry(key, value, saved)
    return _PlainEntry(key, value, saved, state)


class _LoaderEntry(StateEntry):
    def __init__(self, key: str, value: Loader, saved: SavedEntries, rank: int) -> None:
        super().__init__(key, value, saved)
        under = {str(path[0]): name for name, path in self.names.items()}
        self._name = under[names_for(value, rank, set(under), key)]

    def wanted(self) -> dict[str, ReadRequest]:
        return {self._name: ReadRequest(None, True)}

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        self.loaded = values[self._name]

    def put(self) -> None:
        load_loader(self.value, self.loaded)


class _OptimizerEntry(StateEntry):
    comes_first = True

    def __init__(self, key: str, value: torch.optim.Optimizer, saved: SavedEntries, names: list[str]) -> None:
        super().__init__(key, value, saved)
        self._parameters = names

    def wanted(self) -> dict[str, ReadRequest]:
        parameters = [one for group in self.value.param_groups for one in group["params"]]
        if any(one.is_meta for one in parameters):
            raise self.misfit("its parameters are on the meta device: make it after to_empty(device=...)")
        like = dict(zip(self._parameters, parameters, strict=True))
        return {
            name: self.saved.empty(name, like.get(str(path[1])) if path[0] == "state" and path[1:] else None)
            for name, path in self.names.items()
        }

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        super().fit(values, around)
        lengths = [len(group["params"]) for group in self.value.param_groups]
        try:
            order = group_order(self.loaded, self._parameters, lengths)
            check_order(self.loaded, self.value, self._parameters, order)
        except CheckpointError as error:
            raise self.misfit(error.message) from None
        # a wrapper has the optimizer in an attribute
        for optimizer in (self.value, getattr(self.value, "optimizer", None)):
            around.orders[id(optimizer)] = order
        self.loaded = numbered_state(self.loaded, self._parameters, order, lengths)
        self._notes = around.notes.get(self.key, {})

    def put(self) -> None:
        load_optimizer(self.value, self.loaded, self._parameters, self._notes)


class _ModuleEntry(StateEntry):
    def wanted(self) -> dict[str, ReadRequest]:
        state = module_state(self.value)
        saved = {str(path[0]) for path in self.names.values()}
        missing, unexpected = sorted(set(state) - saved), sorted(saved - set(state))
        if missing or unexpected:
            parts = [f"the checkpoint lacks {some(self._full(missing))}"] if missing else []
            if unexpected:
                parts.append(f"the checkpoint has {some(self._full(unexpected))}, which the module does not have")
            raise self.misfit("; ".join(parts) + ". Build the module as it was at the save")
        wanted = {}
        for name, path in self.names.items():
            current, extra = state[str(path[0])], str(path[0]).rpartition(".")[2] == EXTRA
            fills = isinstance(current, torch.Tensor) and not extra and not is_lazy(current)
            wanted[name] = self.saved.filled(name, current) if fills else self.saved.empty(name)
        return wanted

    def _full(self, names: list[str]) -> list[str]:
        return [f"{self.key}.{name}" for name in names]

    def put(self) -> None:
        current = self.value.state_dict()
        state = OrderedDict((raw, self.loaded[clean]) for raw, clean in clean_keys(self.value, list(current)).items())
        if hasattr(current, "_metadata"):  # versions of modules' states, which plain dicts of tensors do not keep
            state._metadata = current._metadata  # type: ignore[attr-defined]
        self.value.load_state_dict(state)


class _StatefulEntry(StateEntry):
    def wanted(self) -> dict[str, ReadRequest]:
        current, _ = flatten_state_dict({self.key: self.value.state_dict()})
        like = {name: tensor for name, tensor in current.items() if isinstance(tensor, torch.Tensor)}
        return {name: self.saved.empty(name, like.get(name)) for name in self.names}

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        super().fit(values, around)
        warn_of_numbers(self.key, self.loaded)
        optimizer = getattr(self.value, "optimizer", None) or getattr(self.value, "_optimizer", None)
        if optimizer is not None and id(optimizer) in around.orders:
            try:
                self.loaded = regrouped(self.loaded, around.orders[id(optimizer)])
            except CheckpointError as error:
                raise self.misfit(error.message) from None

    def put(self) -> None:
        self.value.load_state_dict(self.loaded)


class _PlainEntry(StateEntry):
    def __init__(self, key: str, value: Any, saved: SavedEntries, state: Mapping[str, Any]) -> None:
        super().__init__(key, value, saved)
        self._state = state

    def wanted(self) -> dict[str, ReadRequest]:
        current, _ = flatten_state_dict({self.key: self.value})
        if missing := sorted(set(current) - set(self.names)):
            raise self.misfit(f"the checkpoint lacks {some(missing)}. Leave these values out of the state to restore")
        if not isinstance(self.value, Mapping) or self.value:  # an empty dict takes every saved value
            self.names = {name: path for name, path in self.names.items() if name in current}
        return {
            name: self.saved.filled(name, tensor)
            if isinstance(tensor := current.get(name), torch.Tensor)
            else self.saved.empty(name)
            for name in self.names
        }

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        super().fit(values, around)
        warn_of_numbers(self.key, self.loaded)

    def put(self) -> None:
        if isinstance(self.value, MutableMapping):
            _replace(self.value, self.loaded)
        elif not isinstance(self.value, torch.Tensor) and isinstance(self._state, MutableMapping):
            self._state[self.key] = self.loaded


def _replace(target: MutableMapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Replace values of nested dicts in place, but not tensors, which are filled already."""
    for key, value in loaded.items():
        if isinstance(target.get(key), MutableMapping) and isinstance(value, Mapping):
            _replace(target[key], value)
        elif not isinstance(target.get(key), torch.Tensor):
            target[key] = value
