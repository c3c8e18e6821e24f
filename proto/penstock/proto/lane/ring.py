"""Ring: shared memory divided into entries of one size, which one process fills and another reads in place.

A ring is one `memfd`, which has no name and is freed with the last process that holds it. It is sealed against
shrinking and growing before it is sent; the reader checks the seals, because a peer that truncated a mapped ring would
kill the reader with SIGBUS.

Its maker allocates all pages, so that a lack of memory is an error and not a SIGBUS later, and faults them in: page
faults on fresh shared memory make torch's own DataLoader slow at large batches. The reader checks that the pages exist,
because its own accesses would allocate those of a large empty ring.

A mapping is never closed explicitly: it ends with the last tensor of the training loop that is a view of it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref

from penstock.proto.errors import LaneLostError, malformed
from penstock.runtime.process.forks import silence, unshare
from penstock.runtime.process.free_memory import free_memory

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PAGE = mmap.PAGESIZE
_BLOCK = 512
MAX_ENTRIES = 32
MIN_ENTRIES = 4
"""Usual smallest number of entries of a ring: one is being filled, one is being sent, and the loop uses two."""
FEWEST_ENTRIES = 3
"""The same if memory is short. With fewer, a loop that keeps its last batch would leave no entry to fill."""
GIANT_BYTES = 512 << 20
"""Bytes from which the ring of a batch has a single entry, and the loop gets a copy: three entries in each of the
runner's and the receiver's rings would take six times the batch's size."""
RING_BYTES = 8 << 20
"""Target size of a ring in bytes: it fits the last-level cache, from which the reader then reads."""
UNCHECKED_BYTES = 64 << 20
"""Size in bytes up to which a ring is made without a check of the free memory, which takes 0.1 to 0.4 ms."""
MOST_OF_FREE = 0.75
"""Largest share of the free memory that a ring, or all rings of a RingBudget, may take."""
BOX_BYTES = 512 << 20
"""Bytes that all rings of a box together may have: enough for 64 worker slots with 8 MiB each."""


def grown(nbytes: int, previous: int, most: int) -> int:
    """Return the size of a new ring's entries: at least twice `previous`, so that slightly larger batches do not each
    start another ring, but doubling stops at `most`, and below GIANT_BYTES."""
    doubled = min(2 * previous, GIANT_BYTES - PAGE)
    return min(max(nbytes, doubled), max(most, nbytes))


def ring_bytes(rings: int) -> int:
    """Return the largest size of each ring of a box. A ring whose FEWEST_ENTRIES entries need more may exceed it."""
    return BOX_BYTES // max(rings, 1)


def entries_for(entry_bytes: int, limit: int = BOX_BYTES) -> int:
    """Return a ring's number of entries: of about RING_BYTES, MIN_ENTRIES to MAX_ENTRIES; down to FEWEST_ENTRIES, if it
    would exceed `limit` bytes; 1 from GIANT_BYTES on."""
    size = max(entry_bytes, 1)
    if size >= GIANT_BYTES:
        return 1
    wanted = max(MIN_ENTRIES, min(MAX_ENTRIES, RING_BYTES // size))
    return max(FEWEST_ENTRIES, min(wanted, limit // size))


class Ring:
    """Ring mapped in this process, with entries of whole pages. `fd` is -1 once closed, or mapped by a Consumer."""

    map: mmap.mmap
    view: memoryview
    address: int

    def __init__(self, fd: int, entry_bytes: int, entries: int, *, mapped: bool = True) -> None:
        """`mapped` False: for a process that only passes the ring on, until `attach` maps it."""
        self.fd = fd
        self.entry_bytes = entry_bytes
        self.entries = entries
        if mapped:
            self.attach()

    def attach(self) -> None:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.map = mmap.mmap(
            self.fd, self.entry_bytes * self.entries, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @property
    def nbytes(self) -> int:
        return self.entries * self.entry_bytes

    @classmethod
    def create(cls, entry_bytes: int, entries: int) -> Ring:
        """Return a new, sealed ring of zeros. Raises OSError if memory is short: all pages are allocated at once, and
        too many, perhaps by a peer's choice, would make the kernel kill a process."""
        entry_bytes = max(PAGE, (entry_bytes + PAGE - 1) // PAGE * PAGE)
        size = entry_bytes * entries
        if size > UNCHECKED_BYTES and size > (free := int(MOST_OF_FREE * free_memory())):
            raise _too_large(size, f"it may take {free:,} bytes, {MOST_OF_FREE:.0%} of the free memory")
        fd = os.memfd_create("penstock-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)  # MAP_POPULATE alone ignores pages that it cannot get
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, entry_bytes, entries)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise _too_large(size, error.strerror, error.errno) from error
            raise

    @classmethod
    def open(cls, fd: int, entry_bytes: int, entries: int) -> Ring:
        """Map a ring that a peer made. Raises ProtocolError unless it is sealed, of ordinary pages, as large as
        announced and fully allocated; LaneLostError if this process lacks address space."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise malformed(f"a ring (shared buffer) must be a memfd: {error}") from error
        if seals & _SEALS != _SEALS:
            raise malformed("a ring (shared buffer) must be sealed, or it could be truncated while read")
        if (page := os.fstatvfs(fd).f_bsize) != PAGE:
            # With huge pages the maker could punch a hole and use up the last free huge page: a read of the hole would
            # then end the reader with SIGBUS, which no seal prevents.
            raise malformed(f"a ring (shared buffer) must be of pages of {PAGE} bytes, got huge pages of {page}")
        status = os.fstat(fd)
        size = status.st_size
        if entry_bytes <= 0 or entries <= 0 or entry_bytes % PAGE or size != entry_bytes * entries:
            raise malformed(f"a ring of {size} bytes must have entries of whole pages, not {entries} of {entry_bytes}")
        if entries > MAX_ENTRIES:
            raise malformed(f"a ring (shared buffer) must have <= {MAX_ENTRIES} entries, got {entries}")
        # Half, because st_blocks is not exact (it was once a page short). Half is enough: a peer then pays as much
        # memory as this end.
        if status.st_blocks * _BLOCK < size // 2:
            raise malformed(f"all {size} bytes of a ring must be allocated, got {status.st_blocks * _BLOCK}")
        try:
            return cls(fd, entry_bytes, entries)
        except PermissionError as error:  # sealed against writing, or opened for reading only
            raise malformed(f"a ring (shared buffer) cannot be mapped: {error}") from error
        except OSError as error:
            raise LaneLostError(f"a ring of {size:,} bytes cannot be mapped: {error}. Raise ulimit -v") from error

    def forked(self) -> None:
        """Make the memory private in a process that user code has forked, unless the descriptor is closed."""
        if self.fd >= 0:
            if hasattr(self, "map"):
                unshare(self.map, self.fd)
            silence(self.fd)

    def close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RingBudget:
    """Limit on all rings of a process, whose sizes peers choose, until their last views are gone. 0: MOST_OF_FREE."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit or int(MOST_OF_FREE * free_memory())
        self._used = 0

    def create(self, entry_bytes: int, entries: int) -> Ring:
        """Raises OSError if memory is short or the ring would exceed the limit."""
        size = max(PAGE, (entry_bytes + PAGE - 1) // PAGE * PAGE) * entries
        if self._used + size > self._limit:
            raise _too_large(size, f"all rings of this process may take {self._limit:,} bytes, and have {self._used:,}")
        ring = Ring.create(entry_bytes, entries)
        self._used += size
        weakref.finalize(ring.map, self._give_back, size)
        return ring

    def _give_back(self, size: int) -> None:
        self._used -= size


def _too_large(size: int, why: str | None, number: int | None = errno.ENOMEM) -> OSError:
    remedy = "Make smaller batches, or give the process more memory"
    return OSError(number, f"a ring (buffer for batches) of {size:,} bytes cannot be made: {why}. {remedy}")
