"""Starts programs of ours that must not import torch: by their path, for `-m` would import penstock.client with it.

They find Penstock, and what else they need, where this process has it from, by whatever means; behind everything else,
so that nothing there hides a module of Python's own. With -P, so that neither the program's folder nor the working
directory is on sys.path, where a json.py would do the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import penstock.proto

__all__ = ["by_path"]

_START = (
    "import os, runpy, sys; program, places = sys.argv[1:3]; sys.path += places.split(os.pathsep); "
    "sys.argv[:3] = [program]; runpy.run_path(program, run_name='__main__')"
)


def by_path(program: Path, *needed: ModuleType) -> list[str]:
    """The command that runs it, to be followed by its arguments. `needed`: packages that it imports besides ours."""
    places = [Path(path).parent for path in penstock.__path__]
    places += [Path(str(package.__file__)).parents[1] for package in needed]
    return [sys.executable, "-P", "-c", _START, str(program), os.pathsep.join(map(str, places))]
