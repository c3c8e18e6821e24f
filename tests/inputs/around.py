"""An optimizer around another one."""

from __future__ import annotations

import collections
from typing import Any

import torch


class Around(torch.optim.Optimizer):
    """A wrapper that has its optimizer's parameters, and neither its state nor what `Optimizer` sets, as timm's
    Lookahead."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._base = base
        self.param_groups, self.state = base.param_groups, collections.defaultdict(dict)

    @classmethod
    def of(cls, *arguments: Any, **options: Any) -> Around:
        return cls(torch.optim.SGD(*arguments, **options))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self._base.step(closure)

    def state_dict(self) -> Any:
        return self._base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._base.load_state_dict(state_dict)
        self.param_groups = self._base.param_groups
