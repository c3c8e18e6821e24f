"""Copies of batches from ring entries (each the shared memory of one batch) to a device, and the lane that starts the
copies.

A `SlotLane` gives the loop batches that are views of the ring. A `DeviceLane` gives the loop copies on the device:
`DeviceLane.take` starts the copies of a batch and returns a `DeviceLoad`, which stands for the batch while it is
copied. The load keeps its ring in memory, and therefore page-locked, until the copies are done. device_reader.py uses
the loads.

Tensors go to the device. NumPy arrays are copied on the host at once, because a view would keep the ring entry in use
for as long as the loop keeps the array.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import torch

from penstock.client.stream.device import DeviceBackend, DeviceEvent
from penstock.client.stream.lane_reader import RingView, SlotLane
from penstock.proto.errors import PenstockError
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, END, Frame, counts_of

__all__ = ["LOOK_S", "DeviceLane", "DeviceLoad", "PeekingConsumer"]

LOOK_S = 50e-6
"""Seconds between two queries of whether a copy has ended, while the reader waits for that. A copy of 1 MiB takes about
as long."""


class DeviceLoad:
    """Batch whose tensors are being copied to the device. It lasts from the start of the copies until the ring entry is
    released."""

    __slots__ = ("batch", "copies", "counts", "digest", "entry", "event", "lane", "ring", "token")

    def __init__(self, lane: DeviceLane, ring: RingView, frame: Frame) -> None:
        self.lane = lane
        self.ring = ring
        self.entry: int = frame.entry
        self.token = frame.ring << 16 | frame.entry
        """Number that names the batch's ring and entry, see penstock.client.stream.lane_reader."""
        self.digest: int = frame.digest
        self.counts = counts_of(frame)
        self.batch: Any = None
        self.copies: list[torch.Tensor] = []
        """Tensors of the batch on the device."""
        self.event: DeviceEvent | None = None
        """Event that is reached when all copies have ended; None if the batch has no tensors."""

    def move(self, leaves: list[Any]) -> list[Any]:
        """Start copying the tensors of a batch to the device. `leaves`: tensors and other values of the batch, as views
        of the ring entry. Return the leaves with copies in place of the views."""
        backend, tensors = self.lane.backend, [leaf for leaf in leaves if type(leaf) is torch.Tensor]
        if tensors:
            if torch.is_inference_mode_enabled():
                # The batch may be delivered after inference mode has ended, to a loop that needs gradients.
                with torch.inference_mode(False):
                    self.copies, self.event = backend.copy(tensors)
            else:
                self.copies, self.event = backend.copy(tensors)
        arrived = iter(self.copies)
        return [
            next(arrived)
            if type(leaf) is torch.Tensor
            else leaf.copy()
            if type(leaf) is np.ndarray
            else leaf  # a scalar, which is a copy already
            for leaf in leaves
        ]

    @property
    def done(self) -> bool:
        """True if the copies have ended, so that the ring entry may be released. Raises the device's error if a copy
        failed."""
        return self.event is None or self.event.query()

    def forget(self) -> None:
        """Drop this load's references to the batch's tensors once the loop has the batch. The load itself is still
        needed, to release the ring entry when the copies have ended."""
        self.batch, self.copies = None, []

    def wait(self, until: float) -> bool:
        """Wait until the copies are done, and return True. Return False if they are not done by `until`, a time of
        time.monotonic()."""
        while not self.done:
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True


class PeekingConsumer(Consumer):
    """Consumer (reading end of a lane) that can also return the next frame, a message of the lane, and leave it to be
    read again."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        super().__init__(sock, name)
        self._seen: Frame | PenstockError | None = None

    def look(self) -> Frame | None:
        """Return the frame that the next `receive` will return; None if no frame has arrived. If reading fails, return
        None, and let the next `receive` raise the error."""
        if self._seen is None:
            try:
                self._seen = super().receive()
            except PenstockError as error:
                self._seen = error
        return None if isinstance(self._seen, PenstockError) else self._seen

    def receive(self) -> Frame | None:
        seen = self._seen
        if seen is None:
            return super().receive()
        self._seen = None
        if isinstance(seen, PenstockError):
            raise seen
        return seen

    def abandon(self, epoch: int, total: int) -> None:
        seen = self._seen
        if isinstance(seen, Frame) and seen.kind in (BATCH, END):
            self._seen = None  # this frame is of an abandoned epoch, which `receive` skips
        super().abandon(epoch, total)


class DeviceLane(SlotLane):
    """Lane (connection for batches) of a worker slot that copies the batches to a device. `take` returns a DeviceLoad,
    which keeps its ring entry in use until the copies are done."""

    __slots__ = ("backend",)

    consumer: PeekingConsumer | None

    def __init__(self, slot: int, generation: int, name: str, backend: DeviceBackend) -> None:
        super().__init__(slot, generation, name)
        self.backend = backend

    def _another(self, generation: int, name: str) -> SlotLane:
        return DeviceLane(self.slot, generation, name, self.backend)

    def _consumer(self, sock: socket.socket) -> Consumer:
        return PeekingConsumer(sock, self.name)

    def take(self, frame: Frame) -> DeviceLoad:
        ring, assembler, shapes = self.checked(frame)
        load = DeviceLoad(self, ring, frame)
        load.batch = assembler.assemble(
            shapes, ring.buffer, frame.entry * ring.entry_bytes, frame.nbytes, move=load.move
        )
        return load

    def _map(self, ring_id: int) -> RingView:
        view = super()._map(ring_id)
        self.backend.lock(view.ring)
        return view
