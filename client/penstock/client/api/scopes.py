"""Scopes of running code: within which `with` over an Appliance, or loop over a DataExecutor, a call happens."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from penstock.proto.errors import AmbiguousContextError

T = TypeVar("T")


class EnteredScope(Generic[T]):
    """Stack of the objects of one kind whose `with` or loop is running; entered twice, an object must be left twice.

    Each thread and asyncio task finds the object that it entered last; one that entered none, such as a helper thread,
    the only object that is open elsewhere. If several are, AmbiguousContextError (text `ambiguous`) is raised, because
    a wrong choice would silently stream another box's data. `usable`: False for an object to ignore, such as a closed
    appliance."""

    def __init__(self, name: str, ambiguous: str, usable: Callable[[T], bool] = lambda thing: True) -> None:
        self._stack: ContextVar[tuple[weakref.ref[Any], ...]] = ContextVar(name, default=())
        self._open: list[T] = []
        self._ambiguous = ambiguous
        self._usable = usable

    def enter(self, thing: T) -> None:
        self._open.append(thing)
        self._stack.set((*self._stack.get(), weakref.ref(thing)))

    def leave(self, thing: T) -> None:
        """Remove an object. If another thread or task entered it, it stays there, and `innermost` ignores it."""
        if thing in self._open:
            self._open.remove(thing)
        stack = list(self._stack.get())
        for index in reversed(range(len(stack))):
            if stack[index]() is thing:
                del stack[index]
                break
        self._stack.set(tuple(ref for ref in stack if ref() in self._open))

    def innermost(self) -> T | None:
        usable = [thing for thing in self._open if self._usable(thing)]
        for ref in reversed(self._stack.get()):
            thing = ref()
            if thing in usable:
                return thing  # type: ignore[no-any-return]
        others = list(dict.fromkeys(usable))
        if len(others) > 1:
            raise AmbiguousContextError(self._ambiguous.format(count=len(others)))
        return others[0] if others else None
