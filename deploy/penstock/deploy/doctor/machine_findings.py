"""Requirements of Penstock on a machine, as functions from values to findings. machine_probes.py reads the values.

A value beyond a limit is a problem if Penstock failed or was extremely slow beyond this limit when it was tried. It is
a warning if Penstock was only slower. The requirements depend on the use of the machine: `slots` is the number of
runners (processes that run the user's loader) that the machine is to have.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.deploy.doctor.findings import Finding, ok, problem, warning
from penstock.runtime.telemetry.units import size

__all__ = [
    "check_files",
    "check_kernel",
    "check_memory",
    "check_sandbox",
]

MIB = 1 << 20
RUNNER_BYTES = 512 * MIB
"""Memory that a runner needs, in bytes. A runner with torch alone has 170 MiB resident, 60 of them private. The rest is
for its ring, user code and data."""
RUNNER_FILES = 24
"""Number of file descriptors that a daemon needs for each runner. 10 were measured with a lane over TCP. The rest is
for rings that grow and for senders of the same slot that exist at the same time."""
DAEMON_FILES = 128


def check_kernel(release: str, missing: Mapping[str, str]) -> Finding:
    """Check the features of the kernel. `release`: the kernel's version; `missing`: reason why a feature cannot be
    used, by the feature's name."""
    needed = {name: why for name, why in missing.items() if name != "O_DIRECT"}
    if needed:
        return problem(
            "kernel",
            f"{release} without " + "; ".join(f"{name} ({why})" for name, why in needed.items()),
            "Linux 5.3 or newer is needed, and a sandbox (seccomp, gVisor) must allow memfd_create, pidfd_open, prctl "
            "and Unix sockets.",
        )
    without = "" if "O_DIRECT" not in missing else "; no O_DIRECT in the temporary folder, which is optional"
    return ok("kernel", f"{release}: sealed memfd, pidfd, subreaper, SEQPACKET with descriptors{without}")


def check_memory(left: int, slots: int) -> Finding:
    """Check whether the memory suffices for `slots` runners. `left`: free memory, of the machine or of what this
    process's control groups leave, in bytes."""
    need = slots * RUNNER_BYTES
    found = f"{size(left)} free; {slots} slots take about {size(need)} before your data. Rings count as shared"
    if left < RUNNER_BYTES:
        return problem("memory", found, "Not enough for a single runner: use another machine, or raise the limit.")
    if left < need:
        fit = left // RUNNER_BYTES
        return warning("memory", found, f"penstock worker --slots {fit}, or --runner-memory SIZE to bound each runner.")
    return ok("memory", found)


def check_files(soft: int, hard: int, slots: int) -> Finding:
    """Check the soft and the hard limit on open files; -1 stands for no limit. `slots`: number of runners."""
    need = DAEMON_FILES + RUNNER_FILES * slots
    found = f"{_limit(soft)} at most ({_limit(hard)} after ulimit -n); {slots} slots may need {need}"
    if 0 <= soft < need:
        return problem(
            "open files",
            found,
            f"ulimit -n {max(need, 65536)} before the daemon starts; systemd: LimitNOFILE=65536; docker run --ulimit "
            "nofile=65536",
        )
    return ok("open files", found)


def check_sandbox(lacking: str) -> Finding:
    """Check whether the kernel supports the sandbox of runners. `lacking`: the missing kernel feature; "" if none is
    missing."""
    if lacking:
        return warning(
            "sandbox",
            f"runners gain no privileges, but can signal and trace other processes of their user: {lacking}",
            "Give workers a user of their own, or a newer kernel.",
        )
    return ok("sandbox", "runners gain no privileges, and signal and trace only what they have started")


def _limit(value: int) -> str:
    return "any number" if value < 0 else str(value)
