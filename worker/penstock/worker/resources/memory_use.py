"""Memory that a runner (the process that runs a user's loader) and all its descendants hold.

The figure is the proportional share of anonymous memory (memory that programs allocate), in RAM and in swap: a page
that N processes share counts 1/N in each. So neither the fork server's memory nor memory that a loader's worker
processes have from a fork is counted twice. Shared memory (the ring, the progress page, tensors that torch's worker
processes pass on) and mapped files are not counted.

The kernel needs 20 ms for each GiB to compute proportional shares. The plain size of a process, in which a shared page
counts in full, costs almost nothing and is never less. So the shares are read only if the sum of the plain sizes is
above the limit. The kernel hides the shares of another user's process (without CAP_SYS_PTRACE) and of a process that
made itself undumpable; for these the plain size counts.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["family", "held_by"]


def held_by(runner: int, enough: int = 0) -> int:
    """Return the memory that the runner and all its descendants hold, in bytes; 0 if the runner is gone.

    enough: number of bytes below which a rough result will do. A result up to `enough` may be too high, because shared
    memory is counted once for each process. A result above `enough` counts it once, except for processes whose shares
    the kernel hides.
    """
    all_of_it = family(runner)  # the runner is a subreaper: all its descendants stay below it
    most = sum(_sizes(pid, "status", "RssAnon", "VmSwap") for pid in all_of_it)
    if most <= enough:
        return most
    return sum(
        _sizes(pid, "smaps_rollup", "Pss_Anon", "SwapPss") or _sizes(pid, "status", "RssAnon", "VmSwap")
        for pid in all_of_it
    )


def family(pid: int) -> list[int]:
    """Return the process ids of a process and all its descendants."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                with contextlib.suppress(OSError):
                    found += map(int, (task / "children").read_text().split())
    return found


def _sizes(pid: int, file: str, *names: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in names if name in fields)
