"""Settings of a worker daemon, and the user of its runners."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.tls import Tls
from penstock.runtime.process.free_memory import free_memory
from penstock.worker.processes.runner_user import RunnerUser, find_user, sees_shared_memory

LEAST_SLOT_BYTES = 32 << 20
"""A quarter of it, the largest message of a runner, has room for a batch's structure."""
_log = logging.getLogger("penstock.worker")


@dataclass(frozen=True)
class DaemonSettings:
    coordinator: str
    token: str = field(repr=False)
    slots: int
    allow: Sequence[str] = ()
    """Modules and packages from which an input_fn may be run."""
    listen: str = "127.0.0.1:0"
    """Address at which training jobs on other hosts read batches, as host:port; port 0 = any free port."""
    name: str = ""
    """Name of the worker, unique in the cluster; "" = `own_name()`."""
    parent_pid: int = 0
    """Process that has started this one, with whose end the daemon ends; 0: it may outlive it."""
    embedded: bool = False
    """True if a training job started this daemon on its own machine, for that job alone."""
    runner_memory: int = 0
    """Bytes that one runner and its descendants may hold; 0 = no limit."""
    runner_user: str = ""
    """User that user code runs as, by name or number; "" = the daemon's own user. See runner_user.py."""
    runner_processes: int = 0
    """Largest number of processes and threads of all runners together; 0 = no limit. Needs runner_user."""
    no_sandbox: bool = False
    """True turns off the sandbox for runners (sandbox.py), which hides other processes of the same user."""
    tls: Tls | None = None
    insecure: bool = False
    """True allows listening for lanes and metrics beyond this machine without TLS."""
    drain_s: float = 0.0
    """Seconds that the daemon continues after a stop request, while its slots move to other workers; 0 = none."""
    liveness_file: str = ""
    """Path of a file for health probes (liveness_file.py); "" = none."""
    http: str = ""
    """Address of the pages for metrics and health, as host:port; "" = no pages."""
    http_tokens: str = field(default="", repr=False)
    """Tokens with which other machines may read the metrics, in the syntax of rpc/credentials/tokens.py."""


def slot_bytes(settings: DaemonSettings) -> int:
    """Return the bytes that a daemon may hold of what one slot's runner sends: an equal share of half of the memory
    that is free at its start, and no more than the runner itself may hold."""
    share = free_memory() // 2 // settings.slots
    return max(LEAST_SLOT_BYTES, min(share, settings.runner_memory or share))


def own_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def user_of_runners(settings: DaemonSettings) -> RunnerUser | None:
    """Return the user that user code runs as; None: the daemon's. InvalidArgumentError if `runner_processes` cannot be
    enforced."""
    if settings.runner_user:
        if settings.runner_memory and not sees_shared_memory():
            _log.warning("runner_memory counts shared memory once for each process: docker run --cap-add SYS_PTRACE")
        return find_user(settings.runner_user, settings.runner_processes)
    if settings.runner_processes:
        raise InvalidArgumentError(
            f"runner_processes={settings.runner_processes} needs runner_user: the kernel counts processes by user"
        )
    return None
