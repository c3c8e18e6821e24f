"""Packages whose public names are imported when first used, because torch takes 2 s to import, and some programs that
need a part of such a package do without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    contents: dict[str, Any], by_module: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`. `contents`: its globals(); `by_module`: module -> its public
    names; a module whose name begins with a dot is in the package."""
    package: str = contents["__name__"]
    modules = {name: module for module, names in by_module.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = contents[name] = getattr(import_module(modules[name], package), name)
        return value

    return get, lambda: sorted({*contents, *modules})
