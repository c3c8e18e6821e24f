"""Decoding of *blocks* (parts of a shard that are decoded as a whole, such as Parquet's row groups) in a thread, ahead.
Decoding releases the GIL. A dataset has at most one thread, which ends when idle; a forked child starts its own."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence

IDLE_S = 2.0
EXIT_WAIT_S = 10.0
"""Seconds to wait, when the interpreter exits, for the block that is being decoded."""


class DecodeAhead:
    """Thread that decodes blocks in a given order. Any thread may call its methods."""

    def __init__(self, decode: Callable[[int], None]) -> None:
        """Store the bound method `decode` weakly. Its errors are ignored: a reader of the block gets them again."""
        self._decode = weakref.WeakMethod(decode)
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        # Reentrant: garbage collection of a dataset, which closes this, may run in the thread that holds the lock.
        self._work = threading.Condition(threading.RLock())
        self._wanted: list[int] = []
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def want(self, blocks: Sequence[int], *, more: bool = False) -> None:
        """Decode these blocks in this order; with `more` after those of earlier calls, which are else dropped."""
        with self._work:
            self._wanted = [*reversed(blocks), *(self._wanted if more else ())]
            if not blocks:
                return
            self._is_closing = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-decode", daemon=True)
                self._thread.start()
            self._work.notify()

    def close(self, wait_s: float = 0.0) -> None:
        """End the thread; a later `want` starts another. `wait_s`: longest wait for the present block."""
        with self._work:
            self._wanted, self._is_closing, thread = [], True, self._thread
            self._work.notify()
        if thread is not None and wait_s and thread is not threading.current_thread():
            thread.join(wait_s)

    def _run(self) -> None:
        while True:
            with self._work:
                is_idle = not self._wanted and (self._is_closing or not self._work.wait(IDLE_S))
                if is_idle and not self._wanted:  # blocks may have come just when the wait ended
                    self._thread = None
                    return
                block = self._wanted.pop() if self._wanted else None
            decode = self._decode()
            if decode is not None and block is not None:
                with contextlib.suppress(Exception):
                    decode(block)
            del decode  # drop the reference to the dataset while waiting


_all: weakref.WeakSet[DecodeAhead] = weakref.WeakSet()


def _forked() -> None:
    for each in list(_all):
        each._reset()


def _exiting() -> None:
    """Wait for decoding threads: Python kills one that returns from C++ after its end, which may abort the process."""
    for each in list(_all):
        each.close(EXIT_WAIT_S)


os.register_at_fork(after_in_child=_forked)
atexit.register(_exiting)
