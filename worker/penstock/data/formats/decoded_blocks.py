"""Memory limit shared by the decoded blocks of all readers in this process: row groups of Parquet, record batches of
Arrow or buffers of them. Readers keep their own blocks, which are freed with them; this module only counts bytes, and
calls `drop` for the least recently used block of all readers."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

DECODED_BYTES = 256 << 20
"""Default of the most bytes of decoded blocks that a process keeps in memory."""


class BlockMemory:
    """Decoded blocks of all readers, by their last use. Thread-safe. `MEMORY` is empty in a forked child."""

    def __init__(self, limit: int = DECODED_BYTES) -> None:
        self.limit = limit
        """A single block is kept even if it exceeds the limit."""
        self._numbers = itertools.count()
        self.reset()

    def reset(self) -> None:
        """Forget all without calling `drop`, also in a forked child, whose readers are the parent's."""
        # Reentrant: garbage collection of a reader may run in the thread that holds this lock.
        self._lock = threading.RLock()
        self._blocks: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Bytes by (reader, block), the least recently used block first."""
        self._released: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Blocks that are not needed soon, by (reader, block). They are dropped before all others."""
        self._owners: dict[int, weakref.ref[Any]] = {}
        self._ended: deque[int] = deque()
        """Ended readers, whose blocks are forgotten later: a finalizer may run at any point, so it only appends."""
        self.nbytes = 0

    def raise_limit(self, limit: int | None) -> None:
        if limit is not None:
            self.limit = max(self.limit, limit)

    def add_owner(self, owner: Any) -> int:
        """`owner.drop(block)` drops a block, if the reader still has it. Any thread may call it: it must not wait for a
        lock."""
        number, ended = next(self._numbers), self._ended
        with self._lock:
            self._owners[number] = weakref.ref(owner, lambda _: ended.append(number))
        return number

    def used(self, number: int, blocks: Iterable[int]) -> None:
        with self._lock:
            for block in blocks:
                if (number, block) in self._blocks:
                    self._blocks.move_to_end((number, block))
                    self._released.pop((number, block), None)

    def make_room(self, nbytes: int) -> None:
        """Drop blocks until another of `nbytes` bytes, about to be decoded, fits. Released blocks are dropped also
        below the limit, up to `nbytes` bytes: the new block then reuses their memory."""
        with self._lock:
            self._forget_ended()
            freed = 0
            while self._released and freed < nbytes:
                key, _ = self._released.popitem(last=False)
                freed += self._blocks.get(key, 0)
                if key in self._blocks:
                    self._blocks.move_to_end(key, last=False)
            limit = min(self.limit - nbytes, self.nbytes - freed)
        self._drop(limit, keep=0)

    def add(self, number: int, block: int, nbytes: int) -> None:
        """Count a decoded block, and drop others if the limit is exceeded."""
        with self._lock:
            if number not in self._owners:  # the reader was registered before a fork
                return
            self.nbytes += nbytes - self._blocks.pop((number, block), 0)
            self._blocks[number, block] = nbytes
        self._drop(self.limit, keep=1)

    def release(self, number: int, block: int) -> None:
        """Mark a block as not needed soon. `make_room` drops it just before another is decoded, so that the allocator
        reuses its memory and does not ask the kernel for more."""
        with self._lock:
            if (number, block) in self._blocks:
                self._released[number, block] = None

    def remove_owner(self, number: int) -> None:
        self._ended.append(number)

    def _drop(self, limit: int, keep: int) -> None:
        dropped = []
        with self._lock:
            self._forget_ended()
            while self.nbytes > limit and len(self._blocks) > keep:
                (number, block), nbytes = self._blocks.popitem(last=False)
                self._released.pop((number, block), None)
                self.nbytes -= nbytes
                dropped.append((self._owners[number](), block))
        for owner, block in dropped:
            if owner is not None:
                owner.drop(block)

    def _forget_ended(self) -> None:
        ended = set()
        while self._ended:
            ended.add(self._ended.popleft())
        if not ended:
            return
        for key in [key for key in self._blocks if key[0] in ended]:
            self.nbytes -= self._blocks.pop(key)
        for number in ended:
            self._owners.pop(number, None)


MEMORY = BlockMemory()

os.register_at_fork(after_in_child=MEMORY.reset)
