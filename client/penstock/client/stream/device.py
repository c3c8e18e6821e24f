"""Devices on which batches can be delivered.

Each tensor is copied separately: with one copy of the whole batch, a label that the loop keeps would keep its images in
device memory, and `torch.save` would write them too. For 8 tensors on the CPU that costs 23 us instead of 21 (2-core
AMD EPYC); `benchmarks/device.py` measures it on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from penstock.proto.batch.assemble import CARRIERS
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.lane.ring import Ring


class DeviceEvent(Protocol):
    """Point in a device's queue of work, such as a torch.cuda.Event."""

    def query(self) -> bool:
        """Return True if the device has done all work before this point. Does not wait."""


class DeviceBackend(Protocol):
    """One device for one ordered reader. Only the training thread uses it."""

    @property
    def device(self) -> torch.device: ...

    def lock(self, ring: Ring) -> None:
        """Make copies from a ring fast while the `Ring` lives. Called once, before the first copy. Never fails."""

    def copy(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], DeviceEvent]:
        """Start copying contiguous CPU tensors, without waiting. Return copies with memory of their own, and an event
        that is reached when the last one ends; until then the sources must neither change nor be freed. Copies end in
        order."""

    def order_after_copies(self, copies: Sequence[torch.Tensor], event: DeviceEvent) -> None:
        """Run the work that this thread starts from now on after these copies, up to `event`. Does not wait."""


class _Done:
    def query(self) -> bool:
        return True


class CpuBackend:
    """Backend for Appliance(device="cpu"): each batch is a copy, and not a view of the ring."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._done = _Done()

    def lock(self, ring: Ring) -> None:
        """No-op: page-locking does not speed up copies on the CPU."""

    def copy(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], DeviceEvent]:
        return copied(sources, self.device), self._done

    def order_after_copies(self, copies: Sequence[torch.Tensor], event: DeviceEvent) -> None:
        """No-op: `copy` returns when the copies are done."""


_CARRIED: Final[dict[torch.dtype, torch.dtype]] = {
    dtype: {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for dtype, (_, needed) in CARRIERS.items()
    if needed is not None
}
"""Dtypes that some torch cannot copy, or copies with a warning, and the integers as which each is copied."""


def copied(sources: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    copies = []
    for source in sources:
        carrier = _CARRIED.get(source.dtype)
        if carrier is None:
            copies.append(torch.empty_like(source, device=device).copy_(source, non_blocking=True))
        else:
            carried = source.view(carrier)
            copy = torch.empty_like(carried, device=device).copy_(carried, non_blocking=True)
            copies.append(copy.view(source.dtype))
    return copies


def check_device(name: str) -> str:
    """Return "cpu", "cuda" or "cuda:N" in torch's spelling. Raises InvalidArgumentError if it cannot be used."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidArgumentError(f'device must be "cpu", "cuda" or "cuda:N", got {name!r}') from None
    if device.type == "cpu" and not device.index:
        return "cpu"
    if device.type != "cuda":
        raise InvalidArgumentError(
            f'device must be "cpu", "cuda" or "cuda:N", got {name!r}: leave it out, and move batches in the loop'
        )
    if not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"device={name!r} cannot be used: torch {torch.__version__} finds no CUDA device, see nvidia-smi"
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise InvalidArgumentError(
            f"device must be one of the {count} CUDA devices that this process sees, numbered from 0, got {name!r}"
        )
    return str(device)
