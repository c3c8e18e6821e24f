"""Starts the interpreters that run user code, with their environment and their search path.

The working directory comes last. With plain `python -c` it comes first: a torch.py in it would replace torch. Here
Python's own modules and installed packages come first. A working directory that other users can write to is not
searched at all, because another user could add a module there, which would run as this user.

All of them have one hash seed, so that the order of sets is the same in all runs, and one fork server serves all runs
of a worker: PYTHONHASHSEED is read at an interpreter's start only, and that takes more than a second with torch.

This module imports little: embedded mode starts the fork server with it before it imports the daemon.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from penstock.runtime.files.plain_files import is_ours
from penstock.runtime.process.spawn import TORCHRUN, Spawned, environment, spawn

__all__ = [
    "StartedForkServer",
    "add_working_directory",
    "child_environment",
    "interpreter",
    "start_fork_server",
    "why_not_searched",
]

HASH_SEED = "0"
"""PYTHONHASHSEED of all processes that run user code: the value that people set for the order of sets to be fixed."""


def child_environment() -> dict[str, str]:
    """Return the environment of runners: no torchrun variables, no token, no CUDA, one thread, and the hash seed.

    Set iteration order is random too, and only PYTHONHASHSEED, at the interpreter's start, fixes it.
    """
    return environment("PENSTOCK_TOKEN*", *TORCHRUN) | {
        "PYTHONHASHSEED": HASH_SEED,
        "CUDA_VISIBLE_DEVICES": "",
        "PENSTOCK_RUNNER": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


@dataclass(frozen=True)
class StartedForkServer:
    """A fork server that was started, and is not up yet."""

    process: Spawned
    control: socket.socket
    """This process's end of the control socket."""


def start_fork_server(*, sandboxed: bool = True, user: str = "") -> StartedForkServer:
    """Start a fork server; see runner/fork_server.py.

    Args:
        sandboxed: whether its children are sandboxed; see sandbox.py.
        user: encoded user of its children, if not this process's own; see runner_user.py.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    given = {"sandboxed": sandboxed, f"user={user}": bool(user)}
    what = (str(theirs.fileno()), str(os.getpid()), *(name for name, holds in given.items() if holds))
    command = interpreter("penstock.worker.runner.fork_server", *what)
    try:
        process = spawn(command, fds=[theirs], env=child_environment(), session=False)
    except BaseException:
        ours.close()
        raise
    return StartedForkServer(process, ours)


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
