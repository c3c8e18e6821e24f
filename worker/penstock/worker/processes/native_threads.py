"""Threads of native libraries in this process, recognised by the code that their stacks return to.

Most libraries give their threads no name. An idle thread of a pool waits in the kernel, and its stack returns to the C
and C++ runtime, then to its library. What lies further out, or between, may be left over from earlier work, also that
of an earlier thread: glibc gives a new thread the stack of one that has ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

__all__ = ["pool_threads"]

_RUNTIME = ("libc.", "libc-", "libpthread", "libstdc++", "libgcc_s", "ld-linux", "libm.", "libpython", "python")
"""Beginnings of the names of files to which a thread without Python frames may return, beside its library's."""
_MOST_BYTES = 1 << 16
"""Largest part of a stack that is read, from its innermost frame."""


def pool_threads(threads: Iterable[str], libraries: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Return those of the threads that wait in a pool of one of the libraries, and those that run, begin or end at this
    moment, so that a later look may recognise them. Where the kernel does not show stacks, no thread is recognised.

    Args:
        threads: ids of threads of this process, as in /proc/self/task.
        libraries: beginnings of the names of the libraries' files.
    """
    found, running, of_python = set(), set(), [*sys._current_frames()]
    with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
        regions = _regions()
        for thread in threads:
            with contextlib.suppress(OSError):
                stack = _stack(thread, regions)
                if any(begin <= ident < end for begin, end in stack for ident in of_python):
                    continue  # glibc keeps a thread's record, whose address is its ident, at the top of its stack
                files = [
                    name
                    for begin, end in stack
                    for name in _files_in(begin, end, regions, memory.fileno())
                    if not name.startswith(_RUNTIME)
                ]
                if not files:  # it runs, begins or ends
                    running.add(thread)
                elif files[0].startswith(libraries):
                    found.add(thread)
    return found, running


def _regions() -> list[tuple[int, int, str]]:
    """Return the mapped regions in order, as (begin, end, name of the file that holds its code; "" if not code)."""
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(text, 16) for text in addresses.split("-"))
        regions.append(
            (begin, end, os.path.basename(path[0]) if "x" in mode and path and path[0].startswith("/") else "")
        )
    return regions


def _stack(thread: str, regions: list[tuple[int, int, str]]) -> list[tuple[int, int]]:
    """Return the part of memory that the thread's stack takes, as (innermost address, end); none if the thread runs."""
    fields = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    if len(fields) < 3:  # it is running
        return []
    pointer, begins = int(fields[-2], 16), [begin for begin, _, _ in regions]
    end = regions[bisect_right(begins, pointer) - 1][1]
    return [(pointer, end)] if pointer < end else []


def _files_in(begin: int, end: int, regions: list[tuple[int, int, str]], memory: int) -> list[str]:
    """Return the files of code to which words of this part of a stack point, the innermost first."""
    words, begins = array("Q"), [begin for begin, _, _ in regions]
    words.frombytes(os.pread(memory, min(end - begin, _MOST_BYTES) // 8 * 8, begin))
    files: dict[str, None] = {}
    for word in words:
        _, end, name = regions[bisect_right(begins, word) - 1]
        if name and word < end:
            files[name] = None
    return [*files]
