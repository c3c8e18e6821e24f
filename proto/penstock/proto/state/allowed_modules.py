"""Allowed modules of a worker: prefixes of the modules whose input_fn it may run, listed by its operator.

The worker enforces them. The coordinator checks them too, so that it does not assign a slot to a worker that must
refuse it.
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
