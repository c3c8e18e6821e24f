"""Memory that a daemon does not need any more, given back to the system.

States of hundreds of megabytes pass through a daemon. What held them often ends in a reference cycle, for which an idle
process never starts a collection; and malloc keeps what was freed. A daemon that had handled one state of 200 MiB kept
630 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 5.0
GROWN = 32 << 20
"""Bytes of growth that are worth a collection."""
AGAIN_S = 20.0
"""Seconds until memory that could not be given back is tried again."""
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD in glibc's malloc.h."""
_LARGE = 1 << 20
"""Bytes from which a value that is freed is given back at once: otherwise glibc keeps up to 64 MiB for each thread that
has read large ones. Six values of 16 MiB took 241 MiB, and take 97."""


async def give_back_spare_memory(collect: Callable[[], object] = gc.collect) -> None:
    """Collect garbage, and let malloc give free memory back, whenever this process has grown; until cancelled."""
    _malloc("mallopt", _MMAP_THRESHOLD, _LARGE)
    least = after = _own_bytes()
    collected_at = -math.inf
    while True:
        await asyncio.sleep(LOOK_S)
        held, now = _own_bytes(), time.monotonic()
        if held > after + GROWN or (held > least + GROWN and now > collected_at + AGAIN_S):
            collect()
            _malloc("malloc_trim", 0)
            after, collected_at = _own_bytes(), now
            least = min(least, after)


def _own_bytes() -> int:
    """Return the resident memory without mapped files and shared memory; 0 without /proc."""
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _malloc(function: str, *arguments: int) -> None:
    import ctypes  # imported here because most processes never need it

    with contextlib.suppress(AttributeError):  # another libc than glibc
        ctypes.CDLL(None)[function](*arguments)
