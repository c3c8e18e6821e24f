"""State of an optimizer by the names of its parameters, and of a scheduler by the parameters of its groups.

torch's `load_state_dict` goes by order: with another order than at the save, a parameter silently gets another's
momentum. Here the state is first put into the optimizer's own order, as are a scheduler's lists; if it depends on the
order in another way, the restore raises an error. `load_state_dict` also converts every value to the parameter's dtype
(float32 momentum of bfloat16 parameters is rounded), and splits tensors that parameters share, which a checkpoint
records (`shared`). `load_optimizer` corrects both. An optimizer whose state_dict has another shape than torch's
(`is_numbered`) is restored as it is, like any object with a `load_state_dict`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from penstock.client.checkpoint.values.plain_values import LEAVES
from penstock.proto.errors import CheckpointError, InvalidArgumentError
from penstock.proto.tracebacks import warn_user

Path = tuple[Any, ...]
"""Keys and indexes to a value in the optimizer's state, first the parameter's name or number."""

PER_GROUP = {"_last_lr", "base_lrs", "base_momentums", "lr_lambdas", "max_lrs", "max_momentums", "min_lrs"}
"""A scheduler's lists that have one value for each parameter group."""
OTHER_LISTS = {"_milestones", "_schedule_phases", "milestones", "_schedulers"}
"""A scheduler's lists that do not depend on the parameter groups."""


def is_numbered(plain: Mapping[str, Any]) -> bool:
    """True for a state_dict of torch's shape, with state by the numbers in param_groups."""
    groups = plain.get("param_groups")
    return (
        isinstance(plain.get("state"), Mapping) and isinstance(groups, list) and all("params" in one for one in groups)
    )


def named_state(plain: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an optimizer's state_dict with names for parameters' numbers. Other entries' keys must not be names."""
    if twice := sorted(set(names) & {key for key in plain["state"] if isinstance(key, str)}):
        raise InvalidArgumentError(
            f"the optimizer's state has the key {twice[0]!r}, which is also a parameter's name: rename the parameter"
        )
    return {
        **plain,
        "state": {
            names[number] if isinstance(number, int) else number: value for number, value in plain["state"].items()
        },
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in plain["param_groups"]
        ],
    }


def numbered_state(loaded: dict[str, Any], names: list[str], order: list[int], lengths: list[int]) -> dict[str, Any]:
    """Return a result of `named_state` as a state_dict that the optimizer's load_state_dict accepts, in its own order
    (`group_order`). `lengths`: number of parameters in each group."""
    numbers = {name: number for number, name in enumerate(names)}
    groups, begin = [], 0
    for saved, length in zip(order, lengths, strict=True):
        group = {key: value for key, value in loaded["param_groups"][saved].items() if key != "param_names"}
        groups.append({**group, "params": list(range(begin, begin + length))})
        begin += length
    return {
        **loaded,
        "state": {numbers.get(name, name): value for name, value in loaded.get("state", {}).items()},
        "param_groups": groups,
    }


def group_order(loaded: dict[str, Any], names: list[str], lengths: list[int]) -> list[int]:
    """Return for each parameter group the index of the saved one with the same parameters. Raises CheckpointError."""
    saved = [frozenset(group["params"]) for group in loaded["param_groups"]]
    _check_names({name for group in saved for name in group}, set(names))
    order, begin, taken = [], 0, set[int]()
    for number, length in enumerate(lengths):
        own = frozenset(names[begin : begin + length])
        begin += length
        index = next((index for index, group in enumerate(saved) if group == own and index not in taken), None)
        if index is None:
            raise CheckpointError(
                f"param_groups[{number}] has the parameters {some(sorted(own))}, but no saved group has exactly these"
            )
        taken.add(index)
        order.append(index)
    if len(order) != len(saved):
        raise CheckpointError(f"the optimizer must have {len(saved)} param_groups, as at the save, got {len(order)}")
    return order


def _check_names(saved: set[str], own: set[str]) -> None:
    if strange := sorted(saved - own):
        raise CheckpointError(
            f"the checkpoint has optimizer state for the parameters {some(strange)}, but the optimizer has "
            f"{some(sorted(own - saved) or sorted(own))}: save and restore the module with its optimizer"
        )
    if added := sorted(own - saved):
        raise CheckpointError(
            f"the checkpoint has no optimizer state for the parameters {some(added)}: add them after the restore"
        )


def warn_of_numbers(key: str, value: Any) -> None:
    """Warn of a nested optimizer's state_dict: its numbers need the same order of parameters at the restore."""
    for path in _numbered(value, (key,)):
        warn_user(
            f"{'.'.join(map(str, path))!r} of the state is an optimizer's state_dict, which knows parameters by their "
            "order only: put the optimizer itself into the state, at the top",
        )


def _numbered(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, Mapping):
        groups = value.get("param_groups")
        if value.get("state") and isinstance(groups, list) and all(isinstance(one, Mapping) for one in groups):
            parameters = [one for group in groups for one in group.get("params", ())]
            if len(parameters) > 1 and all(isinstance(one, int) for one in parameters):
                yield path
                return
        for key, inner in value.items():
            if type(inner) not in LEAVES:
                yield from _numbered(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            if type(inner) not in LEAVES:
                yield from _numbered(inner, (*path, number))


def check_order(loaded: dict[str, Any], optimizer: torch.optim.Optimizer, names: list[str], order: list[int]) -> None:
    """Raise CheckpointError if the order of parameters differs, and the state depends on it: tensors of all parameters
    in a row, as L-BFGS has, or settings with a value for each."""
    before = [name for group in loaded["param_groups"] for name in group["params"]]
    if before == names:
        return
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    sizes = dict(zip(names, (one.numel() for one in parameters), strict=True))
    begin = 0
    for index, group in zip(order, optimizer.param_groups, strict=True):
        own = names[begin : begin + len(group["params"])]
        begin += len(own)
        saved = loaded["param_groups"][index]
        together = {sum(sizes[name] for name in own), sum(sizes.values())}
        for name in own:
            for path, tensor in _tensors(loaded.get("state", {}).get(name), (name,)):
                if tensor.dim() == 1 and tensor.numel() in together and tensor.numel() > sizes[name]:
                    raise _order_matters(f"{path[1]!r} of {name!r} has values for all parameters in that order", before)
        if saved["params"] != own:
            _check_settings(saved, group, own, before)


def _check_settings(saved: dict[str, Any], group: dict[str, Any], own: list[str], before: list[str]) -> None:
    for key, value in saved.items():
        if key in ("params", "param_names") or not isinstance(value, list) or len(value) != len(own):
            continue
        by_name = dict(zip(saved["params"], value, strict=True))
        if group.get(key) in (value, tuple(value)):
            continue  # a setting like betas, whose length only happens to be the number of parameters
        if [by_name[name] for name in own] != value:
            raise _order_matters(f"{key!r} of the group with {some(own)} has one value per parameter", before)


def _order_matters(what: str, before: list[str]) -> CheckpointError:
    return CheckpointError(
        f"the optimizer's parameters are in another order than at the save, and {what}: take the saved order, "
        f"{some(before)}"
    )


def shared(named: Mapping[str, Any]) -> list[list[Path]]:
    """Return the paths of each tensor that has several in a result of `named_state`."""
    paths_to: dict[int, list[Path]] = {}
    for path, tensor in _tensors(named["state"], ()):
        paths_to.setdefault(id(tensor), []).append(path)
    return [paths for paths in paths_to.values() if len(paths) > 1]


def with_wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those in its attributes, which it wraps, the innermost last."""
    optimizers = [optimizer]
    for one in optimizers:
        inner = [value for value in vars(one).values() if isinstance(value, torch.optim.Optimizer)]
        optimizers += [value for value in inner if all(value is not other for other in optimizers)]
    return optimizers


def loads_by(value: Any, function: Any) -> bool:
    """True if `load_state_dict` is this function. It may be an attribute of the object, which its class lacks."""
    return getattr(value.load_state_dict, "__func__", None) is function


def load_optimizer(
    optimizer: torch.optim.Optimizer, numbered: dict[str, Any], names: list[str], alike: list[list[Path]]
) -> None:
    """Load a result of `numbered_state`, and correct what `load_state_dict` has changed. A class with its own
    `load_state_dict` may convert dtypes on purpose, so its dtypes are not corrected. `alike`: `shared` of all ranks.
    What an optimizer keeps at another place than in its state_dict is left as it was loaded."""
    optimizer.load_state_dict(numbered)
    inner = with_wrapped(optimizer)[-1]
    parameters = [one for group in inner.param_groups for one in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[Any, Any] = {key: value for key, value in inner.state.items() if isinstance(key, str)}
    state |= {number: inner.state[one] for number, one in enumerate(parameters) if one in inner.state}
    if loads_by(inner, torch.optim.Optimizer.load_state_dict):
        for path, saved in _tensors(numbered["state"], ()):
            current = _at(state, path)
            if isinstance(current, torch.Tensor) and current.dtype != saved.dtype and path[1:] != ("step",):
                _put(state, path, saved.to(current.device))
    for paths in alike:
        there = [(numbers.get(path[0], path[0]), *path[1:]) for path in paths]
        there = [path for path in there if isinstance(_at(state, path), torch.Tensor)]
        for path in there[1:]:
            _put(state, path, _at(state, there[0]))


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _tensors(inner, (*path, number))


def _at(value: Any, path: Path) -> Any:
    """Return the value at a path; None if there is none."""
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _put(value: Any, path: Path, new: Any) -> None:
    """Set the value at a path. A tuple on the path is replaced by a new one."""
    inner = _at(value, path[:-1])
    if isinstance(inner, tuple):
        _put(value, path[:-1], type(inner)((*inner[: path[-1]], new, *inner[path[-1] + 1 :])))
    else:
        inner[path[-1]] = new


def regrouped(loaded: Any, order: list[int]) -> Any:
    """Reorder a scheduler's lists of one value for each group. Raises CheckpointError for an unknown one."""
    if order == sorted(order):
        return loaded
    if isinstance(loaded, MutableMapping):
        again = copy.copy(loaded)  # a copy of the same kind: MultiStepLR's milestones are a Counter
        for key, value in loaded.items():
            again[key] = _regrouped(str(key), value, order)
        return again
    if isinstance(loaded, list):
        return [regrouped(value, order) for value in loaded]
    return loaded


def _regrouped(key: str, value: Any, order: list[int]) -> Any:
    if not isinstance(value, list) or len(value) != len(order) or key in OTHER_LISTS:
        return regrouped(value, order)
    if key in PER_GROUP or all(isinstance(one, int | float) and one == value[0] for one in value):
        return [value[index] for index in order]
    raise CheckpointError(
        f"the optimizer's param_groups are in another order than at the save, and {key!r} of its scheduler seems to "
        "have one value per group: make them in the saved order"
    )


def some(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
