"""A runner and a coordinator that are plain objects: real rings, real sockets and real frames, in one process.

`FakeRunner` is a slot's producer, driven by the test a step at a time; `FakeRun` stands in for client.run.Run and dials
the runners by a socketpair. So what the feed does is tested against what really comes over a lane, with no process to
wait for and no clock to be lucky with.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import streams
import torch
from devices import FakeBackend
from numbered_batches import numbers

from penstock.client import DataLoader
from penstock.client.api.appliance_settings import resolve
from penstock.client.states.saved_state import BoxStart
from penstock.client.stream.box_progress import BoxProgress
from penstock.client.stream.device import DeviceBackend
from penstock.client.stream.device_reader import DeviceReader, reader_for
from penstock.client.stream.open_run import StepFence
from penstock.client.stream.ordered_reader import OrderedReader
from penstock.client.stream.streams import Opening
from penstock.client.stream.wait_notice import WaitNotice
from penstock.proto.batch.digest import DigestCover, batch_digest
from penstock.proto.batch.flatten import Flattener
from penstock.proto.errors import PenstockError
from penstock.proto.lane.frames import pack_shapes
from penstock.proto.lane.producer import Producer
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.codec import decode_state, encode_state
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
        """The next steps of the loop, as plain values."""
        return [batch.tolist()[0] for batch in (self.reader.next() for _ in range(count))]

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


Passes = Callable[[int, int], Iterable[Any]]
"""(slot, epoch) -> the batches of that epoch."""


class ThreadRunner(FakeRunner):
    """A runner that serves by itself, in a thread, as a worker's does: pass after pass, as far as they are opened."""

    def __init__(self, slot: int, passes: Passes, *, delivered: int = 0, total: int = 0, epoch: int = 0) -> None:
        super().__init__(slot, total=total, epoch=epoch)
        self._epochs_begun = passes
        self._skip = delivered
        self._arrivals: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self.producer.open_epochs = epoch
        self.over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def arrive(self, sock: socket.socket | None) -> None:
        self._arrivals.put(sock)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        self.arrive(None)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.producer.close()
        os.close(self._wake)

    def _wait(self) -> None:
        """Wait for a consumer, its acks, or the end."""
        producer = self.producer
        producer.flush()
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if producer.attached:
            poll.register(producer.fileno(), select.POLLIN | (select.POLLOUT if producer.blocked else 0))
        for fd, _ in poll.poll(10_000):
            if fd == self._wake:
                os.eventfd_read(self._wake)
                sock = self._arrivals.get()
                if sock is None:
                    self.over = True
                else:
                    self.attach(sock)
            else:
                producer.take_acks()

    def _serve(self) -> None:
        producer = self.producer
        while not self.over:
            if producer.abandoned:
                self.leave_epoch()
                self._skip = 0
            elif producer.open_epochs < self.epoch:
                self._wait()
            else:
                self._stream()

    def _stream(self) -> None:
        for number, batch in enumerate(self._epochs_begun(self.slot, self.epoch)):
            if number < self._skip:
                continue
            if isinstance(batch, Exception):
                self.fail("InputFnError", f"{type(batch).__name__}: {batch}")
                while not self.over:
                    self._wait()
                return
            while not self.over and not self.producer.abandoned and not self.send(batch):
                self._wait()
            if self.over or self.producer.abandoned:
                return
        self._skip = 0
        self.end()


class FakeAppliance:
    """Opens runs whose runners are threads. `states` says what a worker's loader returns from state_dict()."""

    embedded = True

    def __init__(self, passes: Passes, **settings: Any) -> None:
        self.settings = resolve(timeout_s=settings.pop("timeout_s", 10.0), **settings)
        self.passes = passes
        self.capabilities: dict[str, Any] = {"state_methods": 2, "length": -1, "looked_at_assignment": True}
        self.opened: list[dict[str, Any]] = []
        self.runs: list[LoadedRun] = []
        self.closed = False

    def open_stream(self, owner: Any, opening: Opening) -> Any:
        start, name = opening.start, opening.reference.name
        of = {"name": name, "start": start, "seed": opening.seed, "key": opening.key}
        self.opened.append({**of, "arguments": decode_state(opening.arguments)})
        run = LoadedRun(self, start, opening.seed, opening.cover)
        self.runs.append(run)
        position, settings = Position.from_proto(start.position), self.settings
        return run, reader_for(settings.device, run, position, name, settings.timeout_s)  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed = True
        for run in self.runs:
            run.close()

    def __repr__(self) -> str:
        return "<FakeAppliance>"


class LoadedRun(FakeRun):
    """A run that a loader has opened on a FakeAppliance."""

    def __init__(self, appliance: FakeAppliance, start: BoxStart, seed: int | None, cover: DigestCover) -> None:
        self.appliance = appliance
        self.base = Position.from_proto(start.position)
        self.seed = 5 if seed is None else seed
        self.abandoned = False
        self.cover = cover
        self.fetched: list[int] = []
        count = appliance.settings.num_workers_per_box
        base = self.base
        super().__init__(
            count,
            [
                ThreadRunner(
                    slot,
                    appliance.passes,
                    delivered=base.delivered[slot],
                    total=base.total[slot],
                    epoch=base.epoch,
                )
                for slot in range(count)
            ],
        )
        for view in self.views:
            view.capabilities.CopyFrom(records_pb2.LoaderCapabilities(**appliance.capabilities))

    def dial(self, view: pb.SlotView, hello: lane_pb2.Hello) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.send(hello.SerializeToString())
        runner = self.runners[view.slot]
        assert isinstance(runner, ThreadRunner)
        runner.arrive(theirs)
        return ours

    def wait_for(self, ready: Callable[[Any], bool], timeout_s: float) -> bool:
        return ready(self)

    def fetch_state(self, step: int, deadline_s: float) -> FetchedState:
        """Return the state at the progress that the loop reports, as a coordinator would."""
        self.fetched.append(step)
        position = self.progress.position()
        assert position is not None
        assert position.step == step
        fetched = FetchedState(positions={0: position})
        for slot, place in enumerate(position.slots):
            record = pb.WorkerRecord(
                local_worker_id=slot,
                num_workers_per_box=self.num_slots,
                num_boxes=1,
                step=step,
                worker_step=place.total,
                samples_streamed=place.total,
            )
            user = {"done": place.delivered} if self.appliance.capabilities["state_methods"] else None
            fetched.records.append((record, encode_state({"user": user, "restart": {"slot": slot}})))
        return fetched

    def close(self, *, forget: bool = True) -> None:
        if not self.closed:
            self.closed = True
            for runner in self.runners.values():
                assert isinstance(runner, ThreadRunner)
                runner.stop()
            os.close(self.wake_fd)


@pytest.fixture
def appliances() -> Iterator[Any]:
    """Makes fake appliances, and closes them after the test."""
    made: list[FakeAppliance] = []

    def make(passes: Passes, **settings: Any) -> FakeAppliance:
        made.append(FakeAppliance(passes, **settings))
        return made[-1]

    yield make
    for appliance in made:
        appliance.close()


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


@pytest.fixture
def rig(rigs: Any, device: FakeBackend) -> Any:
    """Reader of one slot, with a device whose copies happen when `device.finish` is called."""
    return rigs(backend=device)


@pytest.fixture
def two(appliances: Any) -> Any:
    """An appliance of two workers."""
    return appliances(numbers, num_workers_per_box=2)


@pytest.fixture
def loader() -> DataLoader:
    return DataLoader(streams.counter)
