"""Module prefixes from which a worker may run an input_fn, as its operator listed them.

The worker enforces the list. The coordinator checks it too, so that it does not assign a slot to a worker that must
refuse the slot.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["module_of", "under"]


def module_of(input_fn: str) -> str:
    """Return the module of "module:qualname"."""
    return input_fn.partition(":")[0]


def under(module: str, prefixes: Iterable[str]) -> bool:
    """Return whether the module is one of the prefixes or below one; "*" is every module."""
    return any(prefix == "*" or module == prefix or module.startswith(prefix + ".") for prefix in prefixes)
