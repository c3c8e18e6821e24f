"""Allowed modules: prefixes of the modules whose functions a worker may run as input_fn (`--allow`). The worker
enforces them; the coordinator checks too, so that it does not assign a slot that would be refused."""

from __future__ import annotations

from collections.abc import Iterable


def module_of(input_fn: str) -> str:
    return input_fn.partition(":")[0]


def under(module: str, prefixes: Iterable[str]) -> bool:
    """True if a module is one of the prefixes, or is below one of them. "*" allows every module."""
    return any(prefix == "*" or module == prefix or module.startswith(prefix + ".") for prefix in prefixes)
