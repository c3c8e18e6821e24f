"""Memory limit shared by the decoded blocks of all readers in this process. A block is a row group of Parquet, or a
record batch of Arrow.

Readers keep their own blocks; this module only counts the blocks' bytes and calls `drop` of a reader. So a reader's
blocks are freed with the reader. The least recently used block of all readers is dropped first.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Protocol

__all__ = ["DECODED_BYTES", "MEMORY", "BlockMemory", "BlockOwner"]

DECODED_BYTES = 256 << 20
"""Default of the largest number of bytes of decoded blocks that a process keeps in memory."""


class BlockOwner(Protocol):
    """Reader that keeps decoded blocks."""

    def drop(self, block: int) -> None:
        """Drop a block from memory, if the reader still has it. Any thread may call this, so it must not wait for a
        lock."""


class BlockMemory:
    """Count of the decoded blocks that readers keep, in the order of their last use (LRU). Safe for threads; empty in a
    forked child."""

    def __init__(self, limit: int = DECODED_BYTES) -> None:
        self.limit = limit
        """Largest number of bytes of all blocks together. A single block is kept even if it exceeds the limit."""
        self._numbers = itertools.count()
        self.reset()

    def reset(self) -> None:
        """Forget all blocks."""
        # Reentrant: garbage collection of a reader may run in the thread that holds this lock.
        self._lock = threading.RLock()
        self._blocks: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Bytes of each block, by (owner, block), the least recently used one first."""
        self._released: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Blocks that are not needed soon, which are dropped before all others."""
        self._owners: dict[int, weakref.ref[BlockOwner]] = {}
        self._ended: deque[int] = deque()
        """Owners that were garbage-collected. Their blocks are forgotten at the next call: a finalizer may run at any
        point, so it only appends here."""
        self.nbytes = 0
        """Bytes of all blocks."""

    def raise_limit(self, limit: int | None) -> None:
        """Raise the limit to `limit` bytes, if it is lower now; None: do nothing."""
        if limit is not None:
            self.limit = max(self.limit, limit)

    def add_owner(self, owner: BlockOwner) -> int:
        """Register a reader, and return its number for the other methods."""
        number, ended = next(self._numbers), self._ended
        with self._lock:
            self._owners[number] = weakref.ref(owner, lambda _: ended.append(number))
        return number

    def used(self, number: int, blocks: Iterable[int]) -> None:
        """Mark these blocks as the most recently used ones."""
        with self._lock:
            for block in blocks:
                if (number, block) in self._blocks:
                    self._blocks.move_to_end((number, block))
                    self._released.pop((number, block), None)

    def make_room(self, nbytes: int) -> None:
        """Drop blocks until a block of `nbytes`, which is decoded next, fits below the limit. Released blocks of at
        least `nbytes` in total are dropped in any case."""
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
        """Count a block, and drop others if the limit is exceeded."""
        with self._lock:
            if number not in self._owners:  # the reader was registered before a fork
                return
            self.nbytes += nbytes - self._blocks.pop((number, block), 0)
            self._blocks[number, block] = nbytes
        self._drop(self.limit, keep=1)

    def release(self, number: int, block: int) -> None:
        """Mark a block as not needed soon: `make_room` drops it before the next block is decoded, because memory that
        is freed just before it is allocated again need not come from the kernel."""
        with self._lock:
            if (number, block) in self._blocks:
                self._released[number, block] = None

    def remove_owner(self, number: int) -> None:
        """Forget all blocks of a reader that has dropped them itself."""
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
"""Block memory of this process."""

os.register_at_fork(after_in_child=MEMORY.reset)
