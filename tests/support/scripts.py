"""A script of its own, run by a process that warm.py has forked."""

from __future__ import annotations

import os
import runpy
import sys
import warnings

__all__ = ["run"]


def run(folder: str, name: str) -> None:
    """Run a script as `python NAME` would in this folder, with warnings as errors; what it prints is in NAME.log."""
    os.chdir(folder)
    sys.argv[:], sys.path[:0] = [name], [folder]
    warnings.simplefilter("error")
    handle = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(handle, standard)
    os.close(handle)
    runpy.run_path(name, run_name="__main__")
