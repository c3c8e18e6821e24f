"""Tests that are coroutines, each in an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["Test", "as_test", "in_loop"]

Test = Callable[..., Coroutine[Any, Any, None]]
DEADLINE_S = 60.0


def as_test(run: Callable[[Test], object], *given: str) -> Callable[[Test], Callable[..., None]]:
    """Make a test of a coroutine function. `run` calls it with what is `given`, of which the test gets what it names;
    its other arguments are fixtures."""

    def decorate(test: Test) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def made(**fixtures: Any) -> None:
            async def call(*values: Any) -> None:
                named = zip(given, values, strict=True)
                await test(**fixtures, **{name: value for name, value in named if name in signature.parameters})

            run(call)

        fixtures = [each for name, each in signature.parameters.items() if name not in given]
        made.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return made

    return decorate


in_loop = as_test(lambda test: asyncio.run(asyncio.wait_for(test(), DEADLINE_S)))
