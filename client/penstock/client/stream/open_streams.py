"""Registry of this process's readers, receivers and saves that are alive, for metrics on another thread."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from penstock.client.stream.receiver_process import Receiver
    from penstock.client.stream.streams import Reader

_Thing = TypeVar("_Thing")


class _Watched(Generic[_Thing]):
    def __init__(self) -> None:
        self._lock = threading.Lock()  # a set must not grow while it is iterated
        self._things: weakref.WeakSet[_Thing] = weakref.WeakSet()

    def add(self, thing: _Thing) -> None:
        with self._lock:
            self._things.add(thing)

    def all(self) -> list[_Thing]:
        with self._lock:
            return list(self._things)


@dataclass
class SaveCounters:
    ok: int = 0
    failed: int = 0
    in_flight: int = 0
    stalled_s: float = 0.0
    """Seconds for which save() has blocked the training loop in all."""
    last_stall_s: float = 0.0
    last_write_s: float = 0.0
    """Seconds from the return of save() until the last complete checkpoint was complete."""
    written_bytes: int = 0
    last_step: int = -1
    """Step of the last complete checkpoint; -1 before the first."""
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Reentrant, because a signal handler may call save() during a save."""

    def stalled(self, seconds: float) -> None:
        with self._lock:
            self.stalled_s += seconds
            self.last_stall_s = seconds

    def begun(self) -> None:
        with self._lock:
            self.in_flight += 1

    def ended(self, step: int, seconds: float, written: int, *, ok: bool) -> None:
        """Count a written checkpoint. `seconds`: since save() returned. `written`: bytes."""
        with self._lock:
            self.in_flight -= 1
            self.written_bytes += written
            self.failed += not ok
            if ok:
                self.ok += 1
                self.last_step, self.last_write_s = step, seconds

    def refused(self) -> None:
        """Count a checkpoint that failed before its writing began."""
        with self._lock:
            self.failed += 1


readers: _Watched[Reader] = _Watched()
receivers: _Watched[Receiver] = _Watched()
saves = SaveCounters()
