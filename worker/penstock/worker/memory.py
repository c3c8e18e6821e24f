"""How much memory a runner holds, with everything that it has started.

Counted is anonymous memory, what programs allocate, in RAM and in swap, by its proportional share: a page that N
processes have in common counts 1/N in each. So neither what came with the zygote nor what a loader's worker processes
share is counted twice, and the ring, the ledger and mapped files are not counted at all: user code cannot leak them.
"""

from __future__ import annotations

from pathlib import Path

from penstock.worker.orphans import processes

__all__ = ["held_by"]


def held_by(runner: int) -> int:
    """Bytes of the runner, its process group and all that descends from it; 0 if it is gone."""
    there = list(processes())
    family = {pid for pid, _, group in there if group == runner}
    grown = True
    while grown:
        more = {pid for pid, parent, _ in there if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(map(_share, family))


def _share(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Pss_Anon", "SwapPss") if name in fields)
