"""Batches on a CUDA device: page-locked rings, a stream of their own for the copies, events.

The stream holds copies and nothing else, so that no copy waits for the loop's kernels, and an event on it is as far off
as the copies before it. Tensors are allocated on that stream and used on the loop's: `record_stream` tells the
allocator, which would otherwise give their memory to the next copy as soon as the loop lets go of them, kernels that
still read them notwithstanding.

CUDA is initialised by the first ring that arrives, in the thread that iterates, and never by creating an `Appliance`:
what that starts must not inherit a context.

(With ROCm torch speaks of CUDA too, and so does this module.)
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from penstock.client.stream.device import DeviceEvent, copied
from penstock.proto.lane.ring import Ring

__all__ = ["CudaBackend", "PageLocks", "take_error"]

RING = "a ring"
FEWER = "Smaller batches and fewer workers need less: a ring for each worker, of 8 MiB or a few batches"


class CudaBackend:
    """A CUDA device; see penstock.client.stream.device.DeviceBackend.

    Args:
        device: without an index it is the device that is current in the thread that first copies.
        cuda: torch.cuda, or what a test puts in its place.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda
        self._stream: Any = None
        self._locks: PageLocks | None = None

    def _start(self) -> None:
        cuda = self._cuda
        if self.device.index is None:
            self.device = torch.device(self.device.type, cuda.current_device())
        self._stream = cuda.Stream(self.device)
        self._locks = PageLocks(cuda.cudart(), str(self.device), lambda: take_error(self.device))

    def lock(self, ring: Ring) -> None:
        if self._stream is None:
            self._start()
        assert self._locks is not None
        with self._cuda.device(self.device):
            self._locks.lock(ring)

    def copy(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], DeviceEvent]:
        if self._stream is None:
            self._start()
        with self._cuda.stream(self._stream):
            copies = copied(sources, self.device)
            event: DeviceEvent = self._cuda.Event()
            event.record(self._stream)  # type: ignore[attr-defined]
        return copies, event

    def order_after_copies(self, copies: Sequence[torch.Tensor], event: DeviceEvent) -> None:
        current = self._cuda.current_stream(self.device)
        current.wait_event(event)
        for copy in copies:
            copy.record_stream(current)


class Mapped(Protocol):
    """Memory of this process that is mapped for as long as the object lives."""

    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def map(self) -> mmap.mmap: ...


class PageLocks:
    """Page-locks memory, each piece until its object is gone.

    Only memory that is page-locked is copied while the thread that asked for it goes on. What cannot be locked stays as
    it is, and is copied from or to as pageable memory: slower, and right all the same.

    Args:
        runtime: torch.cuda.cudart(), for cudaHostRegister, cudaHostUnregister and cudaGetErrorString.
        device: its name, for the warning.
        take_error: called after a call has failed.
        what: what is locked, for the warning. less: how to need less of it.
    """

    def __init__(
        self, runtime: Any, device: str, take_error: Callable[[], None], what: str = RING, less: str = FEWER
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._take_error = take_error
        self._what, self._less = what, less
        self._told = False

    def lock(self, memory: Mapped) -> bool:
        """Return whether it is page-locked now; the first time that something is not, a UserWarning says so."""
        runtime = self._runtime
        error = runtime.cudaHostRegister(memory.address, memory.nbytes, 0)
        if not int(error):
            # The finalizer holds the mapping: it is unlocked before it can go. At exit the kernel does both.
            weakref.finalize(memory, _unlock, runtime, memory.address, memory.map, os.getpid()).atexit = False
            return True
        self._take_error()
        if not self._told:
            self._told = True
            warnings.warn(
                f"{self._what} of {memory.nbytes:,} bytes could not be page-locked for {self._device}: "
                f"{runtime.cudaGetErrorString(error)} ({int(error)}); it is copied as pageable memory instead, "
                "which is slower. What may be locked is bounded by free memory, by a container's memory limit and by "
                f"`ulimit -l` (docker run --ulimit memlock=-1). {self._less}",
                UserWarning,
                stacklevel=2,
            )
        return False


def take_error(device: torch.device) -> None:
    """Have the error of a failed call raised here, by a kernel of ours: the runtime keeps it for whoever launches the
    next one, which would be the loop."""
    try:
        torch.empty(1, device=device).fill_(0)
    except RuntimeError:
        pass


def _unlock(runtime: Any, address: int, mapping: mmap.mmap, pid: int) -> None:
    """Runs when the memory's object has died, which is after the last copy; `mapping` only has to live until then."""
    if os.getpid() == pid:  # a fork drops its Ring too, and must not touch CUDA
        runtime.cudaHostUnregister(address)
