"""What this process has open, for metrics: who streams, who receives, how saves went.

Things announce themselves here when they begin and are forgotten when they are gone; a scrape, on another thread, asks
for those that are left. No step of a loop comes by here.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from penstock.client.stream.receiver_process import Receiver
    from penstock.client.stream.stream_interfaces import Reader

__all__ = ["SaveCounters", "feeds", "receivers", "saves"]

_Thing = TypeVar("_Thing")


class _Watched(Generic[_Thing]):
    """Things of a kind, without keeping them alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a set must not grow while it is iterated
        self._things: weakref.WeakSet[_Thing] = weakref.WeakSet()

    def add(self, thing: _Thing) -> None:
        """It has begun."""
        with self._lock:
            self._things.add(thing)

    def all(self) -> list[_Thing]:
        """Those that are left."""
        with self._lock:
            return list(self._things)


@dataclass
class SaveCounters:
    """How the checkpoints of this process went, of all its AsyncCheckpointers. Times in seconds."""

    ok: int = 0
    failed: int = 0
    in_flight: int = 0
    stalled_s: float = 0.0
    """That save() kept the training loop, in all."""
    last_stall_s: float = 0.0
    last_write_s: float = 0.0
    """From there to the commit."""
    written_bytes: int = 0
    last_step: int = -1
    """Of the last that is whole; -1: there was none."""
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """A signal handler that saves may come in the middle of a save."""

    def stalled(self, seconds: float) -> None:
        """A save() has returned, or raised."""
        with self._lock:
            self.stalled_s += seconds
            self.last_stall_s = seconds

    def begun(self) -> None:
        """One is being written."""
        with self._lock:
            self.in_flight += 1

    def ended(self, step: int, seconds: float, written: int, *, ok: bool) -> None:
        """One that was being written is whole, or has failed."""
        with self._lock:
            self.in_flight -= 1
            self.written_bytes += written
            self.failed += not ok
            if ok:
                self.ok += 1
                self.last_step, self.last_write_s = step, seconds

    def refused(self) -> None:
        """One has failed before it was written."""
        with self._lock:
            self.failed += 1


feeds: _Watched[Reader] = _Watched()
receivers: _Watched[Receiver] = _Watched()
saves = SaveCounters()
