"""Bytes that the two ends of a lane keep for each batch: none, because nothing may grow with the number of batches.

Both run in this process, so that what malloc and Python have handed out can be asked for: a reused protobuf message
kept 500 bytes of each batch with 40 dims that it parsed, and 57 of each with one. The real processes and lanes between
hosts, for longer, are `make soak`.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

import torch

WARM, COUNTED = 1_000, 2_000
LEAVES = {f"leaf{number}": torch.full((2, 4), number) for number in range(20)}


class _Malloc(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = (
        ("unused", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("unused_too", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("free", ctypes.c_size_t * 2),
    )


def in_use() -> int:
    """Bytes of malloc, and of Python's own allocator as many as its objects have at least."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Malloc
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd + 16 * sys.getallocatedblocks())


def test_nothing_of_a_batch_is_kept(rigs: Any) -> None:
    rig = rigs()
    runner, reader = rig.runners[0], rig.reader

    def take(count: int) -> None:
        for _ in range(count // 4):
            sent = 0
            while sent < 4:
                sent += runner.send(LEAVES)
            for _ in range(4):
                reader.next()
        reader.flush()

    take(WARM)
    before = in_use()
    take(COUNTED)
    kept = (in_use() - before) / COUNTED  # hundredths of a byte; a thread's buffers now and then make some of it
    assert kept < 10
