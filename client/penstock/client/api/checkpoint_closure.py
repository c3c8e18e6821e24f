"""Decorator for functions that run on checkpoint steps only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from penstock.client.api.data_loader import iterating

__all__ = ["checkpoint_closure"]

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint_closure(function: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that calls `function` if the loop around the call is at a checkpoint step, and otherwise
    returns None.

    Example::

        @checkpoint_closure
        def save() -> None:
            torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)

        for batch in DataExecutor(loader, num_steps=1000, checkpoint_steps=100):
            ...
            save()

    Raises:
        RuntimeError: the function is called while no DataExecutor is iterating.
        AmbiguousContextError: it is called in a thread without a loop, while loops run in several other threads.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        executor = iterating()
        if executor is None:
            raise RuntimeError(
                f"{getattr(function, '__qualname__', function)} is a checkpoint_closure, and no DataExecutor is "
                "iterating: call the function inside the loop over a DataExecutor"
            )
        return function(*args, **kwargs) if executor.on_checkpoint_step else None

    return run
