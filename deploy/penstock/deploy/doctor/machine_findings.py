"""Requirements of Penstock on a machine, as functions from values to findings. machine_probes.py reads the values.

A value beyond a limit is a problem if Penstock failed or was extremely slow beyond this limit when it was tried. It is
a warning if Penstock was only slower. The requirements depend on the use of the machine: `slots` is the number of
runners (processes that run the user's loader) that the machine is to have.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping

from penstock.deploy.doctor.findings import Finding, ok, problem, warning
from penstock.runtime.telemetry.units import size

__all__ = [
    "check_clock",
    "check_disk",
    "check_files",
    "check_groups",
    "check_kernel",
    "check_locked_memory",
    "check_memory",
    "check_packages",
    "check_processes",
    "check_python",
    "check_runner_user",
    "check_sandbox",
    "check_tls",
    "check_torch_build",
]

MIB = 1 << 20
RUNNER_BYTES = 512 * MIB
"""Memory that a runner needs, in bytes. A runner with torch alone has 170 MiB resident, 60 of them private. The rest is
for its ring, user code and data."""
RUNNER_FILES = 24
"""Number of file descriptors that a daemon needs for each runner. 10 were measured with a lane over TCP. The rest is
for rings that grow and for senders of the same slot that exist at the same time."""
DAEMON_FILES = 128
RUNNER_TASKS = 16
"""Number of processes and threads that each runner needs: its own, and those that the daemon and the user's code start
for it."""
SPARE_TASKS = 128
SLOW_SYNC_S = 0.02
"""Longest fsync without a warning, in seconds. A commit waits for an fsync, which takes 0.1 to 5 ms on a local disk."""
OLD_PYTHON, NEW_PYTHON = (3, 11), (3, 13)
"""Oldest and newest version of Python with which releases are tested."""
RELEASED = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""Earliest plausible time. A clock that shows an earlier time is wrong."""
EXPIRES_SOON = datetime.timedelta(days=30)
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?\s*$")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def check_python(version: tuple[int, ...]) -> Finding:
    """Check whether releases are tested with this version of Python. `version`: (major, minor, micro)."""
    text, check = ".".join(map(str, version)), "python"
    if version[:2] < OLD_PYTHON:
        return problem(check, text, "Penstock needs 3.11 or newer: make an environment with it.")
    if version[:2] > NEW_PYTHON:
        return warning(check, f"{text}, newer than the tested releases", "If something fails, try 3.13.")
    return ok(check, text)


def check_packages(requires: Iterable[str], installed: Mapping[str, str]) -> list[Finding]:
    """Check the versions of the installed packages.

    Args:
        requires: requirements as in a package's metadata, "NAME" or "NAME>=VERSION". Others, such as those of optional
            parts (extras), are ignored.
        installed: version of each installed package, by name.
    """
    found = []
    for requirement in requires:
        match = _REQUIREMENT.match(requirement)
        if match is None:
            continue
        name, least = match[1], match[2] or ""
        has, remedy = installed.get(name), f"pip install '{requirement.strip()}'"
        if has is None:
            found.append(problem(name, "not installed", remedy))
        elif least and _release(has) < _release(least):
            found.append(problem(name, f"{has}; {least} or newer is needed", remedy))
        else:
            found.append(ok(name, has))
    return found


def check_torch_build(cuda_packages: int, gpus: int) -> Finding:
    """Check whether torch's build fits this machine: a build for CUDA is of no use without a GPU.

    Args:
        cuda_packages: number of installed CUDA packages, which torch's default build on Linux requires.
        gpus: number of NVIDIA devices.
    """
    check = "torch build"
    if cuda_packages and not gpus:
        return warning(
            check,
            f"{cuda_packages} CUDA packages (about 5 GB), but no NVIDIA device",
            "A worker needs no CUDA: install torch's CPU build first, from the index that PyTorch's install page gives "
            "for Compute Platform CPU, and Penstock after it.",
        )
    return ok(check, f"{cuda_packages} packages of CUDA, {gpus} NVIDIA devices" if cuda_packages else "without CUDA")


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


def check_memory(available: int, cgroup: tuple[int, int] | None, slots: int) -> Finding:
    """Check whether the memory suffices for `slots` runners.

    Args:
        available: free memory of the machine, in bytes.
        cgroup: memory limit of this process's control group, and what is left of it, in bytes; None: no limit.
        slots: number of runners.
    """
    left = available if cgroup is None else max(0, min(available, cgroup[1]))
    within = "" if cgroup is None else f", {size(cgroup[0])} at most in this cgroup"
    need = slots * RUNNER_BYTES
    found = f"{size(left)} free{within}; {slots} slots take about {size(need)} before your data. Rings count as shared"
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


def check_groups(why_not: str) -> Finding:
    """Report whether a worker here can limit its runners by control groups; never a problem. `why_not`: reason why a
    worker that is started like this command cannot make control groups; "" if it can."""
    memory = "--runner-memory is checked once a second"
    if why_not:
        return ok(
            "control groups",
            f"none, because {why_not}: {memory}; --runner-processes needs --runner-user and counts per user",
        )
    return ok(
        "control groups",
        f"one for each runner: the kernel holds --runner-processes, and a hard limit above --runner-memory; {memory}",
    )


def check_runner_user(wanted: str, why_not: str, *, as_root: bool) -> Finding:
    """Check the user account under which user code is to run.

    Args:
        wanted: user for user code; "": the worker's own user.
        why_not: reason why that is impossible; "" if it is possible.
        as_root: True if a worker here runs as root.
    """
    if why_not:
        return problem("runner user", why_not, "docs/security.md lists the requirements of --runner-user.")
    if wanted:
        return ok("runner user", f"user code runs as {wanted}, apart from the worker's files and processes")
    if as_root:
        return warning(
            "runner user",
            "user code would run as root: it reads and writes every file that the worker can",
            "penstock worker --runner-user USER, or start the worker as a user of its own.",
        )
    return ok("runner user", "user code runs as the worker's own user, which is not root")


def check_locked_memory(soft: int, device: str) -> Finding:
    """Check the limit on locked memory, which a ring for CUDA needs. `soft`: limit in bytes, -1: no limit; `device`:
    device of the training job on this machine."""
    found = f"{size(soft) if soft >= 0 else 'any amount'} may be locked"
    if device.startswith("cuda") and 0 <= soft < 1 << 30:
        return warning(
            "locked memory",
            f"{found}; device={device} locks its ring",
            "ulimit -l unlimited; docker run --ulimit memlock=-1",
        )
    return ok("locked memory", found if device.startswith("cuda") else f"{found}; matters with device=cuda only")


def check_processes(limit: int, cgroup: tuple[int, int] | None, slots: int) -> Finding:
    """Check the limits on processes and threads.

    Args:
        limit: largest number of processes and threads of this user; -1: no limit.
        cgroup: limit of this process's control group, and what is left of it; None: no limit.
        slots: number of runners.
    """
    left = limit if cgroup is None else cgroup[1] if limit < 0 else min(limit, cgroup[1])
    in_cgroup = cgroup is not None and left == cgroup[1]
    most = f"{left} more processes and threads in this cgroup" if in_cgroup else f"{_limit(left)} for this user in all"
    need = SPARE_TASKS + RUNNER_TASKS * slots
    found = f"{most}; {slots} slots may need {need}"
    if 0 <= left < need:
        return problem("processes", found, "ulimit -u unlimited; docker run --pids-limit -1; Kubernetes: podPidsLimit")
    return ok("processes", found)


def _limit(value: int) -> str:
    return "any number" if value < 0 else str(value)


def check_clock(source: str, now: datetime.datetime, synchronised: bool | None) -> Finding:
    """Check the wall clock. `source`: name of the kernel's clock source, "" if unknown; `now`: time that the clock
    shows; `synchronised`: None if unknown."""
    found = f"{now:%Y-%m-%d %H:%M:%S} UTC, clock source {source or 'unknown'}"
    if now < RELEASED:
        return problem(
            "clock", found, "The clock is wrong, so certificates are not valid yet: timedatectl set-ntp true"
        )
    if source in ("hpet", "acpi_pm", "jiffies", "pit"):
        return warning(
            "clock", f"{found}, where reading it takes microseconds", "Boot with clocksource=tsc (KVM: kvm-clock)."
        )
    if synchronised is False:
        return warning(
            "clock",
            f"{found}, not synchronised by NTP",
            "timedatectl set-ntp true, on the host if this is a container; leases do not need it, certificates do.",
        )
    return ok("clock", found if synchronised is None else f"{found}, synchronised by NTP")


def check_disk(path: str, filesystem: str, network: bool, free: int, sync_s: float | None) -> Finding:
    """Check the coordinator's state directory.

    Args:
        path: the directory.
        filesystem: name of its filesystem.
        network: True if the filesystem is on another machine.
        free: free space in bytes.
        sync_s: median duration of an fsync there, in seconds; None: the directory is not writable.
    """
    if network:
        return problem(
            "state directory",
            f"{path} is on a network filesystem ({filesystem}), where the journal is not safe",
            "penstock coordinator --state-dir DIR with a directory on a local disk.",
        )
    if sync_s is None:
        return problem("state directory", f"{path} cannot be written to", f"mkdir -p {path}, and make it this user's.")
    found = f"{path}: {filesystem}, {size(free)} free, {sync_s * 1e3:.3g} ms an fsync"
    if free < 256 * MIB:
        return problem(
            "state directory", found, "The journal and the snapshots of runs need 1 GiB or more: free disk space."
        )
    if free < 1024 * MIB:
        return warning("state directory", found, "Snapshots of large loaders take more: free disk space.")
    if sync_s > SLOW_SYNC_S:
        return warning("state directory", found, "Each commit waits for the disk: choose a local SSD for --state-dir.")
    if filesystem in ("tmpfs", "ramfs"):
        return warning("state directory", found, "It does not survive a reboot: choose a directory on a disk.")
    return ok("state directory", found)


def check_tls(
    what: str, until: datetime.datetime, now: datetime.datetime, name: str = "", roles: frozenset[str] | None = None
) -> Finding:
    """Check a certificate that is valid now.

    Args:
        what: path of the certificate, for the text of the finding.
        until: end of the certificate's validity.
        now: the present time.
        name: value of the setting tls_name, such as "*.penstock".
        roles: roles for which the certificate is valid, by the names in it; None: tls_name has no "*", so certificates
            do not name roles.
    """
    left = until - now
    found = f"{what} is valid until {until:%Y-%m-%d %H:%M} UTC, {max(0, left.days)} days"
    if roles is not None:
        if not roles:
            made = name.replace("*", "worker")
            return problem(
                "TLS", f"{what} names no role, but tls_name={name}", f"Make a certificate for a name such as {made}."
            )
        found += f", for the role {' and '.join(sorted(roles))}"
    if left < EXPIRES_SOON:
        return warning("TLS", found, "Replace the file (docs/security.md): the daemon loads it without a restart.")
    return ok("TLS", found)
