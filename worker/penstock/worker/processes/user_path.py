"""Command and search path of the interpreters that run user code: the working directory is searched last.

With plain `python -c` the working directory comes first: a torch.py in it would replace torch. Here Python's own
modules and installed packages come first. A working directory that other users can write to is not searched at all,
because a module that another user puts there would run as this user.
"""

from __future__ import annotations

import os
import sys

from penstock.runtime.files.plain_files import is_ours

__all__ = ["add_working_directory", "interpreter", "why_not_searched"]


def interpreter(module: str, *arguments: str) -> list[str]:
    """Return the command of a fresh interpreter that calls `main` of a module of Penstock.

    It does not use -m, which would import the module's package twice, once as __main__.
    """
    start = f"from {__name__} import add_working_directory; add_working_directory(); from {module} import main; main()"
    return [sys.executable, "-P", "-c", start, *arguments]


def add_working_directory() -> None:
    """Search the working directory last, unless other users can write to it."""
    if not why_not_searched():
        sys.path.append(os.getcwd())


def why_not_searched() -> str:
    """Return why the working directory is not searched; "" if it is."""
    try:
        folder = os.getcwd()
        if is_ours(os.stat(folder)):
            return ""
    except OSError as error:
        return f"the working directory cannot be read: {error.strerror}"
    return (
        f"the working directory {folder} is not searched, because other users can write to it: start the worker in a "
        "folder of its own, or name the folder in PYTHONPATH"
    )
