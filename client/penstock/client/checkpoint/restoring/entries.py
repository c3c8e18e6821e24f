"""Entries of the state to restore: each top-level key with its value, such as a module or an optimizer.

`wanted` returns the values to read, `fit` checks those that were read, and `put` loads them once `fit` has succeeded on
every rank. So nothing is changed before all values are checked, except where only the user's own code can tell whether
they fit. `undo` is the way back, when that raises."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from penstock.client.checkpoint.restoring.index import SavedValue
from penstock.client.checkpoint.saving.collect import flattened, module_state, with_containers
from penstock.client.checkpoint.values.loader_states import Loader, loader_state, names_for
from penstock.client.checkpoint.values.optimizers import (
    check_order,
    group_order,
    is_numbered,
    load_optimizer,
    loads_by,
    numbered_state,
    regrouped,
    some,
    warn_of_numbers,
    with_wrapped,
)
from penstock.client.checkpoint.values.parameter_names import clean_keys, clean_names, parameter_names, unwrapped
from penstock.client.checkpoint.values.torch_frames import is_plain
from penstock.client.checkpoint.values.torch_private import set_element
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
    path: str
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

    def empty(self, name: str, like: Any = None) -> ReadRequest:
        """Request a new tensor, with device and split of `like` if that is one of the saved shape, or an object."""
        saved = self.index[name].tensor
        if saved is None:
            return ReadRequest(None, True)
        if isinstance(like, torch.Tensor) and not is_lazy(like) and not like.is_meta and like.shape == saved.size:
            return ReadRequest(_blank(like, saved.properties.dtype), True)
        return ReadRequest(torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu"), True)

    def filled(self, name: str, tensor: torch.Tensor) -> ReadRequest:
        """Request to fill a tensor of the state to restore. Raises CheckpointError if it does not fit."""
        if why := self.misfit(name, tensor):
            raise CheckpointError(why)
        return ReadRequest(tensor, False)

    def misfit(self, name: str, tensor: torch.Tensor) -> str:
        """Return why a saved value cannot fill a tensor; "" if it can."""
        saved = self.index[name].tensor
        if saved is None:
            return f"{name!r} was saved in {self.path} as a Python object, but is a tensor in the state to restore"
        if tensor.is_meta:
            return f"{name!r} of the state to restore is on the meta device: call to_empty() first"
        dtype = saved.properties.dtype
        if tensor.shape != saved.size or not torch.can_cast(dtype, tensor.dtype):
            return (
                f"{name!r} must fit what is saved in {self.path}, {dtype} of shape {list(saved.size)}, got "
                f"{tensor.dtype} of shape {list(tensor.shape)}"
            )
        if is_expanded(tensor):
            return f"{name!r} of the state to restore is expanded, so that values share memory: call clone() first"
        return ""


def is_expanded(tensor: torch.Tensor) -> bool:
    """True if values of the tensor share memory, so that it cannot be filled."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _blank(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(like, DTensor):
        if is_plain(like):
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    local = _blank(like.to_local().detach(), dtype)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _is_whole(tensor: torch.Tensor) -> bool:
    """True for a tensor that can be filled part by part: a plain one, or one split over ranks into plain ones."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return is_plain(local) and not local.is_neg() and not local.is_conj()


@dataclass
class RestoreContext:
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Types and keys of dicts at the save (`with_containers`), by path in the state, such as "config.layers"."""
    shared: dict[str, list[Any]] = field(default_factory=dict)
    """Tensors that parameters share in an optimizer's state (`optimizers.shared`), by its key."""
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the saved state_dict of a module said of each module in it, by its key."""
    done: set[int] = field(default_factory=set)
    """Dicts and lists of the state, by id(), that became what was saved. At a second place another is made."""
    orders: dict[int, list[int]] = field(default_factory=dict)
    """Each optimizer's `group_order`, by id(). Schedulers need it, so they are restored after the optimizers."""


class StateEntry(ABC):
    comes_first = False
    """True if others need what `fit` of this entry sets in the RestoreContext."""
    comes_last = False
    """True if `put` cannot be undone. It does not raise after `fit`."""
    can_raise = True
    """True if code of the user's runs in `put`, so that it may raise."""

    def __init__(self, key: str, value: Any, saved: SavedEntries) -> None:
        self.key = key
        self.value = value
        self.saved = saved
        self.names = saved.under(key)
        self.loaded: Any = None
        self._undo: Callable[[], None] | None = None

    @abstractmethod
    def wanted(self) -> dict[str, ReadRequest]:
        pass

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        root: dict[str, Any] = {} if self.names else {self.key: {}}
        for name, path in self.names.items():
            set_element(root, (self.key, *path), values[name])
        self.loaded = with_containers(root, around.containers)[self.key]

    def hold(self) -> None:
        """Keep what the value has now, for `undo`."""
        try:
            self._undo = self._way_back()
        except Exception as error:  # what cannot be copied can be restored, but not back
            raised = error

            def undo() -> None:
                raise raised

            self._undo = undo

    @abstractmethod
    def put(self) -> None:
        pass

    def undo(self) -> None:
        """Give the value back what it had at `hold`. The tensors that were filled are filled back already."""
        if self._undo is not None:
            self._undo()

    def _way_back(self) -> Callable[[], None] | None:
        before = copied(self.value.state_dict())
        return lambda: self.value.load_state_dict(before)

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


def copied(value: Any) -> Any:
    """Return a copy of a state that shares nothing with it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, copied(inner)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(copied(inner) for inner in value)
    return copy.deepcopy(value)


def entry_for(key: str, value: Any, state: Mapping[str, Any], saved: SavedEntries, rank: int) -> StateEntry:
    if isinstance(value, Loader):
        return _LoaderEntry(key, value, saved, rank)
    if isinstance(value, torch.optim.Optimizer) and is_numbered(value.state_dict()):
        return _OptimizerEntry(key, value, saved, parameter_names(value, state, key))
    if isinstance(value, nn.Module):
        return _ModuleEntry(key, unwrapped(value), saved)
    if hasattr(value, "load_state_dict"):
        return _StatefulEntry(key, value, saved)
    if isinstance(value, torch.Tensor):
        return _TensorEntry(key, value, saved)
    return _PlainEntry(key, value, saved, state)


class _LoaderEntry(StateEntry):
    comes_last = True
    can_raise = False

    def __init__(self, key: str, value: Loader, saved: SavedEntries, rank: int) -> None:
        super().__init__(key, value, saved)
        under = {str(path[0]): name for name, path in self.names.items()}
        self._name = under[names_for(value, rank, set(under), key)]

    def wanted(self) -> dict[str, ReadRequest]:
        return {self._name: ReadRequest(None, True)}

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        self.loaded = loader_state(self.value, values[self._name])

    def put(self) -> None:
        self.value.load_state_dict(self.loaded)

    def _way_back(self) -> None:
        return None


class _OptimizerEntry(StateEntry):
    comes_first = True

    def __init__(self, key: str, value: torch.optim.Optimizer, saved: SavedEntries, names: list[str]) -> None:
        super().__init__(key, value, saved)
        self._parameters = names
        kinds = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
        hooks = [hook for kind in kinds for hook in getattr(value, kind, {}).values()]  # a wrapper may have none
        own = not loads_by(value, torch.optim.Optimizer.load_state_dict) or len(with_wrapped(value)) > 1
        self.can_raise = own or not all(_is_of("torch.", function) for function in (type(value).__setstate__, *hooks))

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
        for optimizer in with_wrapped(self.value):
            around.orders[id(optimizer)] = order
        self.loaded = numbered_state(self.loaded, self._parameters, order, lengths)
        self._shared = around.shared.get(self.key, [])
        if not self.can_raise:
            # torch's code raises for the state of another class, and leaves the optimizer that it loads as it is
            self._copy = object.__new__(type(self.value))
            vars(self._copy).update(vars(self.value))
            load_optimizer(self._copy, self.loaded, self._parameters, self._shared)

    def put(self) -> None:
        if self.can_raise:
            load_optimizer(self.value, self.loaded, self._parameters, self._shared)
        else:
            vars(self.value).update(vars(self._copy))

    def _way_back(self) -> Callable[[], None] | None:
        optimizers = with_wrapped(self.value)
        # torch's own `load_state_dict` leaves the present tensors as they are
        states = [one.state for one in optimizers] if self.can_raise else []
        tensors = [tensor for state in states for tensor in _tensors(list(state.values()))]
        undo = [*(_attributes(one, []) for one in optimizers), _attributes(None, tensors)]

        def undo_all() -> None:
            for each in undo:
                each()

        return undo_all


class _ModuleEntry(StateEntry):
    def __init__(self, key: str, value: nn.Module, saved: SavedEntries) -> None:
        super().__init__(key, value, saved)
        self.names = {name: path for name, path in self.names.items() if path}  # no path: the saved one had no values
        self._state = module_state(value)
        self._fills = not _adapts(value) or not (self._other_names() or any(self._other_shapes()))
        """True if the module's tensors are filled in place. Else its own code may rename or resize what was saved."""
        self.can_raise = not self._fills or not all(_is_of("torch.", one) for one in _loading(value))

    def _other_names(self) -> str:
        saved = {str(path[0]) for path in self.names.values()}
        missing, unexpected = sorted(set(self._state) - saved), sorted(saved - set(self._state))
        parts = [f"the checkpoint lacks {some(self._full(missing))}"] if missing else []
        if unexpected:
            parts.append(f"the checkpoint has {some(self._full(unexpected))}, which the module does not have")
        return "; ".join(parts)

    def _full(self, names: list[str]) -> list[str]:
        return [f"{self.key}.{name}" for name in names]

    def _other_shapes(self) -> Iterator[str]:
        for name, path in self.names.items():
            tensor = self._tensor(path)
            if tensor is not None and (why := self.saved.misfit(name, tensor)):
                yield why

    def _tensor(self, path: KeyPath) -> torch.Tensor | None:
        """Return the module's tensor for a saved value, if it can be filled, or is on the meta device."""
        current = self._state.get(str(path[0]))
        extra = str(path[0]).rpartition(".")[2] == EXTRA
        filled = isinstance(current, torch.Tensor) and not extra and (_is_whole(current) or current.is_meta)
        return current if filled else None

    def wanted(self) -> dict[str, ReadRequest]:
        tensors = {name: self._tensor(path) for name, path in self.names.items()}
        if not self._fills:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    self.saved.filled(name, tensor)  # raises
            return {name: self.saved.empty(name, self._state.get(str(path[0]))) for name, path in self.names.items()}
        if why := self._other_names():
            raise self.misfit(f"{why}. Build the module as it was at the save")
        return {
            name: self.saved.empty(name, self._state[str(path[0])])
            if (tensor := tensors[name]) is None
            else self.saved.filled(name, tensor)
            for name, path in self.names.items()
        }

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        super().fit(values, around)
        self._versions = around.versions.get(self.key)
        tensors = {name: self._tensor(path) for name, path in self.names.items()}
        copied = (tensor for name, tensor in tensors.items() if tensor is not None and values[name] is not tensor)
        fixed = (tensor for tensor in tensors.values() if tensor is not None and tensor.is_inference())
        if any(True for _ in (*copied, *fixed)):
            self.can_raise = True  # of another class, which the module copies itself, or one that it cannot change

    def put(self) -> None:
        current = self.value.state_dict()
        names = {clean: raw for raw, clean in clean_keys(self.value, list(current)).items()}
        state = OrderedDict((names.get(name, name), value) for name, value in self.loaded.items())
        versions = getattr(current, "_metadata", None)
        if versions is not None and self._versions is not None:
            clean = clean_names(self.value, list(versions))
            versions = {raw: self._versions[name] for raw, name in clean.items() if name in self._versions}
            versions = {**self._versions, **versions}
        if versions is not None:
            state._metadata = versions  # type: ignore[attr-defined]
        self.value.load_state_dict(state)

    def _way_back(self) -> Callable[[], None]:
        filled = [self._tensor(path) for path in self.names.values()] if self._fills else []
        known = {_memory(tensor) for tensor in filled if tensor is not None}  # the restore fills them back
        own = [*self.value.parameters(), *self.value.buffers()]
        tensors = [one for one in own if not is_lazy(one) and _memory(one) not in known]
        undo = [_attributes(module, []) for module in self.value.modules()] + [_attributes(None, tensors)]
        extra = [
            (one, copied(one.get_extra_state()))
            for one in self.value.modules()
            if type(one).set_extra_state is not nn.Module.set_extra_state
        ]

        def undo_all() -> None:
            for each in undo:
                each()
            for module, value in extra:
                module.set_extra_state(value)
            for each in undo if extra else ():  # what the module's own code has replaced or counted
                each()

        return undo_all


def _attributes(value: Any, tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Return the way back to an object's present attributes, to what dicts and lists in them hold, and to the values of
    tensors."""
    attributes = {} if value is None else dict(vars(value))
    held = [pair for each in attributes.values() if type(each) in BUILTIN for pair in _containers(each)]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def undo() -> None:
        _refill(held)
        if value is not None:
            vars(value).clear()
            vars(value).update(attributes)
        for tensor, before in values:
            _fill(tensor, before)

    return undo


def _refill(held: list[tuple[Any, Any]]) -> None:
    for container, content in held:
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


@torch.no_grad()
def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if tensor.shape != values.shape:  # it was resized meanwhile
        tensor.set_(values)  # type: ignore[call-overload]
    else:
        tensor.copy_(values)


def _memory(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def _adapts(module: nn.Module) -> bool:
    """True if code besides that of torch.nn may rename or resize what is loaded, such as a hook, or an observer's."""
    return not all(_is_of("torch.nn.", function) for function in _loading(module))


def _loading(module: nn.Module) -> Iterator[Any]:
    """Yield the functions that load a state into a module."""
    yield module.load_state_dict
    for one in module.modules():
        yield one._load_from_state_dict
        yield type(one).set_extra_state
        yield from one._load_state_dict_pre_hooks.values()
        yield from one._load_state_dict_post_hooks.values()


def _is_of(package: str, function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(package)


class _StatefulEntry(StateEntry):
    def __init__(self, key: str, value: Any, saved: SavedEntries) -> None:
        super().__init__(key, value, saved)
        self.can_raise = not loads_by(value, torch.optim.lr_scheduler.LRScheduler.load_state_dict)

    def wanted(self) -> dict[str, ReadRequest]:
        current, _ = flattened({self.key: self.value.state_dict()})
        return {name: self.saved.empty(name, current.get(name)) for name in self.names}

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        super().fit(values, around)
        self.can_raise = self.can_raise or not isinstance(self.loaded, dict)  # it was no scheduler's
        if not isinstance(self.value, torch.optim.Optimizer):
            warn_of_numbers(self.key, self.loaded)
        optimizer = getattr(self.value, "optimizer", None) or getattr(self.value, "_optimizer", None)
        if optimizer is not None and id(optimizer) in around.orders:
            try:
                self.loaded = regrouped(self.loaded, around.orders[id(optimizer)])
            except CheckpointError as error:
                raise self.misfit(error.message) from None

    def put(self) -> None:
        self.value.load_state_dict(self.loaded)


class _TensorEntry(StateEntry):
    """A tensor at the top, which can only be filled."""

    can_raise = False

    def wanted(self) -> dict[str, ReadRequest]:
        if self.names != {self.key: ()}:
            raise self.misfit("it was saved as a dict or list, but is a tensor in the state to restore")
        if _is_whole(self.value) or self.value.is_meta:
            return {self.key: self.saved.filled(self.key, self.value)}
        return {self.key: self.saved.empty(self.key, self.value)}

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        super().fit(values, around)
        self.can_raise = self.loaded is not self.value  # a tensor of another class, which copies as it likes

    def put(self) -> None:
        if self.can_raise:
            with torch.no_grad():
                self.value.copy_(self.loaded)

    def _way_back(self) -> Callable[[], None] | None:
        if not self.can_raise:
            return None
        before = self.value.detach().clone()
        return lambda: _fill(self.value, before)


class _PlainEntry(StateEntry):
    """Dicts and lists become what was saved. Their tensors are filled where they fit, and replaced elsewhere."""

    def __init__(self, key: str, value: Any, saved: SavedEntries, state: Mapping[str, Any]) -> None:
        super().__init__(key, value, saved)
        self._state = state
        containers = (state, *(container for container, _ in _containers(value)))
        self.can_raise = any(type(container) not in BUILTIN for container in containers)

    def wanted(self) -> dict[str, ReadRequest]:
        current = flattened({self.key: self.value})[0] if isinstance(self.value, MutableMapping | list) else {}
        return {name: self._request(name, current.get(name)) for name in self.names}

    def _request(self, name: str, current: Any) -> ReadRequest:
        if isinstance(current, torch.Tensor) and (current.is_meta or _is_whole(current)):
            fits = current.is_meta or not self.saved.misfit(name, current)
            return self.saved.filled(name, current) if fits else self.saved.empty(name)
        return self.saved.empty(name, current)

    def fit(self, values: dict[str, Any], around: RestoreContext) -> None:
        super().fit(values, around)
        self._done = around.done
        warn_of_numbers(self.key, self.loaded)
        if not _fits(self.value, self.loaded) and not isinstance(self._state, MutableMapping):
            raise self.misfit(f"the state to restore must be a dict to take it, got {type(self._state).__name__}")

    def put(self) -> None:
        made = become(self.value, self.loaded, self._done)
        if made is not self.value:
            self._state[self.key] = made  # type: ignore[index]

    def _way_back(self) -> Callable[[], None]:
        held = list(_containers(self.value))

        def undo() -> None:
            _refill(held)
            if isinstance(self._state, MutableMapping):
                self._state[self.key] = self.value

        return undo


BUILTIN = (dict, list, OrderedDict, defaultdict, Counter)


def _fits(target: Any, saved: Any) -> bool:
    if isinstance(target, list):
        return isinstance(saved, list)
    return isinstance(target, MutableMapping) and type(saved) in (dict, type(target))


def become(target: Any, saved: Any, done: set[int]) -> Any:
    """Make a dict or list what was saved, with those in it, and return it. Return `saved` in place of any other value,
    and of one that is in `done` (by id()), because it stands at two places."""
    if not _fits(target, saved) or id(target) in done:
        return saved
    done.add(id(target))
    if isinstance(target, list):
        target[:] = [become(one, new, done) for one, new in zip(target, saved, strict=False)] + saved[len(target) :]
        return target
    made = {key: become(target[key], new, done) if key in target else new for key, new in saved.items()}
    target.clear()
    target.update(made)
    return target


def _containers(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each dict and list within a value, with a copy of what it holds."""
    if isinstance(value, MutableMapping | list):
        yield value, (list(value) if isinstance(value, list) else dict(value))
        for inner in value if isinstance(value, list) else value.values():
            yield from _containers(inner)
