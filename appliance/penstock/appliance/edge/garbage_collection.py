"""Full collections of Python's garbage collector, at times that the coordinator chooses.

A long poll is held for seconds, so the collector counts its objects as old. By default it would then start a full
collection of all objects every few seconds. With 4,000 workers each collection took 0.4 s, in which no heartbeat was
received; collections took a seventh of the coordinator's time. Nearly all objects are freed by reference counting
alone, and those in reference cycles can wait. The young generations are collected as by default.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_S = 60.0
"""Shortest time between two full collections, in seconds."""
SHARE = 0.005
"""Largest share of the time spent in full collections, so that they delay fewer than one heartbeat in a hundred."""
_NEVER = 1 << 30


@contextmanager
def paced(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let only the event loop start full collections in this process while the context is open, at most one every
    EVERY_S seconds."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], _NEVER)
    collecting = loop.create_task(_collect())
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(*before)


async def _collect() -> None:
    took_s = 0.0
    while True:
        await asyncio.sleep(max(EVERY_S, took_s / SHARE))
        began = time.monotonic()
        gc.collect()
        took_s = time.monotonic() - began
