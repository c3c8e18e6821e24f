"""Lease of a ring entry in which user code builds a batch, before the size of the batch is known. A ring is the shared
memory through which a runner sends batches; an entry is its room for one batch.

    begin ──> the arena of an entry, under a weak reference ── place, place ... ──> leaves cut from the arena
    take  ──> if the batch lies exactly there and no other code can reach it: the entry, ready to publish

Building a batch in the ring is unsafe if user code still holds a tensor of the batch after the batch was published: the
entry then belongs to the training loop, and later to another batch. So a batch is published in place only if none of
its tensors is alive. All tensors and arrays (*leaves*) cut from an entry have one array as their base object, the
*arena*, and only the leaves keep the arena alive. `take` drops the batch and checks whether the arena was freed with
it. A generator's variable, a list of old batches, a thread, or a view of a view keeps the arena alive. Then the batch
is copied to another entry, and this entry stays unchanged until the last leaf is dropped. So neither a batch that user
code holds nor a delivered batch ever changes.

Every other failure also ends in the plain copy: leaves in another order or transformed, two batches begun before the
first was yielded, a batch that needs a larger ring. If a batch is dropped before it is yielded (an exception, an
abandoned epoch), its arena is freed, and the entry is used again from its start.

At most one entry is leased at a time, and only from rings with at least MIN_ENTRIES entries, so that the stream can
continue with the other entries if the leased one is never freed. A process that is forked while an arena is alive holds
views of the entry, and the parent cannot see when the child drops these views. So the entry is not used again while its
ring is in use, and no other entry is leased.
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
"""Value of `EntryLease.cursor` beyond any ring entry, set after a value of unknown size, so that no later tensor or
array of the same batch is placed in the entry."""
WORTH_FROM = 512 << 10
"""Size of the smallest ring entry that is leased, in bytes: copying half a MiB takes 9 us, the same as a lease (see
benchmarks/collate.md)."""
VAIN_LIMIT = 8
"""Number of consecutive batches that were built in a ring entry and had to be copied nevertheless, after which the rest
of the epoch is built in ordinary memory: the loader keeps or changes its batches."""


class EntryArena(np.ndarray[Any, np.dtype[np.uint8]]):
    """Array over all bytes of a leased ring entry: the base object of each tensor that user code builds in the entry.

    The arena has a class of its own because numpy shortens a chain of bases of one type: the tensors would then refer
    to another base, and the arena would be freed at once.
    """

    __slots__ = ()


class EntryLease:
    """Lease of one ring entry at a time. A runner has one such object, which serves only the thread that made it.

    wait: called when all entries are taken; returns True once an entry may be free, or False to build in ordinary
    memory instead. `wait` must not raise, because it is called inside user code.
    """

    def __init__(self, producer: Producer, wait: Callable[[], bool]) -> None:
        self.offered = False
        self.cursor = 0
        """Offset in the ring entry, in bytes, at which the batch's next tensor or array is placed."""
        self.built = 0
        """Number of batches that were built in a ring entry and published there without a copy."""
        self.copied = 0
        """Number of batches that were copied although one of their tensors or arrays was built in a ring entry."""
        self._producer = producer
        self._wait = wait
        self._thread = threading.get_ident()
        self._reserved: FreeEntry | None = None
        self._arena: Callable[[], EntryArena | None] = _none
        self._yielded = False  # a batch of this arena was yielded while user code still held tensors of it
        self._forked = False  # a forked child may hold views
        self._vain = 0
        self._leaf_ranges: list[
            tuple[int, int]
        ] = []  # (start, size) where the tensors of the last misplaced batch belonged

    def begin(self) -> EntryArena | None:
        """Return the arena in which user code builds the batch; None if the batch must be built in ordinary memory. The
        caller must keep a reference to the arena for as long as it uses `cursor`."""
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

    def place(self, arena: EntryArena, nbytes: int, *, guess: bool = False) -> int | None:
        """Return the offset in bytes at which a tensor or array of `nbytes` bytes is to be built in the arena, and move
        the cursor behind it. Return None if it must be built in ordinary memory.

        guess: True if the caller builds only some tensors of the batch in the arena, and does not know the sizes of
        those in between. The offset is then taken from the right layout of the last batch that had to be copied because
        its offsets were wrong: batches often have one layout.
        """
        offset = self._guess(nbytes) if guess and self._leaf_ranges else self.cursor
        if offset is None or offset + nbytes > len(arena):
            return None
        self.skip(offset - self.cursor + nbytes)
        return offset

    def skip(self, nbytes: int) -> None:
        self.cursor += (nbytes + ALIGN - 1) & -ALIGN

    def take(self, flat: FlatBatch, need: int) -> FreeEntry | None:
        """Return the leased ring entry if the batch `flat` may be published there: all of its leaves in the entry lie
        at their final offsets, and no other code holds one of them. Otherwise return None: the caller must copy `flat`
        to another entry.

        The caller must hold no other reference to the batch. need: smallest size of the entry in bytes.
        """
        reserved, arena = self._reserved, self._arena()
        if reserved is None:
            return None
        settled = flat.settle(arena) if arena is not None else 0
        if settled < 0 and arena is not None:
            self._leaf_ranges = flat.leaf_ranges(arena)
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
        """Record that this process is about to be forked: the child gets views of the entry if user code holds a part
        of it, so the entry is not used again while its ring is in use."""
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

    def _guess(self, nbytes: int) -> int | None:
        for start, size in self._leaf_ranges:
            if size == nbytes and start >= self.cursor:
                return start
        self._leaf_ranges = []
        return None


def _none() -> None:
    return None
