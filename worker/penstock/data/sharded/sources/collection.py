"""When garbage is collected in a process that makes samples, where the user asks for a say in it.

Python collects after so many new objects, and a full collection looks at all that there are: a tokenizer's vocabulary
and a shuffle buffer of a million samples, in the middle of a batch. Samples seldom have cycles. So with
`Savable(collect_every=n)` what was there at the start is frozen (no collection looks at it again), and the collector
runs after every n samples of the process. It belongs to the process: the first stream that asks changes it, and when
the last one is closed it is as it was before.
"""

from __future__ import annotations

import gc

__all__ = ["GarbageCollection"]


class _Process:
    """What is changed in this process, and for how many."""

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
    """One stream's wish to have garbage collected every n samples."""

    def __init__(self, every: int) -> None:
        self._every, self._open = every, True
        _process.hold()

    def passed(self) -> None:
        """One sample more."""
        _process.samples += 1
        if _process.samples >= self._every:
            _process.samples = 0
            gc.collect()

    def close(self) -> None:
        """May be called twice."""
        if self._open:
            self._open = False
            _process.release()
