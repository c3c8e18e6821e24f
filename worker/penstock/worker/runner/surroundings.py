"""What a process has besides memory, and what of that user code has left (threads, sockets, pipes, child processes,
shared memory): a forked child would share or lack it. Most native threads have no name, so they are recognised by the
code that their stacks return to: the C and C++ runtime, then the library. Anything further out or between may be left
from an earlier thread: glibc reuses stacks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable
from pathlib import Path

from penstock.proto.state import assignment as assignments
from penstock.worker.processes.orphans import own_children

_HARMLESS_THREADS = ("jemalloc_bg_thd", "AwsEventLoop")
"""Names' beginnings of threads that are started again in a forked child, or not needed."""
_HARMLESS_POOLS = ("libarrow", "libopenblas", "libscipy_openblas")
"""Names' beginnings of libraries that start their pools' nameless threads again in a forked child."""
_FEWEST_LOOKS, _MOST_LOOKS, _LOOK_S = 10, 250, 0.02
"""Looks at new threads until pools are recognised (fewest if none other runs), and seconds between two: a thread that
begins, or waits for a core, cannot be recognised yet."""
_RUNTIME = ("libc.", "libc-", "libpthread", "libstdc++", "libgcc_s", "ld-linux", "libm.", "libpython", "python")
"""Files to which a thread without Python frames may return, beside its library's."""
_MOST_BYTES = 1 << 16
"""Bytes of a stack that are read, from the innermost frame."""


class Surroundings:
    def __init__(self) -> None:
        self._threads = _threads()
        self._files = _files()
        self._shared = _shared_memory()
        self._children = set(own_children())

    def left(self) -> str:
        """Say what user code has left that a forked child would share; "" if nothing."""
        threads = self._threads_left()
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        if threads:
            return f"input_fn has left {len(threads)} threads ({', '.join(names or threads)[:200]})"
        files = _new(_files(), self._files)
        if files:
            return f"input_fn has left {', '.join(sorted(set(files)))[:200]} open"
        children = set(own_children()) - self._children
        if children:
            return f"input_fn has left {len(children)} child processes"
        shared = _new(_shared_memory(), self._shared)
        if shared:
            return f"input_fn has left writable shared memory ({', '.join(shared)[:200]})"
        if assignments.epoch_was_read():
            return "input_fn has read current_assignment().epoch"
        return ""

    def _threads_left(self) -> list[str]:
        for look in range(_MOST_LOOKS):
            new = {thread for thread in _threads() - self._threads if not thread[1].startswith(_HARMLESS_THREADS)}
            pools, running = pool_threads([thread for thread, _ in new], _HARMLESS_POOLS)
            left = [name for thread, name in new if thread not in pools]
            of_python = {str(thread.native_id) for thread in threading.enumerate()}
            if not left or of_python & {thread for thread, _ in new} or (look >= _FEWEST_LOOKS and not running):
                break
            time.sleep(_LOOK_S)
        return left


def _new(now: Collection[tuple[str, str]], before: Collection[tuple[str, str]]) -> list[str]:
    return [name for key, name in now if (key, name) not in before]


def _threads() -> set[tuple[str, str]]:
    threads = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            threads.add((thread, Path(f"/proc/self/task/{thread}/comm").read_text().strip()))
    return threads


def _files() -> set[tuple[str, str]]:
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(("socket:", "pipe:", "anon_inode:")):
                files.add((f"{fd} {target}", f"a {target.replace('anon_inode:', '').split(':')[0].strip('[]')}"))
    return files


def _shared_memory() -> set[tuple[str, str]]:
    mappings = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if fields[0].startswith(f"{assignments.mark_address():x}-"):  # Penstock's own
                continue
            if "w" in fields[1] and fields[1].endswith("s"):
                mappings.add((fields[0], fields[5] if len(fields) > 5 else "anonymous"))
    return mappings


def pool_threads(threads: Iterable[str], libraries: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Return the threads that wait in a pool of these libraries, and those that run, begin or end, which a later look
    may recognise; none where the kernel does not show stacks. threads: ids as in /proc/self/task."""
    pooled, running, of_python = set(), set(), [*sys._current_frames()]
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
                    pooled.add(thread)
    return pooled, running


def _regions() -> list[tuple[int, int, str]]:
    """Return mapped regions: (begin, end, file of its code or "")."""
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(text, 16) for text in addresses.split("-"))
        regions.append(
            (begin, end, os.path.basename(path[0]) if "x" in mode and path and path[0].startswith("/") else "")
        )
    return regions


def _stack(thread: str, regions: list[tuple[int, int, str]]) -> list[tuple[int, int]]:
    """Return (innermost address, end); none if the thread runs."""
    fields = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    if len(fields) < 3:  # it is running
        return []
    pointer, begins = int(fields[-2], 16), [begin for begin, _, _ in regions]
    end = regions[bisect_right(begins, pointer) - 1][1]
    return [(pointer, end)] if pointer < end else []


def _files_in(begin: int, end: int, regions: list[tuple[int, int, str]], memory: int) -> list[str]:
    """Return files of code to which a stack's words point, the innermost first."""
    words, begins = array("Q"), [begin for begin, _, _ in regions]
    words.frombytes(os.pread(memory, min(end - begin, _MOST_BYTES) // 8 * 8, begin))
    files: dict[str, None] = {}
    for word in words:
        _, end, name = regions[bisect_right(begins, word) - 1]
        if name and word < end:
            files[name] = None
    return [*files]
