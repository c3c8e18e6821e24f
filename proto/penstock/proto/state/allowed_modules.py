"""Which input_fn a worker may run: its operator lists prefixes of modules.

The worker enforces it. The coordinator asks too, so that it does not give a slot to a worker that must refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["module_of", "under"]


def module_of(input_fn: str) -> str:
    """The module of "module:qualname"."""
    return input_fn.partition(":")[0]


def under(module: str, prefixes: Iterable[str]) -> bool:
    """Whether the module is one of the prefixes or lies below one; "*" is every module."""
    return any(prefix == "*" or module == prefix or module.startswith(prefix + ".") for prefix in prefixes)
