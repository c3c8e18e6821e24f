"""The training script as other processes find it."""

from __future__ import annotations

import os
import sys
from typing import Final

MAIN_NAMES: Final = ("__main__", "__mp_main__")


def main_module(name: str = "__main__") -> tuple[str, str]:
    """Return the name under which other processes can import the training script, if `python -m` runs it, and else the
    absolute path of its file; both are "" in a notebook, by `python -c` and from standard input."""
    main = sys.modules.get(name)
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in MAIN_NAMES:
        return spec.name, ""
    path = getattr(main, "__file__", None)
    return "", os.path.abspath(path) if path and os.path.isfile(path) else ""
