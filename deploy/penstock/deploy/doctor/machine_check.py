"""Checks of `penstock doctor machine`: whether sandbox, memory and open files suffice for runners, which a start of a
daemon does not show; and which box a launcher's variables mean."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from penstock.deploy.doctor.findings import Finding
from penstock.proto.errors import InvalidArgumentError
from penstock.runtime.process import sandbox
from penstock.runtime.process.free_memory import free_memory
from penstock.runtime.process.ranks import launched_ranks
from penstock.runtime.telemetry.units import size

RUNNER_BYTES = 512 << 20
"""Memory of a runner in bytes: with torch 170 MiB resident, 60 of them private; the rest for ring and data."""
RUNNER_FILES = 24
"""File descriptors per runner: 10 with a lane over TCP; the rest for growing rings and senders at the same time."""
DAEMON_FILES = 128


def check_machine(slots: int | None = None) -> Iterator[Finding]:
    """Yield all findings. `slots`: of a worker here; None: the number of cores."""
    slots = slots or os.cpu_count() or 1
    yield check_sandbox(sandbox.why_not_whole())
    yield check_memory(free_memory(), slots)
    yield check_files(*resource.getrlimit(resource.RLIMIT_NOFILE), slots)
    yield from check_ranks()


def check_ranks() -> Iterator[Finding]:
    """Yield a finding where a launcher has set variables of ranks: which box a training process here would be."""
    try:
        ranks = launched_ranks()
    except InvalidArgumentError as error:
        yield Finding("ranks", "problem", error.message, "Start the ranks with torchrun, or set RANK and WORLD_SIZE.")
        return
    if ranks is not None and ranks[1] > 1:
        yield Finding(
            "ranks",
            "ok",
            f"a training process here is box {ranks[0]} of {ranks[1]}, by RANK and WORLD_SIZE; one that shares a "
            "model with others (tensor, pipeline, context parallel) must pass its group's box= and num_boxes=",
        )


def check_sandbox(lacking: str) -> Finding:
    """`lacking`: the kernel feature that the sandbox of runners misses; "" if none."""
    if lacking:
        return Finding(
            "sandbox",
            "warning",
            f"runners gain no privileges, but can signal and trace other processes of their user: {lacking}",
            "Give workers a user of their own, or a newer kernel.",
        )
    return Finding("sandbox", "ok", "runners gain no privileges, and signal and trace only what they have started")


def check_memory(left: int, slots: int) -> Finding:
    """`left`: free bytes of the machine, or of this process's control groups."""
    need = slots * RUNNER_BYTES
    found = f"{size(left)} free; {slots} slots take about {size(need)} before your data. Rings count as shared"
    if left < RUNNER_BYTES:
        return Finding("memory", "problem", found, "Use another machine, or raise the limit.")
    if left < need:
        remedy = f"penstock worker --slots {left // RUNNER_BYTES}, or --runner-memory SIZE to bound each runner."
        return Finding("memory", "warning", found, remedy)
    return Finding("memory", "ok", found)


def check_files(soft: int, hard: int, slots: int) -> Finding:
    """`soft`, `hard`: limits on open files; -1: none."""
    need = DAEMON_FILES + RUNNER_FILES * slots
    most, hard_most = ("any number" if limit < 0 else str(limit) for limit in (soft, hard))
    found = f"{most} at most ({hard_most} after ulimit -n); {slots} slots may need {need}"
    if 0 <= soft < need:
        return Finding(
            "open files",
            "problem",
            found,
            f"ulimit -n {max(need, 65536)} before the daemon starts; systemd: LimitNOFILE=65536; docker run --ulimit "
            "nofile=65536",
        )
    return Finding("open files", "ok", found)
