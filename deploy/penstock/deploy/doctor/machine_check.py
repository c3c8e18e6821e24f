"""Checks of `penstock doctor machine`: what appliances and daemons need of the machine (machine_needs.py), and whether
sandbox and memory suffice for runners, which a start of a daemon does not show; and which box a launcher's variables
mean."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Literal

from penstock.deploy.doctor.findings import Finding
from penstock.proto.errors import InvalidArgumentError
from penstock.runtime.process import sandbox
from penstock.runtime.process.free_memory import free_memory
from penstock.runtime.process.machine_needs import NEEDS, Unmet, unmet_needs
from penstock.runtime.process.ranks import launched_ranks
from penstock.runtime.telemetry.units import size

RUNNER_BYTES = 512 << 20
"""Memory of a runner in bytes: with torch 170 MiB resident, 60 of them private; the rest for ring and data."""


def check_machine(slots: int | None = None) -> Iterator[Finding]:
    """Yield all findings. `slots`: of a worker here; None: the number of cores."""
    slots = slots or os.cpu_count() or 1
    yield check_sandbox(sandbox.why_not_whole())
    yield check_memory(free_memory(), slots)
    yield from check_needs(list(unmet_needs("coordinator", "worker", "job", slots=slots)))
    yield from check_ranks()


def check_needs(lacking: Sequence[Unmet]) -> Iterator[Finding]:
    """`lacking`: what this machine lacks."""
    met = [need.name for need in NEEDS if need not in [unmet.need for unmet in lacking]]
    yield Finding("kernel and container", "ok", f"allow {', '.join(met)}")
    for unmet in lacking:
        level: Literal["problem", "warning"] = "problem" if unmet.is_fatal else "warning"
        yield Finding(unmet.need.name, level, unmet.why, f"{unmet.need.remedy}.")


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
