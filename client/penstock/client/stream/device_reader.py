"""The ordered reader of `Appliance(device=...)`: batches are copied out of the ring, one ahead of the loop.

    frame of batch n+1 ──> views of its ring entry ──> copies on the device ········ event
                                                      (staged)                        ├─> the slot is released
    batch n is in the loop's hands               next() hands the copies out,         │
                                                 the loop's stream waits for the event┘

When `next` has a batch for the loop, and the frame of the one after it is there already, it starts that one's copy
before it returns: the device copies while the loop computes. It never waits for a frame to do so. One batch ahead is
all there is to gain: a copy that takes no longer than a step is hidden by one step, and one that takes longer is what
the loop runs at, however many are under way; each further batch would only take device memory.

**What is staged is not delivered.** Position, digests, acks and saved states know nothing of it. If the loop leaves the
pass, its copy is waited for, because the producer takes the slot back as soon as it hears of that, and forgotten; if
its runner is replaced, the new one sends it again. Only the frame that is due next is ever staged. Any other, and an
error, stays with the consumer that looked for it until its turn comes, and is met by the ordinary feed.

**A slot is released by its copy's event**, once the batch is delivered, and not by the death of views: there are none.
Events are looked at whenever the reader is called, and while it waits: a producer without free slots may be what it
waits for.
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
from penstock.client.stream.ordered_reader import EPOCH_ENDED, OrderedReader
from penstock.proto.errors import DeadlineError
from penstock.proto.lane.frames import BATCH
from penstock.proto.state.position import Position

__all__ = ["DeviceReader", "backend_of", "reader_for"]

CLOSE_S = 5.0
"""Seconds that closing waits for copies; they take milliseconds, unless the device has failed."""

_stranded: list[DeviceLoad] = []
"""Loads whose copies did not end within CLOSE_S: their rings must never be freed."""


class DeviceReader(OrderedReader):
    """Ordered reader whose batches arrive on the backend's device."""

    def __init__(self, run: OpenRun, position: Position, label: str, timeout_s: float, backend: DeviceBackend) -> None:
        self._backend = backend
        self._staged: DeviceLoad | None = None
        self._lent: deque[DeviceLoad] = deque()
        """Delivered, with their copies under way; done in this order, for the backend has one."""
        self._stuck_since = 0.0
        super().__init__(run, position, label, timeout_s)

    def _first_lane(self, slot: int) -> SlotLane:
        return DeviceLane(slot, 0, self._lane_name(slot, ""), self._backend)

    # ---- the hot path

    def next(self) -> Any:
        """See OrderedReader.next. The loop's stream waits for the batch; the host does not."""
        if self._version != self._run.version:
            self._refresh()
        self._land()
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
            self._count(lane, load.digest)
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
        """Start the copy of the batch that is due, if its frame is here."""
        position = self.position
        lane = self._lanes[position.turn]
        consumer = lane.consumer
        if not isinstance(consumer, PeekingConsumer) or not isinstance(lane, DeviceLane):
            return  # not connected
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
            return  # The frame is still there: when it is due it will fail again, and then the loop hears of it.
        except BaseException:
            self._staged = None
            lane.lose(time.monotonic(), "interrupted")  # perhaps with a frame in hand: all is sent again
            raise

    # ---- slots

    def _land(self) -> bool:
        """Release the slots of batches that have arrived. Whether there were any."""
        lent, landed = self._lent, False
        while lent and lent[0].done:
            load = lent.popleft()
            load.lane.release.append(load.token)
            landed, self._stuck_since = True, 0.0
        return landed

    def flush(self) -> bool:
        try:
            self._land()
        except RuntimeError:
            pass  # the device has failed; who asks for a state now shall get it
        return super().flush()

    def _wait(self, lane: SlotLane) -> None:
        if not self._lent or lane.consumer is None:
            super()._wait(lane)
            return
        # The producer may be out of slots because of these. A poll's shortest time is a millisecond; sleep instead.
        now = time.monotonic()
        if not self._stuck_since:
            self._stuck_since = now
        if now - self._stuck_since > self._timeout_s:
            raise self._late(now - self._stuck_since)
        time.sleep(LOOK_S)
        if self._land():
            for other in self._lanes:
                if len(other.release) >= other.group:
                    other.ack(self.position.total[other.slot])
        self._waited(lane.slot, self._run.views[lane.slot].worker, time.monotonic() - now)

    def _late(self, waited: float) -> DeadlineError:
        return DeadlineError(
            f"{self._label}: box {self._run.box} waited {waited:.0f} s for device {self._backend.device} to finish the "
            f"copy of a batch, after step {self.position.step} was delivered (timeout_s={self._timeout_s:g})"
        )

    # ---- what ends a staged batch

    def _refresh(self) -> None:
        try:
            super()._refresh()
        finally:
            load = self._staged
            if load is not None and load.lane is not self._lanes[load.lane.slot]:
                # Of a generation that is over; the next one sends it again. Its token will go to the old lane, where
                # nobody reads it.
                load.forget()
                self._staged = None
                self._lent.append(load)

    def abandon_epoch(self) -> None:
        load = self._staged
        if load is not None:  # then the batch before it was delivered, so there is an epoch to leave
            if not load.wait(time.monotonic() + self._timeout_s):
                raise self._late(self._timeout_s)
            self._staged = None
        super().abandon_epoch()

    def close(self) -> None:
        """Leave all lanes, once no copy reads their rings. May run in the garbage collector, and raises nothing."""
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
    """The backend of a name that `check_device` has returned."""
    return CpuBackend() if device == "cpu" else CudaBackend(torch.device(device))


def reader_for(device: str, run: OpenRun, position: Position, label: str, timeout_s: float) -> OrderedReader:
    """Return the ordered reader of a run: with a device, one whose batches arrive there; "": one that hands out views
    of the ring."""
    if not device:
        return OrderedReader(run, position, label, timeout_s)
    return DeviceReader(run, position, label, timeout_s, backend_of(device))
