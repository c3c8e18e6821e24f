"""Copies of batches from ring entries to a device, and the lane that starts them.

`DeviceLane.take` starts the copies of a batch and returns a `DeviceLoad`, which stands for the batch while it is
copied. The load keeps its ring in memory, and therefore page-locked, until the copies are done. NumPy arrays are copied
on the host at once, because a view would keep the ring entry in use for as long as the loop keeps the array."""

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
"""Seconds between two queries of whether a copy has ended. A copy of 1 MiB takes about as long."""


class DeviceLoad:
    """Batch whose tensors are being copied to the device, until its ring entry is released."""

    __slots__ = ("batch", "copies", "counts", "digest", "entry", "event", "lane", "ring", "token")

    def __init__(self, lane: DeviceLane, ring: RingView, frame: Frame) -> None:
        self.lane = lane
        self.ring = ring
        self.entry: int = frame.entry
        self.token = frame.ring << 16 | frame.entry
        """Names the batch's ring and entry, see lane_reader.py."""
        self.digest: int = frame.digest
        self.counts = counts_of(frame)
        self.batch: Any = None
        self.copies: list[torch.Tensor] = []
        self.event: DeviceEvent | None = None
        """Reached when all copies have ended; None if the batch has no tensors."""

    def move(self, leaves: list[Any]) -> list[Any]:
        """Start copying the tensors among `leaves`, which are views of the ring entry. Return the leaves with the
        copies."""
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
        """True if the ring entry may be released. Raises the device's error if a copy failed."""
        return self.event is None or self.event.query()

    def forget(self) -> None:
        """Drop the references to the batch's tensors once the loop has the batch."""
        self.batch, self.copies = None, []

    def wait(self, until: float) -> bool:
        """Wait until the copies are done, and return True; False if they are not by `until`, a time of
        time.monotonic()."""
        while not self.done:
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True


class PeekingConsumer(Consumer):
    """Consumer that can also return the next frame and leave it to be read again."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        super().__init__(sock, name)
        self._seen: Frame | PenstockError | None = None

    def look(self) -> Frame | None:
        """Return the frame that the next `receive` will return; None if none has arrived, or if the next `receive` will
        raise an error."""
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
    """Lane that copies the batches to a device. `take` returns a DeviceLoad."""

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
