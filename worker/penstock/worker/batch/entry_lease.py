"""The ring entry that the user's code builds a batch in, before anybody knows what the batch will be.

    begin ──> the arena of a slot, under a weak reference ── place, place ... ──> leaves cut from the arena
    take  ──> does the batch that came lie just there, and can nobody else reach it? Then the slot, to be published

The danger of a batch that is built in the ring is whoever still holds a piece of it once it was published: the slot is
the training loop's then, and later another batch's. So nothing is published in place while anything of it is alive.
All leaves cut from a slot have one array as their base object, the *arena*, which only they keep alive; `take` drops
the batch and looks whether the arena died with it. A generator's variable, a list of old batches, a thread, a view of a
view: each keeps the arena alive, the batch is then copied to another slot as it always was, and this slot stays with
its holder, unchanged, until the last piece is dropped. Whoever holds a batch never sees it change, and what was
delivered never changes under the loop.

Everything that can go wrong ends there, in the plain copy: leaves in another order or transformed, two batches begun
before the first was yielded, a batch that needs a larger ring. A batch dropped on the way (an exception, an epoch that
was left) kills its arena, and the slot is used again from its start.

At most one slot is away at a time, and only of rings that can spare it: the others suffice for the stream to go on,
whatever becomes of that one. A process that is forked while an arena is alive has views of shared memory that nobody
can see die: that slot is written off for as long as its ring is in use, and no other one is lent.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.proto.batch.flatten import ALIGN, FlatBatch
from penstock.proto.lane.endpoints import FreeEntry, Producer
from penstock.proto.lane.ring import MIN_ENTRIES

__all__ = ["NOWHERE", "VAIN_LIMIT", "WORTH_FROM", "EntryArena", "EntryLease"]

NOWHERE = 1 << 62
"""A cursor from which nothing fits any more."""
WORTH_FROM = 512 << 10
"""Bytes of a ring entry below which none is lent: copying half a MiB takes 9 us, and doing without it as long (see
benchmarks/collate.md)."""
VAIN_LIMIT = 8
"""Batches in a row that were built in a slot and had to be copied, after which the rest of the epoch is built in
ordinary memory: this loader keeps its batches, or changes them, and will go on to do so."""


class EntryArena(np.ndarray[Any, np.dtype[np.uint8]]):
    """All bytes of a leased slot; the base object of the leaves in it.

    A class of its own, for numpy shortens a chain of bases that are of one type: the leaves would then hang on
    something else, and the arena would die at once.
    """

    __slots__ = ()


class EntryLease:
    """One for each runner; the thread that makes it is the only one that it serves.

    wait: called when all slots are taken; returns once one may be free, or False to build in ordinary memory instead.
    It must not raise, for it is called inside user code.
    """

    def __init__(self, producer: Producer, wait: Callable[[], bool]) -> None:
        self.offered = False
        """Whether user code that runs now is making a batch that will be streamed."""
        self.cursor = 0
        """Bytes from the start of the slot to where the next leaf goes."""
        self.built = 0
        """Batches published where they were built."""
        self.copied = 0
        """Batches of which a leaf was built in a slot, in vain."""
        self._producer = producer
        self._wait = wait
        self._thread = threading.get_ident()
        self._slab: FreeEntry | None = None
        self._arena: Callable[[], EntryArena | None] = _none
        self._yielded = False  # a batch of this arena came, and it was not the last piece
        self._forked = False  # with a child that may hold views
        self._vain = 0
        self._places: list[tuple[int, int]] = []  # (start, size) of the leaves that last lay wrong, as they should have

    def begin(self) -> EntryArena | None:
        """The slot for the batch that is being built, or None: build it in ordinary memory.

        Hold the result for as long as `cursor` shall stand.
        """
        if not self.offered or threading.get_ident() != self._thread:
            return None
        arena = self._arena()
        if arena is not None:
            return None if self._yielded or self._forked else arena
        slab = self._slab
        if slab is not None and not self._producer.is_current(slab):
            self._return()
            slab = None
        if self._forked or self._vain >= VAIN_LIMIT:
            return None
        if slab is None:
            slab = self._reserve()
            if slab is None:
                return None
            self._slab = slab
        arena = EntryArena(slab.ring.entry_bytes, np.uint8, slab.ring.map, slab.offset)
        self._arena = weakref.ref(arena)
        self._yielded = False
        self.cursor = 0
        return arena

    def place(self, arena: EntryArena, nbytes: int, *, guess: bool = False) -> int | None:
        """Where in the arena a leaf of `nbytes` goes, None if it must go elsewhere; the cursor moves behind it.

        guess: the caller does not know what else lies between the leaves that it asks for; go by the last batch.
        """
        at = self._guess(nbytes) if guess and self._places else self.cursor
        if at is None or at + nbytes > len(arena):
            return None
        self.skip(at - self.cursor + nbytes)
        return at

    def skip(self, nbytes: int) -> None:
        """Move the cursor over a leaf that lies elsewhere and will be copied in."""
        self.cursor += (nbytes + ALIGN - 1) & -ALIGN

    def take(self, flat: FlatBatch, need: int) -> FreeEntry | None:
        """The leased slot, if `flat` may be written there: then all that lies in it is `flat`'s, at its place.

        Call it with no other reference to the batch. None: reserve another slot. Either way `flat` can be written.
        need: bytes that the slot must have.
        """
        slab, arena = self._slab, self._arena()
        if slab is None:
            return None
        settled = flat.settle(arena) if arena is not None else 0
        if settled < 0 and arena is not None:
            self._places = flat.places(arena)
        del arena
        if self._arena() is None and not self._forked:
            if need <= slab.ring.entry_bytes and self._producer.is_current(slab):
                self._slab = None
                if settled:
                    self.built += 1
                    self._vain = 0
                return slab
            if not settled:
                self._return()
        if settled:
            self._yielded = True
            self._vain += 1
            self.copied += 1
        return None

    def release(self) -> None:
        """An epoch is over: give back a slot that nobody holds."""
        self._vain = 0
        if self._slab is not None and self._arena() is None and not self._forked:
            self._return()

    def forking(self) -> None:
        """This process is about to be forked."""
        if self._arena() is not None:
            self._forked = True

    def _reserve(self) -> FreeEntry | None:
        producer = self._producer
        # The first batch is copied: only then is it known how large a slot must be.
        while producer.ring_slots >= MIN_ENTRIES and producer.entry_bytes >= WORTH_FROM:
            slab = producer.reserve_current()
            if slab is not None or not self._wait():
                return slab
        return None

    def _return(self) -> None:
        assert self._slab is not None
        self._producer.return_unused(self._slab)
        self._slab = None
        self._forked = False

    def _guess(self, nbytes: int) -> int | None:
        """Where the next leaf of this size belonged in the last batch that lay wrong."""
        for start, size in self._places:
            if size == nbytes and start >= self.cursor:
                return start
        self._places = []
        return None


def _none() -> None:
    return None
