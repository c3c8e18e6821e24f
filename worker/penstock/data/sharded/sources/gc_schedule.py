"""Garbage collection at intervals that the user sets, in a process that makes samples.

Python collects garbage after a number of new objects, and a full collection visits all objects: a tokenizer's
vocabulary and a shuffle buffer of a million samples, in the middle of a batch. Samples seldom have reference cycles. So
with `Savable(collect_every=n)` the objects that exist at the start are frozen (no collection visits them again), and
the collector runs after every n samples of the process. The collector belongs to the process: the first stream changes
its settings, and closing the last stream restores them.
"""

from __future__ import annotations

import gc

__all__ = ["GarbageCollection"]


class _Process:
    """Changes to this process's collector, and the number of streams that need them."""

    def __init__(self) -> None:
        self.holders = 0
        self.samples = 0
        self.was_on = self.was_free = False

    def hold(self) -> None:
        if self.holders == 0:
            self.was_on, self.was_free = gc.isenabled(), gc.get_freeze_count() == 0
            gc.collect()
            gc.freeze()
            gc.disable()
            self.samples = 0
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1
        if self.holders == 0:
            if self.was_free:
                gc.unfreeze()
            if self.was_on:
                gc.enable()


_process = _Process()


class GarbageCollection:
    """Collection every n samples, for one stream."""

    def __init__(self, every: int) -> None:
        self._every, self._open = every, True
        _process.hold()

    def passed(self) -> None:
        """Count a sample, and collect garbage after every n."""
        _process.samples += 1
        if _process.samples >= self._every:
            _process.samples = 0
            gc.collect()

    def close(self) -> None:
        """Release the collector. May be called twice."""
        if self._open:
            self._open = False
            _process.release()
