"""What is open around the code that runs: the appliance of a `with`, the executor whose loop it is in.

Each thread and each asyncio task sees the things that it entered itself, the innermost first (a context variable). Code
that entered none, a helper thread say, sees the only one that is open elsewhere. Where several are, nobody can know
which one is meant, and to take any would be to stream another box's data without a word: AmbiguousContextError.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from penstock.proto.errors import AmbiguousContextError

__all__ = ["ApplianceScope"]

T = TypeVar("T")


class ApplianceScope(Generic[T]):
    """Things of one kind that are entered and left; one that is entered twice is left twice.

    Args:
        name: of the context variable.
        ambiguous: the error's text, with "{count}" for how many are open.
        usable: False for a thing that is to be passed over.
    """

    def __init__(self, name: str, ambiguous: str, usable: Callable[[T], bool] = lambda thing: True) -> None:
        self._stack: ContextVar[tuple[weakref.ref[Any], ...]] = ContextVar(name, default=())
        self._open: list[T] = []
        self._ambiguous = ambiguous
        self._usable = usable

    def enter(self, thing: T) -> None:
        self._open.append(thing)
        self._stack.set((*self._stack.get(), weakref.ref(thing)))

    def leave(self, thing: T) -> None:
        """May run in another context than `enter` did: that one passes over what is not open any more."""
        if thing in self._open:
            self._open.remove(thing)
        stack = list(self._stack.get())
        for place in reversed(range(len(stack))):
            if stack[place]() is thing:
                del stack[place]
                break
        self._stack.set(tuple(ref for ref in stack if ref() in self._open))

    def innermost(self) -> T | None:
        """The one that is meant here; None if none is open anywhere. Raises AmbiguousContextError."""
        usable = [thing for thing in self._open if self._usable(thing)]
        for ref in reversed(self._stack.get()):
            thing = ref()
            if thing in usable:
                return thing  # type: ignore[no-any-return]
        others = list({id(thing): thing for thing in usable}.values())
        if len(others) > 1:
            raise AmbiguousContextError(self._ambiguous.format(count=len(others)))
        return others[0] if others else None
