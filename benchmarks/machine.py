"""Description of the machine and software of a run, which a reader needs to interpret its figures."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.modes import ROOT

__all__ = ["commit", "describe", "steal_s"]


def _first(file: str, key: str) -> str:
    for line in Path(file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _caches() -> str:
    """Return a text on the caches of the first core, as the kernel reports them."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found) or "unknown"


def describe() -> dict[str, Any]:
    """Return a description of the machine and its software, by name: processor, cores, caches, memory, kernel,
    versions."""
    return {
        "processor": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_gib": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def steal_s() -> float:
    """Return the seconds that the hypervisor has taken from all cores since the machine started."""
    return int(Path("/proc/stat").read_text().split(None, 9)[8]) / os.sysconf("SC_CLK_TCK")


def commit() -> str:
    """Return the checked-out commit, with a plus if files differ from it; "" outside a clone."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
