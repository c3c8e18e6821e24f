"""A runner and a coordinator that are plain objects: real rings, real sockets and real frames, in one process.

`FakeRunner` is a slot's producer, driven by the test a step at a time; `FakeRun` stands in for client.run.Run and dials
the runners by a socketpair. So what the feed does is tested against what really comes over a lane, with no process to
wait for and no clock to be lucky with.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import streams
import torch
from devices import FakeBackend

from penstock.client import DataLoader
from penstock.client.stream.box_progress import BoxProgress
from penstock.client.stream.device import DeviceBackend
from penstock.client.stream.device_reader import DeviceReader
from penstock.client.stream.open_run import StepFence
from penstock.client.stream.ordered_reader import OrderedReader
from penstock.client.stream.wait_notice import WaitNotice
from penstock.client.testing import FakeAppliance
from penstock.proto.batch.digest import DigestCover, batch_digest
from penstock.proto.batch.flatten import Flattener
from penstock.proto.errors import PenstockError
from penstock.proto.lane.frames import pack_shapes
from penstock.proto.lane.producer import Producer
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import lane_pb2, records_pb2


class FakeRunner:
    """Runner of one slot in one generation."""

    def __init__(self, slot: int, generation: int = 1, *, total: int = 0, epoch: int = 0) -> None:
        self.slot = slot
        self.generation = generation
        self.total = total
        self.epoch = epoch
        self.producer = Producer(1 << 30)
        self.cover = DigestCover.SAMPLE
        self.hellos: list[lane_pb2.Hello] = []
        self._flattener = Flattener()
        self._structures: dict[int, int] = {}

    def attach(self, sock: socket.socket) -> None:
        hello = lane_pb2.Hello.FromString(sock.recv(1 << 16))
        self.hellos.append(hello)
        self.producer.attach(sock, hello)

    def room(self) -> bool:
        """True if the ring has a free entry for the next batch."""
        producer = self.producer
        producer.take_acks()
        return producer.free_entries > 0 or producer.ring_entries == 0

    def send(self, batch: Any) -> bool:
        """Produce one batch. False if there is no room in the ring, or the epoch was just heard to be left.

        What is sent after that would pass for a batch of the next one.
        """
        producer = self.producer
        producer.take_acks()
        producer.flush()
        if producer.abandoned:
            return False
        flat = self._flattener.flatten(batch)
        reserved = producer.reserve(flat.nbytes, len(flat.shapes))
        if reserved is None:
            return False
        flat.write_to(reserved.ring.address + reserved.offset)
        number = self._structures.setdefault(flat.structure.key, len(self._structures) + 1)
        producer.know_structure(number, flat.structure.to_bytes())
        self.total += 1
        place = reserved.ring.map, reserved.offset, flat.nbytes
        digest = batch_digest(flat.structure, *place, flat.shapes, self.cover == DigestCover.FULL)
        dims = pack_shapes(flat.shapes)
        producer.publish(reserved, self.total, self.epoch, number, flat.nbytes, dims, digest, cover=self.cover)
        return True

    def end(self) -> None:
        self.producer.end(self.epoch, self.total)
        self.epoch += 1

    def fail(self, name: str, message: str, traceback: str = "") -> None:
        detail = records_pb2.ErrorDetail(name=name, message=message, remote_traceback=traceback)
        self.producer.fail(self.epoch, self.total, detail)

    def leave_epoch(self) -> int:
        """Follow an abandon: the epoch that was left."""
        self.producer.take_acks()
        left = self.producer.abandoned.popleft()
        self.total, self.epoch = self.producer.delivered, left + 1
        return left

    def break_lane(self) -> None:
        """The connection ends; what was sent stays readable, and what was not delivered is kept."""
        self.producer.detach()


class FakeRun:
    """Part of a Run that the ordered reader needs."""

    def __init__(self, num_slots: int, runners: list[FakeRunner]) -> None:
        self.box = 0
        self.num_slots = num_slots
        self.runners = {runner.slot: runner for runner in runners}
        self.version = 0
        self.ended_boxes: dict[int, int] = {}
        self.box_apart: Any = None
        self.twin: int | None = None
        self.unplaced_because = ""
        self.error: PenstockError | None = None
        self.closed = False
        self.away_since: float | None = None
        self.replied_at = 0.0
        self.num_workers = num_slots
        self.progress = BoxProgress()
        self.fence = StepFence()
        self.notice = WaitNotice()
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.reports = 0
        self.views = [pb.SlotView(slot=slot, phase=pb.WAITING) for slot in range(num_slots)]
        for runner in runners:
            self.show(runner)

    def away_s(self, now: float) -> float:
        return 0.0

    def hold(self, step: int, timeout_s: float) -> None:
        raise AssertionError(f"step {step} is behind a fence")

    def show(self, runner: FakeRunner, phase: pb.SlotPhase.ValueType = pb.READY, **changes: Any) -> None:
        """Do what the watch thread does when the coordinator reports where a slot is."""
        self.runners[runner.slot] = runner
        views = list(self.views)
        views[runner.slot] = pb.SlotView(
            slot=runner.slot,
            generation=runner.generation,
            phase=phase,
            worker=f"w{runner.slot}",
            local_address="here",
            **changes,
        )
        self.views = views
        self.version += 1
        os.eventfd_write(self.wake_fd, 1)

    def dial(self, view: pb.SlotView, hello: lane_pb2.Hello) -> socket.socket:
        runner = self.runners[view.slot]
        if runner.generation != view.generation:
            raise ConnectionRefusedError("an old generation")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hello.slot, hello.generation = view.slot, view.generation
        ours.send(hello.SerializeToString())
        runner.attach(theirs)
        return ours

    def report(self) -> None:
        self.reports += 1


class Rig:
    """Runners, a run and the feed that reads it."""

    def __init__(
        self,
        num_slots: int = 1,
        *,
        timeout_s: float = 5.0,
        position: Position | None = None,
        backend: DeviceBackend | None = None,
    ) -> None:
        self.runners = [FakeRunner(slot) for slot in range(num_slots)]
        run: Any = FakeRun(num_slots, self.runners)
        self.run = run
        position = position or Position.start(num_slots)
        if backend is None:
            self.reader = OrderedReader(run, position, "inputs:make", timeout_s)
        else:
            self.reader = DeviceReader(run, position, "inputs:make", timeout_s, backend)

    def numbers(self, slot: int, *values: int) -> None:
        """Send one batch for each number from a slot."""
        for value in values:
            assert self.runners[slot].send(torch.tensor([value]))

    def take(self, count: int) -> list[Any]:
        """The next steps of the loop, as plain values. A device copies each of them at once."""
        return [self._value() for _ in range(count)]

    def _value(self) -> Any:
        batch = self.reader.next()
        if isinstance(self.reader, DeviceReader) and isinstance(self.reader._backend, FakeBackend):
            self.reader._backend.finish()
        return batch.tolist()[0]

    def acked(self, slot: int = 0) -> Producer:
        """The producer, once it knows what the feed can tell it."""
        self.reader.flush()
        producer = self.runners[slot].producer
        producer.take_acks()
        return producer

    def taken(self, slot: int = 0) -> int:
        """Ring slots that the producer cannot fill."""
        producer = self.acked(slot)
        return producer.ring_entries - producer.free_entries

    def close(self) -> None:
        self.reader.close()
        for runner in self.run.runners.values():
            runner.producer.close()
        os.close(self.run.wake_fd)


@pytest.fixture
def rigs() -> Iterator[Any]:
    """Makes rigs, and closes them after the test."""
    made: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def device() -> Iterator[FakeBackend]:
    backend = FakeBackend()
    yield backend
    backend.failure = None
    backend.finish()  # or closing the rig would wait for it


@pytest.fixture(params=["views", "copies ahead"])
def either(rigs: Any, device: FakeBackend, request: pytest.FixtureRequest) -> Any:
    """Makes rigs without a device, and with one."""
    return partial(rigs, backend=None if request.param == "views" else device)


@pytest.fixture
def rig(rigs: Any, device: FakeBackend) -> Any:
    """Reader of one slot, with a device whose copies happen when `device.finish` is called."""
    return rigs(backend=device)


@pytest.fixture
def two() -> Iterator[FakeAppliance]:
    """An appliance of two workers, in this process."""
    appliance = FakeAppliance(num_workers_per_box=2, seed=5)
    yield appliance
    appliance.close()


@pytest.fixture
def loader() -> DataLoader:
    return DataLoader(streams.counter)
