"""Ordered reader of `Appliance(device=...)`, which copies batches from the ring (shared memory) to the device, one
batch ahead of the loop.

    frame of batch n+1 ──> views of its ring entry ──> copies on the device ········ event
                                                      (staged)                        ├─> the entry is released
    batch n is used by the loop                  next() returns the copies,           │
                                                 the loop's stream waits for the event┘

Before `next` returns a batch, it **stages** the one after it: starts its copy if its frame, the message that announces
it, has arrived. So the device copies while the loop computes. More than one ahead would only take device memory: a copy
that takes longer than a step limits the loop's rate anyway.

**A staged batch is not delivered**: position, digests, acks and saved states ignore it. If the loop abandons the epoch,
the reader waits for the copy before it drops the batch, because the producer then reuses the entry. If the runner is
replaced, the new one sends the batch again. Only the frame that is due next is ever staged.

**A ring entry is released by the event of its copy**, once the batch is delivered. Events are queried whenever the
reader is called, and while it waits, because the producer may wait for a free entry."""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from penstock.client.stream.cuda import CudaBackend
from penstock.client.stream.device import CpuBackend, DeviceBackend, DeviceEvent
from penstock.client.stream.lane_reader import RingView, SlotLane
from penstock.client.stream.open_run import OpenRun
from penstock.client.stream.ordered_reader import OrderedReader
from penstock.client.stream.streams import EPOCH_ENDED
from penstock.proto.errors import DeadlineError, PenstockError
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, END, Frame, counts_of
from penstock.proto.state.position import Position

LOOK_S = 50e-6
"""Seconds between two queries of a copy's end. A copy of 1 MiB takes about as long."""
CLOSE_S = 5.0
"""Longest wait of `close` for copies, which take milliseconds unless the device has failed."""

_stranded: list[DeviceLoad] = []
"""Loads whose copies did not end within CLOSE_S: their rings stay in memory, because the device may still read them."""


class DeviceLoad:
    """Batch that is being copied to the device, until its ring entry is released."""

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
        """Reached when all copies have ended; None without tensors."""

    def move(self, leaves: list[Any]) -> list[Any]:
        """Start copying the tensors among `leaves`, views of the ring entry. Return the leaves with the copies."""
        backend, tensors = self.lane.backend, [leaf for leaf in leaves if type(leaf) is torch.Tensor]
        if tensors:
            # The batch may be delivered after inference mode has ended, to a loop that needs gradients.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
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
        """Wait for the copies; False if they are not done by `until`, a time of time.monotonic()."""
        while not self.done:
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True


class PeekingConsumer(Consumer):
    def __init__(self, sock: socket.socket, name: str) -> None:
        super().__init__(sock, name)
        self._seen: Frame | PenstockError | None = None

    def look(self) -> Frame | None:
        """Return the frame that the next `receive` will return; None if it will return none, or raise an error."""
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


class DeviceReader(OrderedReader):
    def __init__(self, run: OpenRun, position: Position, label: str, timeout_s: float, backend: DeviceBackend) -> None:
        self._backend = backend
        self._staged: DeviceLoad | None = None
        self._lent: deque[DeviceLoad] = deque()
        """Batches that the loop has, but whose copies are not known to be done, in the order in which they end."""
        self._stuck_since = 0.0
        super().__init__(run, position, label, timeout_s)

    def _first_lane(self, slot: int) -> SlotLane:
        return DeviceLane(slot, 0, self._lane_name(slot, ""), self._backend)

    # ---- the hot path

    def next(self) -> Any:
        """Return the next batch on the device, or EPOCH_ENDED. The loop's stream, not this thread, waits for the
        copy."""
        self._catch_up()
        self._release_copied()
        load = self._staged
        if load is None:
            load = super().next()
            if load is EPOCH_ENDED:
                return EPOCH_ENDED
        else:
            lane = load.lane
            if lane.unacked >= lane.group:
                lane.ack(self.position.total[lane.slot])
            self.wait_s = 0.0
            self.stats.ahead += 1
            self._staged = None
            self._count(lane, load.digest, load.counts)
        batch = self._deliver(load)
        self._stage()
        return batch

    def _deliver(self, load: DeviceLoad) -> Any:
        batch = load.batch
        if load.event is not None:
            self._backend.order_after_copies(load.copies, load.event)
        load.forget()
        load.ring.held.add(load.entry)
        self._lent.append(load)
        return batch

    def _stage(self) -> None:
        position = self.position
        lane = self._lanes[position.turn]
        consumer = lane.consumer
        if not isinstance(consumer, PeekingConsumer) or not isinstance(lane, DeviceLane):
            return  # the lane is not connected
        try:
            frame = consumer.look()
            if (
                frame is None
                or frame.kind != BATCH
                or frame.epoch != position.epoch
                or frame.total != position.total[lane.slot] + 1
            ):
                return
            self._staged = lane.take(frame)
            consumer.receive()
            if lane.unsettled:
                lane.settle()
        except Exception:
            return  # the frame stays unread: when its batch is due, the same error is raised in the loop
        except BaseException:
            self._staged = None
            lane.lose(time.monotonic(), "interrupted")  # a frame may have been read, so all frames are sent again
            raise

    # ---- ring entries

    def _release_copied(self) -> bool:
        """Release the entries of delivered batches whose copies have ended. Return True if one was."""
        lent, released = self._lent, False
        while lent and lent[0].done:
            load = lent.popleft()
            load.lane.release.append(load.token)
            released, self._stuck_since = True, 0.0
        return released

    def flush(self) -> bool:
        try:
            self._release_copied()
        except RuntimeError:
            pass  # the device has failed, but a state can still be requested
        return super().flush()

    def _wait(self, lane: SlotLane) -> None:
        if not self._lent or lane.consumer is None:
            super()._wait(lane)
            return
        # The producer may wait for these entries. The shortest time of a poll is a millisecond, so sleep instead.
        now = time.monotonic()
        if not self._stuck_since:
            self._stuck_since = now
        if now - self._stuck_since > self._timeout_s:
            raise self._late(now - self._stuck_since)
        time.sleep(LOOK_S)
        if self._release_copied():
            for other in self._lanes:
                if len(other.release) >= other.group:
                    other.ack(self.position.total[other.slot])
        self._waited(lane.slot, self.run.views[lane.slot].worker, time.monotonic() - now)

    def _late(self, waited: float) -> DeadlineError:
        return DeadlineError(
            f"{self.label}: box {self.run.box} waited {waited:.0f} s for device {self._backend.device} to copy a "
            f"batch, after step {self.position.step} (timeout_s={self._timeout_s:g}): check the device"
        )

    # ---- ends of a staged batch

    def _refresh(self) -> None:
        try:
            super()._refresh()
        finally:
            load = self._staged
            if load is not None and load.lane is not self._lanes[load.lane.slot]:
                # The batch is of an old generation; the next one sends it again. Its token goes to the old lane, where
                # it is not read.
                load.forget()
                self._staged = None
                self._lent.append(load)

    def abandon_epoch(self) -> None:
        load = self._staged
        if load is not None:  # the batch before the staged one was delivered, so there is an epoch to abandon
            if not load.wait(time.monotonic() + self._timeout_s):
                raise self._late(self._timeout_s)
            self._staged = None
        super().abandon_epoch()

    def end_epoch(self) -> bool:
        if self._staged is None:
            return super().end_epoch()
        self.abandon_epoch()
        return False

    def close(self) -> None:
        """Wait for copies, at most CLOSE_S, then close all lanes. Raises nothing: the garbage collector may call
        this."""
        loads, self._staged = [*self._lent, *filter(None, [self._staged])], None
        self._lent.clear()
        until = time.monotonic() + CLOSE_S
        for load in loads:
            load.forget()
            try:
                arrived = load.wait(until)
            except RuntimeError:  # the device has failed
                arrived = False
            if not arrived:
                _stranded.append(load)
        super().close()


def backend_of(device: str) -> DeviceBackend:
    return CpuBackend() if device == "cpu" else CudaBackend(torch.device(device))


def reader_for(device: str, run: OpenRun, position: Position, label: str, timeout_s: float) -> OrderedReader:
    """Return a run's reader, beginning after `position`. `device`: "" for views of the ring."""
    if not device:
        return OrderedReader(run, position, label, timeout_s)
    return DeviceReader(run, position, label, timeout_s, backend_of(device))
