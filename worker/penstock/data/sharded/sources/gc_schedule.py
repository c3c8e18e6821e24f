"""Garbage collection of a process that makes samples, if the user controls it.

Python collects garbage after a number of new objects, and a full collection visits all objects: a tokenizer's
vocabulary and a shuffle buffer of a million samples, in the middle of a batch. Samples seldom have cycles. So with
`Savable(collect_every=n)` the objects of the start are frozen (no collection visits them again), and the collector runs
after every n samples of the process. It belongs to the process: the first stream changes it, and closing the last one
restores it.
"""

from __future__ import annotations

import gc

__all__ = ["GarbageCollection"]


class _Process:
    """Changes to this process' collector, and the number of streams that hold them."""

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
        """Count a sample, and collect if it is time."""
        _process.samples += 1
        if _process.samples >= self._every:
            _process.samples = 0
            gc.collect()

    def close(self) -> None:
        """Release the collector; may be called twice."""
        if self._open:
            self._open = False
            _process.release()
