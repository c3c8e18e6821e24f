"""A device whose copies happen when the test says so, and a CUDA runtime that only takes notes.

A copy here is what it is to a DMA engine: an address and a length, read when its turn comes and not before. So a slot
that is given back too early shows in the bytes, and a ring that is unlocked, or let go of, too early is caught.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

import torch

from penstock.client.stream.cuda import PageLocks
from penstock.client.stream.device import DeviceEvent, copied
from penstock.proto.lane.ring import Ring

__all__ = ["FakeBackend", "FakeCopy", "FakeRuntime", "in_a_ring"]


class FakeRuntime:
    """Fake of torch.cuda.cudart(), with what penstock.client.stream.cuda.PageLocks needs."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        """Address -> bytes, of what is page-locked now."""
        self.unlocked: list[int] = []
        self.error = 0
        """Result of the next registrations; 0 = success."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        if not self.error:
            assert address not in self.locked
            self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        self.unlocked.append(address)
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error number {error}"

    def covers(self, address: int, nbytes: int) -> bool:
        """The whole range is page-locked."""
        return any(start <= address and address + nbytes <= start + size for start, size in self.locked.items())


class FakeCopy:
    """The event of one `copy`."""

    def __init__(self, backend: FakeBackend, sources: Sequence[torch.Tensor]) -> None:
        self.backend = backend
        self.jobs = [(source.data_ptr(), source.nbytes) for source in sources]
        self.copies = copied(sources, backend.device)
        for copy in self.copies:  # what has not been copied yet reads as zeros
            ctypes.memset(copy.data_ptr(), 0, copy.nbytes)
        self.done = False
        self.queries = 0

    def happen(self) -> None:
        """Read the sources now."""
        for (address, nbytes), copy in zip(self.jobs, self.copies, strict=True):
            if nbytes:
                assert self.backend.runtime.covers(address, nbytes), "a copy out of a ring that is not locked"
                ctypes.memmove(copy.data_ptr(), address, nbytes)
        self.copies = []
        self.done = True

    def query(self) -> bool:
        backend = self.backend
        if backend.failure is not None:
            raise backend.failure
        self.queries += 1
        if backend.patience is not None and self.queries > backend.patience:
            while not self.done:
                backend.finish(1)
        return self.done


class FakeBackend:
    """See penstock.client.stream.device.DeviceBackend.

    Args:
        patience: how often a copy's event may be asked in vain before the copy happens. None: it happens only by
            `finish`.
    """

    def __init__(self, patience: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.patience = patience
        self.runtime = FakeRuntime()
        self.locks = PageLocks(self.runtime, "fake:0", self._nothing)
        self.failure: RuntimeError | None = None
        """Raised by all events."""
        self.started: list[FakeCopy] = []
        self.migrated: list[DeviceEvent] = []
        self._queue: deque[FakeCopy] = deque()

    def _nothing(self) -> None:
        pass

    def lock(self, ring: Ring) -> None:
        self.locks.lock(ring)

    def copy(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], DeviceEvent]:
        copy = FakeCopy(self, sources)
        self.started.append(copy)
        self._queue.append(copy)
        return list(copy.copies), copy

    def order_after_copies(self, copies: Sequence[torch.Tensor], event: DeviceEvent) -> None:
        self.migrated.append(event)

    def finish(self, count: int | None = None) -> None:
        """Let the oldest copies happen, by default all."""
        for _ in range(len(self._queue) if count is None else count):
            self._queue.popleft().happen()


def in_a_ring(address: int) -> bool:
    """Return True if an address is mapped as part of a ring."""
    with open("/proc/self/maps") as file:
        for line in file:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return "penstock-ring" in line
    return False
