"""Checks of `penstock doctor machine`: calls machine_findings.py with the properties and the effective settings of this
machine.

Only what the start of a daemon does not say by itself is checked. A daemon refuses settings, ports, certificates,
tokens and state directories that it cannot use.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator

from penstock.deploy.console.daemon_settings import WorkerSettings
from penstock.deploy.doctor import machine_findings, machine_probes
from penstock.deploy.doctor.findings import Finding
from penstock.runtime.config.settings import find
from penstock.runtime.process import sandbox
from penstock.runtime.process.free_memory import free_memory

__all__ = ["check_machine"]


def check_machine(slots: int | None = None) -> Iterator[Finding]:
    """Yield all findings, in the order in which a person checks them. `slots`: number of slots of a worker here; None:
    the effective setting, or the number of cores."""
    yield machine_findings.check_kernel(platform.release(), machine_probes.kernel_gaps())
    yield machine_findings.check_sandbox(sandbox.why_not_whole())
    slots = slots or _slots_set() or os.cpu_count() or 1
    yield machine_findings.check_memory(free_memory(), slots)
    yield machine_findings.check_files(*resource.getrlimit(resource.RLIMIT_NOFILE), slots)


def _slots_set() -> int | None:
    """Return the effective value of the setting `slots`; None if it is missing or invalid."""
    found = next(each for each in find(WorkerSettings) if each.field == "slots")
    return None if found.problem or not found.source else found.value
