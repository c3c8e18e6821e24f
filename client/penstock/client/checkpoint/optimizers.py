"""An optimizer's state by the names of its parameters, and that of its schedulers by the parameters of their groups.

torch's `load_state_dict` gives the first state that was saved to the first parameter that there is, and so on. Where
parameters come in another order than at the save that is the momentum of another parameter, of which nobody is told as
long as the shapes agree. Here the state is put into the optimizer's own order first: states by name, groups by the set
of their parameters. A scheduler has lists with a value for each group, so these are put into that order too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock.proto.errors import CheckpointError

__all__ = ["group_order", "named_state", "numbered_state", "regrouped", "some"]

PER_GROUP = {"_last_lr", "base_lrs", "base_momentums", "lr_lambdas", "max_lrs", "max_momentums", "min_lrs"}
"""Names, in schedulers, of lists with a value for each group."""
OTHER_LISTS = {"_milestones", "milestones", "_schedulers"}
"""Names, in schedulers, of lists that have nothing to do with groups."""


def named_state(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
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


def numbered_state(loaded: dict[str, Any], names: list[str], order: list[int], lengths: list[int]) -> dict[str, Any]:
    """A state_dict for an optimizer, in its own order.

    Args:
        loaded: what `named_state` made.
        names: of the optimizer's parameters, in its order.
        order: see `group_order`.
        lengths: how many parameters each of its groups has.
    """
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
    """For each group of an optimizer, which of the saved groups has its parameters.

    Raises CheckpointError, naming parameters, where the saved groups have others.
    """
    saved = [frozenset(group["params"]) for group in loaded["param_groups"]]
    _check_names({name for group in saved for name in group} | {*map(str, loaded.get("state", {}))}, set(names))
    order, begin, taken = [], 0, set[int]()
    for number, length in enumerate(lengths):
        own = frozenset(names[begin : begin + length])
        begin += length
        place = next((place for place, group in enumerate(saved) if group == own and place not in taken), None)
        if place is None:
            raise CheckpointError(
                f"its group {number} has the parameters {some(sorted(own))}, and no group was saved with these: the "
                f"groups that were saved begin with {some([min(group, default='nothing') for group in saved])}"
            )
        taken.add(place)
        order.append(place)
    if len(order) != len(saved):
        raise CheckpointError(f"{len(saved)} groups were saved, and the optimizer has {len(order)}")
    return order


def _check_names(saved: set[str], own: set[str]) -> None:
    if strange := sorted(saved - own):
        raise CheckpointError(
            f"it holds states of the parameters {some(strange)}, which the optimizer does not have: it has "
            f"{some(sorted(own - saved) or sorted(own))}. Parameters go by their module's names if the module is saved "
            "and restored with the optimizer, and else by their numbers"
        )
    if added := sorted(own - saved):
        raise CheckpointError(
            f"it holds nothing of the parameters {some(added)}, which the optimizer has: add them after the restore "
            "(Optimizer.add_param_group)"
        )


def regrouped(loaded: Any, order: list[int]) -> Any:
    """A scheduler's state with a value for each group in the optimizer's order. order: see `group_order`.

    Raises CheckpointError for a list that may be by group, or may not.
    """
    if order == sorted(order):
        return loaded
    if isinstance(loaded, Mapping):
        return {key: _regrouped(str(key), value, order) for key, value in loaded.items()}
    if isinstance(loaded, list):
        return [regrouped(value, order) for value in loaded]
    return loaded


def _regrouped(key: str, value: Any, order: list[int]) -> Any:
    if not isinstance(value, list) or len(value) != len(order) or key in OTHER_LISTS:
        return regrouped(value, order)
    if key in PER_GROUP or all(isinstance(one, int | float) and one == value[0] for one in value):
        return [value[place] for place in order]
    raise CheckpointError(
        f"the optimizer's groups come in another order than at the save, and {key!r} of its scheduler has a value for "
        "each of them, or so it seems: make the groups in the order that they were saved in"
    )


def some(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
