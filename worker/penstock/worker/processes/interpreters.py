"""Interpreters that run user code: start, environment and search path.

The working directory comes last in the path, because a torch.py there would otherwise replace torch, and not at all if
other users can write there: their modules would run as this user. All have one hash seed, so that the order of sets is
the same in all runs, and one fork server serves all: Python reads PYTHONHASHSEED only at a start, which takes over a
second with torch. This module imports little, because embedded mode starts the fork server before it imports the
daemon.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from penstock.runtime.files.plain_files import is_ours
from penstock.runtime.process.spawn import TORCHRUN, Spawned, environment, spawn

HASH_SEED = "0"
"""PYTHONHASHSEED of processes that run user code; 0 is the usual choice."""


def child_environment() -> dict[str, str]:
    """Return runners' environment: without torchrun's variables, Penstock's own, which hold tokens, and CUDA devices;
    one thread per numeric library."""
    return environment("PENSTOCK_*", *TORCHRUN) | {
        "PYTHONHASHSEED": HASH_SEED,
        "CUDA_VISIBLE_DEVICES": "",
        "PENSTOCK_RUNNER": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


@dataclass(frozen=True)
class StartedForkServer:
    process: Spawned
    control: socket.socket


def start_fork_server(*, sandboxed: bool = True, user: str = "") -> StartedForkServer:
    """Start a fork server without waiting. sandboxed: of its children. user: theirs, encoded; "" = this process's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given = {"sandboxed": sandboxed, f"user={user}": bool(user)}
    what = (str(theirs.fileno()), str(os.getpid()), *(name for name, holds in given.items() if holds))
    command = interpreter("penstock.worker.runner.fork_server", *what)
    try:
        process = spawn(command, fds=[theirs], env=child_environment(), session=False, outlives=True)
    except BaseException:
        ours.close()
        raise
    return StartedForkServer(process, ours)


def interpreter(module: str, *arguments: str) -> list[str]:
    """Return the command that calls `main` of a Penstock module; not by -m, which imports it twice, once as
    __main__."""
    start = f"from {__name__} import add_working_directory; add_working_directory(); from {module} import main; main()"
    return [sys.executable, "-P", "-c", start, *arguments]


def add_working_directory() -> None:
    """Append the working directory to the search path, unless other users can write to it."""
    if not why_not_searched():
        sys.path.append(os.getcwd())


def why_not_searched() -> str:
    try:
        folder = os.getcwd()
        if is_ours(os.stat(folder)):
            return ""
    except OSError as error:
        return f"the working directory cannot be read: {error.strerror}"
    return f"modules in the working directory {folder} cannot be imported, because other users can write to it"


def working_directory() -> str:
    return why_not_searched() or os.getcwd()
