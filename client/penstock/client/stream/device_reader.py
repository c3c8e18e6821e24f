"""Ordered reader of `Appliance(device=...)`, which copies batches from the ring (shared memory) to the device, one
batch ahead of the loop.

    frame of batch n+1 ──> views of its ring entry ──> copies on the device ········ event
                                                      (staged)                        ├─> the entry is released
    batch n is used by the loop                  next() returns the copies,           │
                                                 the loop's stream waits for the event┘

Before `next` returns a batch to the loop, it starts the copy of the batch after that one (**stages** it) if its frame,
the message that announces it, has arrived. So the device copies while the loop computes. `next` never waits for the
frame of a batch to stage. More than one batch ahead would only take device memory: a copy that takes longer than a step
limits the loop's rate, however many are started.

**A staged batch is not delivered.** Position, digests, acks and saved states ignore it. If the loop abandons the epoch,
the reader waits for the batch's copy before it drops the batch, because the producer then reuses the entry. If the
batch's runner is replaced, the new one sends the batch again. Only the frame that is due next is ever staged.

**A ring entry is released by the event of its copy**, once the batch is delivered: the loop has no views of the entry.
Events are queried whenever the reader is called, and while it waits for a batch, because the producer may wait for a
free entry.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from penstock.client.stream.cuda import CudaBackend
from penstock.client.stream.device import CpuBackend, DeviceBackend
from penstock.client.stream.device_loads import LOOK_S, DeviceLane, DeviceLoad, PeekingConsumer
from penstock.client.stream.lane_reader import SlotLane
from penstock.client.stream.open_run import OpenRun
from penstock.client.stream.ordered_reader import OrderedReader
from penstock.client.stream.streams import EPOCH_ENDED
from penstock.proto.errors import DeadlineError
from penstock.proto.lane.frames import BATCH
from penstock.proto.state.position import Position

__all__ = ["DeviceReader", "backend_of", "reader_for"]

CLOSE_S = 5.0
"""Longest wait of `close` for the end of copies. They take milliseconds, unless the device has failed."""

_stranded: list[DeviceLoad] = []
"""Loads whose copies did not end within CLOSE_S. Their rings stay in memory for the life of the process, because the
device may still read them."""


class DeviceReader(OrderedReader):
    """Ordered reader that delivers batches on a device."""

    def __init__(self, run: OpenRun, position: Position, label: str, timeout_s: float, backend: DeviceBackend) -> None:
        self._backend = backend
        self._staged: DeviceLoad | None = None
        self._lent: deque[DeviceLoad] = deque()
        """Loads of batches that the loop has, but whose copies are not known to be done, in the order in which they
        end."""
        self._stuck_since = 0.0
        super().__init__(run, position, label, timeout_s)

    def _first_lane(self, slot: int) -> SlotLane:
        return DeviceLane(slot, 0, self._lane_name(slot, ""), self._backend)

    # ---- the hot path

    def next(self) -> Any:
        """Return the next batch, with its tensors on the device, or EPOCH_ENDED. The loop's CUDA stream waits for the
        end of the batch's copy; this thread does not."""
        run = self.run
        run.fence.taken = step = self.position.step + 1
        if step >= run.fence.step:  # before a batch that was staged is delivered; its lane may be of an old generation
            self.flush()
            run.hold(step, self._timeout_s)
        if self._version != run.version:
            self._refresh()
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
        """Start the copy of the batch that is due next, if its frame has arrived."""
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
        """Release the ring entries of delivered batches whose copies have ended. Return True if one was."""
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
            f"{self.label}: box {self.run.box} waited {waited:.0f} s for device {self._backend.device} to finish the "
            f"copy of a batch, after step {self.position.step} was delivered (timeout_s={self._timeout_s:g}). Check "
            "the device (for CUDA: nvidia-smi), or raise timeout_s"
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
        """Wait until no copy reads the rings, at most CLOSE_S, then close all lanes. Raises no error, because the
        garbage collector may call this method."""
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
    """Return the reader that delivers a run's batches, beginning after `position`. `device`: "" for views of the
    ring."""
    if not device:
        return OrderedReader(run, position, label, timeout_s)
    return DeviceReader(run, position, label, timeout_s, backend_of(device))
