"""How much memory a runner holds, with everything that it has started.

Counted is anonymous memory, what programs allocate, in RAM and in swap, by its proportional share: a page that N
processes have in common counts 1/N in each. So neither what came with the fork server nor what a loader's worker
processes share is counted twice, and the ring, the progress page and mapped files are not counted at all: user code
cannot leak them.

The share of a page takes the kernel 20 ms of work for a GiB; the plain sums, which are never less, take none. So the
share is looked at only where the sums are above the limit. Where the kernel does not show it, the sum counts: of
another user's process, say, without CAP_SYS_PTRACE, or of one that made itself undumpable.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["family", "held_by"]


def held_by(runner: int, enough: int = 0) -> int:
    """Bytes of the runner and all that descends from it; 0 if it is gone. More than it is, as long as that is not above
    `enough`."""
    all_of_it = family(runner)  # a subreaper: nothing gets away from below it
    most = sum(_sizes(pid, "status", "RssAnon", "VmSwap") for pid in all_of_it)
    if most <= enough:
        return most
    return sum(
        _sizes(pid, "smaps_rollup", "Pss_Anon", "SwapPss") or _sizes(pid, "status", "RssAnon", "VmSwap")
        for pid in all_of_it
    )


def family(pid: int) -> list[int]:
    """The process and all that descends from it."""
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
