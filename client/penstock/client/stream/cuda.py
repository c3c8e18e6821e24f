"""Delivery of batches on a CUDA device: page-locked rings, a separate stream for the copies, and events. (With ROCm,
torch also uses the name CUDA.)

On a stream of their own no copy waits for the loop's kernels, and an event waits only for the copies before it.
`record_stream` tells the allocator that the loop's stream uses the tensors: otherwise it would give a dropped tensor's
memory to the next copy while kernels still read it. CUDA is initialised when the first ring is page-locked, not with
the `Appliance`, because processes that it starts must not inherit a CUDA context."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.client.stream.device import DeviceEvent, copied
from penstock.proto.lane.ring import Ring
from penstock.proto.tracebacks import warn_user


class CudaBackend:
    """Backend of a CUDA device; without an index the current one of the thread that first copies."""

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


class PageLocks:
    """Page locks for copies to a CUDA device, until the object that owns the memory is garbage-collected. A copy of
    other memory blocks the thread, so without a lock copies are slower, but correct.

    `runtime`: torch.cuda.cudart(). `take_error`: called after its failed calls. `device`: for the warning."""

    def __init__(self, runtime: Any, device: str, take_error: Callable[[], None]) -> None:
        self._runtime = runtime
        self._device = device
        self._take_error = take_error
        self._warned = False

    def lock(self, memory: Any) -> bool:
        """Page-lock a Ring, or a checkpoint's SharedImage. Return True if that worked. The first failure is a
        UserWarning."""
        runtime = self._runtime
        error = runtime.cudaHostRegister(memory.address, memory.nbytes, 0)
        if not int(error):
            # The finalizer refers to the mapping, so the memory is unlocked before it is unmapped. At exit the kernel
            # does both.
            weakref.finalize(memory, _unlock, runtime, memory.address, memory.map, os.getpid()).atexit = False
            return True
        self._take_error()
        if not self._warned:
            self._warned = True
            warn_user(
                f"{memory.nbytes:,} bytes of shared memory could not be page-locked for {self._device}: "
                f"{runtime.cudaGetErrorString(error)} ({int(error)}), so copies from them are slower. Free memory, or "
                "raise `ulimit -l` (docker run --ulimit memlock=-1)",
            )
        return False


def take_error(device: torch.device) -> None:
    """Clear the error that the CUDA runtime keeps after a failed call and reports at the next kernel launch, one of the
    training loop's. So launch a kernel here, and ignore its error."""
    try:
        torch.empty(1, device=device).fill_(0)
    except RuntimeError:
        pass


def _unlock(runtime: Any, address: int, mapping: mmap.mmap, pid: int) -> None:
    """Unlock memory after its owner was garbage-collected. `mapping` keeps it mapped until this call."""
    if os.getpid() == pid:  # a forked child also drops its Ring, and must not call CUDA
        runtime.cudaHostUnregister(address)
