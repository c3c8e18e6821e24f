"""Garbage collection at intervals that the user sets, in a process that reads streams of samples.

Python collects garbage after a number of new objects, also in the middle of a batch. A full collection visits all
objects, for example a tokenizer's vocabulary and a shuffle buffer of a million samples. Samples seldom have reference
cycles, so this is rarely needed. With `Savable(collect_every=n)` the objects that exist when the first stream is opened
are frozen (no collection visits them), and the collector runs after every n samples of the process. All streams of a
process share its collector: opening the first stream changes the collector's settings, and closing the last stream
restores them.
"""

from __future__ import annotations

import gc

__all__ = ["GarbageCollection"]


class _Process:
    """State that all streams of this process share: the garbage collector's original settings, the number of streams
    that have asked for other settings, and the number of samples since the last collection."""

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
    """Request of one stream to collect garbage after every n samples of the process, until the stream is closed."""

    def __init__(self, every: int) -> None:
        self._every, self._open = every, True
        _process.hold()

    def passed(self) -> None:
        """Count a sample, and collect garbage if it is the n-th since the last collection."""
        _process.samples += 1
        if _process.samples >= self._every:
            _process.samples = 0
            gc.collect()

    def close(self) -> None:
        """Withdraw this stream's request. When the last stream is closed, the collector's settings are restored. May be
        called twice."""
        if self._open:
            self._open = False
            _process.release()
