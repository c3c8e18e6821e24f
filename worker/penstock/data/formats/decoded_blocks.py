"""Memory limit shared by the decoded blocks of all readers in this process. A block is here what a reader keeps in
memory and can drop: a row group of Parquet, a record batch of Arrow or buffers of it.

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
    """Interface of a reader that keeps decoded blocks in memory: the method that BlockMemory calls."""

    def drop(self, block: int, /) -> None:
        """Drop a block from memory, if the reader still has it. Any thread may call this, so it must not wait for a
        lock."""


class BlockMemory:
    """List of the decoded blocks that all readers of a process keep in memory, in the order of their last use. If all
    blocks together exceed a limit, blocks are dropped. Thread-safe. `MEMORY` becomes empty in a forked child."""

    def __init__(self, limit: int = DECODED_BYTES) -> None:
        self.limit = limit
        """Largest number of bytes of all blocks together. A single block is kept even if it exceeds the limit."""
        self._numbers = itertools.count()
        self.reset()

    def reset(self) -> None:
        """Forget all blocks and readers, without calling `drop`. Called for a new object, and in a forked child, whose
        readers are the parent's."""
        # Reentrant: garbage collection of a reader may run in the thread that holds this lock.
        self._lock = threading.RLock()
        self._blocks: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Number of bytes of each block, by (number of its reader, number of the block), the least recently used block
        first."""
        self._released: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Blocks that are not needed soon, by (number of the reader, number of the block). They are dropped before all
        others."""
        self._owners: dict[int, weakref.ref[BlockOwner]] = {}
        self._ended: deque[int] = deque()
        """Numbers of readers that were garbage-collected or removed. Their blocks are forgotten the next time that a
        block is added or room is made: a finalizer may run at any point, so it only appends here."""
        self.nbytes = 0
        """Number of bytes of all counted blocks together."""

    def raise_limit(self, limit: int | None) -> None:
        """Raise the limit to `limit` bytes, if it is lower now. None changes nothing."""
        if limit is not None:
            self.limit = max(self.limit, limit)

    def add_owner(self, owner: BlockOwner) -> int:
        """Register a reader, and return its number for the other methods."""
        number, ended = next(self._numbers), self._ended
        with self._lock:
            self._owners[number] = weakref.ref(owner, lambda _: ended.append(number))
        return number

    def used(self, number: int, blocks: Iterable[int]) -> None:
        """Mark these blocks of reader `number` as the most recently used ones."""
        with self._lock:
            for block in blocks:
                if (number, block) in self._blocks:
                    self._blocks.move_to_end((number, block))
                    self._released.pop((number, block), None)

    def make_room(self, nbytes: int) -> None:
        """Drop blocks until another block of `nbytes` bytes, which the caller is about to decode, fits below the limit.

        Released blocks are dropped also if the limit is not reached, until `nbytes` bytes are free or all of them are
        dropped: the new block then reuses their memory.
        """
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
        """Count a block of `nbytes` bytes that reader `number` has decoded, and drop other blocks if the limit is
        exceeded."""
        with self._lock:
            if number not in self._owners:  # the reader was registered before a fork
                return
            self.nbytes += nbytes - self._blocks.pop((number, block), 0)
            self._blocks[number, block] = nbytes
        self._drop(self.limit, keep=1)

    def release(self, number: int, block: int) -> None:
        """Mark a block of reader `number` as not needed soon. It is not dropped now: `make_room` drops it just before
        another block is decoded, so that the allocator reuses its memory and does not ask the kernel for more."""
        with self._lock:
            if (number, block) in self._blocks:
                self._released[number, block] = None

    def remove_owner(self, number: int) -> None:
        """Forget all blocks of reader `number`, which has dropped them itself."""
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
"""List of the decoded blocks in this process, with the limit of their bytes."""

os.register_at_fork(after_in_child=MEMORY.reset)
