"""Lease of a ring entry (room for one batch in shared memory) in which user code builds a batch of still unknown size.

    begin ──> the arena of an entry, under a weak reference ── place, place ... ──> leaves cut from the arena
    take  ──> if the batch lies exactly there and no other code can reach it: the entry, ready to publish

A published entry belongs to the training loop, and later to another batch, so user code must hold none of its tensors.
All tensors and arrays (*leaves*) cut from an entry have one array as base object, the *arena*, which only they keep
alive. `take` drops the batch and checks whether the arena was freed with it. If not (a generator's variable, a list of
old batches, a thread, a view of a view), the batch is copied to another entry, and this one stays unchanged until the
last leaf is dropped.

Every other failure also ends in the plain copy: leaves in another order or transformed, two batches begun before the
first was yielded, a batch that needs a larger ring. If a batch is dropped before it is yielded, its entry is used
again.

At most one entry is leased, and only from rings with at least MIN_ENTRIES, so that the stream continues if it is never
freed. After a fork with a live arena the parent cannot see when the child drops its views. So the entry is not used
again while its ring is in use, and no other is leased.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.proto.batch.flatten import ALIGN, FlatBatch
from penstock.proto.lane.producer import FreeEntry, Producer
from penstock.proto.lane.ring import MIN_ENTRIES

NOWHERE = 1 << 62
"""Value of `EntryLease.cursor` after a value of unknown size: no later leaf of the batch is placed in the entry."""
WORTH_FROM = 512 << 10
"""Size in bytes of the smallest entry that is leased: copying it takes 9 us, as a lease does
(benchmarks/collate.md)."""
VAIN_LIMIT = 8
"""Consecutive copied batches after which the rest of the epoch is built in ordinary memory: the loader keeps its
batches."""


class EntryArena(np.ndarray[Any, np.dtype[np.uint8]]):
    """Array over all bytes of a leased entry. A class of its own, because numpy shortens a chain of bases of one type:
    the tensors would refer to another base, and the arena would be freed at once."""

    __slots__ = ()


class EntryLease:
    """Lease of one ring entry at a time, for the thread that made it. wait: called when all entries are taken; returns
    True once one may be free, False to use ordinary memory; must not raise, because it is called in user code."""

    def __init__(self, producer: Producer, wait: Callable[[], bool]) -> None:
        self.offered = False
        self.cursor = 0
        """Offset in the ring entry, in bytes, of the batch's next leaf."""
        self.built = 0
        """Number of batches that were built in a ring entry and published there."""
        self.copied = 0
        """Number of batches that were copied although a leaf was built in a ring entry."""
        self._producer = producer
        self._wait = wait
        self._thread = threading.get_ident()
        self._reserved: FreeEntry | None = None
        self._arena: Callable[[], EntryArena | None] = _none
        self._yielded = False  # a batch of this arena was yielded while user code still held tensors of it
        self._forked = False  # a forked child may hold views
        self._vain = 0

    def begin(self) -> EntryArena | None:
        """Return the arena in which user code builds the batch; None: in ordinary memory. The caller keeps it while it
        uses `cursor`."""
        if not self.offered or threading.get_ident() != self._thread:
            return None
        arena = self._arena()
        if arena is not None:
            return None if self._yielded or self._forked else arena
        reserved = self._reserved
        if reserved is not None and not self._producer.is_current(reserved):
            self._return()
            reserved = None
        if self._forked or self._vain >= VAIN_LIMIT:
            return None
        if reserved is None:
            reserved = self._reserve()
            if reserved is None:
                return None
            self._reserved = reserved
        arena = EntryArena(reserved.ring.entry_bytes, np.uint8, reserved.ring.map, reserved.offset)
        self._arena = weakref.ref(arena)
        self._yielded = False
        self.cursor = 0
        return arena

    def place(self, arena: EntryArena, nbytes: int) -> int | None:
        """Return the offset in bytes of a leaf in the arena, and move the cursor behind it; None: in ordinary memory.
        A leaf of ordinary memory between two in the arena moves the second one, so such a batch is copied."""
        offset = self.cursor
        if offset + nbytes > len(arena):
            return None
        self.skip(nbytes)
        return offset

    def skip(self, nbytes: int) -> None:
        self.cursor += (nbytes + ALIGN - 1) & -ALIGN

    def take(self, flat: FlatBatch, need: int) -> FreeEntry | None:
        """Return the leased entry if the batch may be published there; otherwise None: the caller must copy it. The
        caller must hold no other reference to the batch. need: smallest size of the entry in bytes."""
        reserved, arena = self._reserved, self._arena()
        if reserved is None:
            return None
        settled = flat.settle(arena) if arena is not None else 0
        del arena
        if self._arena() is None and not self._forked:
            if need <= reserved.ring.entry_bytes and self._producer.is_current(reserved):
                self._reserved = None
                if settled:
                    self.built += 1
                    self._vain = 0
                return reserved
            if not settled:
                self._return()
        if settled:
            self._yielded = True
            self._vain += 1
            self.copied += 1
        return None

    def release(self) -> None:
        self._vain = 0
        if self._reserved is not None and self._arena() is None and not self._forked:
            self._return()

    def forking(self) -> None:
        """Record that this process is about to be forked: the entry is then not used again while its ring is in use."""
        if self._arena() is not None:
            self._forked = True

    def _reserve(self) -> FreeEntry | None:
        producer = self._producer
        # The first batch is always copied, because the size of an entry is known only after it.
        while producer.ring_entries >= MIN_ENTRIES and producer.entry_bytes >= WORTH_FROM:
            reserved = producer.reserve_current()
            if reserved is not None or not self._wait():
                return reserved
        return None

    def _return(self) -> None:
        assert self._reserved is not None
        self._producer.return_unused(self._reserved)
        self._reserved = None
        self._forked = False


def _none() -> None:
    return None
