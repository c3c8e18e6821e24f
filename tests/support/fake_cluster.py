"""Simulated coordinator for tests, without processes, sockets or real time; only the test advances the time."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

from penstock.appliance.core.cluster import Topic
from penstock.appliance.core.entities import Slot
from penstock.appliance.core.opening import start_of
from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.journal.journal import Journal, StateDir
from penstock.appliance.journal.snapshot_index import SnapshotIndex
from penstock.appliance.limits import Limits
from penstock.proto.errors import PenstockError
from penstock.proto.rpc.wire_errors import detail_of
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


@contextmanager
def limited(**limits: float) -> Iterator[None]:
    """Give constants of the coordinator, by their names in lower case, other values: a decorator or a context."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("penstock.appliance.")]
    with ExitStack() as stack:
        for name, value in limits.items():
            holders = [module for module in modules if name.upper() in vars(module)]
            assert holders, f"no module of the coordinator has {name.upper()}"
            for module in holders:
                stack.enter_context(mock.patch.object(module, name.upper(), value))
        yield


class FakeCluster:
    """Coordinator with the real state machine, a clock that the test advances, and the topics that would wake calls."""

    def __init__(self, limits: Limits | None = None, directory: StateDir | None = None) -> None:
        self.now = 1000.0
        self.wall = 0.0
        """Seconds since the Unix epoch, advanced by the test."""
        self.limits = limits or Limits()
        self.topics: list[Topic] = []
        self.directory = directory
        self.host = "host-c"
        self.boot(directory)

    def boot(self, directory: StateDir | None) -> None:
        """Start a new coordinator process on the state directory; None: in memory."""
        self.journal = Journal(directory)
        weakref.finalize(self, self.journal.close)  # since Python 3.13 an unclosed database is a warning
        self.snapshot_index = SnapshotIndex(self.limits.budget)
        self.state_machine = StateMachine(
            self.journal,
            self.snapshot_index,
            self.limits,
            clock=lambda: self.now,
            wall=lambda: self.wall,
            fresh_seed=lambda: 4242,
            changed=self.topics.append,
            host=self.host,
        )

    def restart(self, *workers: FakeWorker) -> None:
        """Restart the coordinator on its state directory, and register these workers with ready runners."""
        self.journal.close()
        self.boot(self.directory)
        for worker in workers:
            worker.register()
            worker.ready()

    def run_for(self, seconds: float, alive: Iterable[FakeWorker | FakeBox] = ()) -> None:
        """Advance the time by quarters of a second, in each of which all `alive` report."""
        alive = list(alive)
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            for one in alive:
                one.report()
            self.state_machine.tick()

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        """Record a worker's report and return the reply at once: it is the service that waits for a change."""
        self.state_machine.workers.report_worker(request)
        return self.state_machine.workers.worker_view(request)

    def watch(self, request: pb.WatchRunRequest) -> pb.WatchRunReply:
        """Record a box's report and return the reply at once."""
        self.state_machine.attempts.report_box(request)
        return self.state_machine.attempts.box_view(request)

    def status(self) -> pb.StatusReply:
        reply = pb.StatusReply()
        for _ in self.state_machine.status_steps(reply):
            pass
        return reply

    def slots(self) -> list[Slot]:
        return [s for a in self.state_machine.cluster.open_attempts() for box in a.boxes.values() for s in box.slots]

    def worker(
        self,
        name: str,
        slots: int = 8,
        *,
        host: str = "host-a",
        session: str = "",
        cores: int = 0,
        lanes: int = 0,
        allow: tuple[str, ...] = (),
    ) -> FakeWorker:
        worker = FakeWorker(self, name, session or f"{name}-1", host, slots, cores, lanes, allow)
        worker.register()
        return worker

    def open(self, box: int = 0, **fields: object) -> FakeBox:
        """Open run "job/0" with 2 workers per box. `fields`: of the request, loader options `retention` (100) and
        `skip_poison` (False), or the `credential` ("")."""
        retention = fields.pop("retention", 100)
        credential = str(fields.pop("credential", ""))
        skip_poison = bool(fields.pop("skip_poison", False))
        request = pb.OpenRunRequest(
            job="job", box=box, num_boxes=1, num_workers_per_box=2, host_id="host-a", host="host-a"
        )
        request.client_id = f"client-{box}"
        request.loader.input_fn = "m:f"
        request.loader.options.retention_steps = int(str(retention))
        request.loader.options.skip_poison = skip_poison
        request.MergeFrom(pb.OpenRunRequest(**fields))  # type: ignore[arg-type]
        return FakeBox(self, request, self.state_machine.attempts.open_run(request, credential))


@dataclass
class FakeWorker:
    """Worker daemon without processes, which reports what the test says."""

    world: FakeCluster
    name: str
    session: str
    host: str
    capacity: int
    cores: int = 0
    lanes: int = 0
    """Lane protocol; 0 = that of a release that does not name its own."""
    allow: tuple[str, ...] = ()
    answered: set[str] = field(default_factory=set)
    """Ids of the requests that the worker has answered, each once."""

    def register(self) -> None:
        request = pb.RegisterWorkerRequest(worker=self.name, session=self.session, host_id=self.host)
        request.slots, request.local_address, request.tcp_address = self.capacity, f"@{self.name}", f"{self.name}:1"
        request.cores, request.lane_protocol = self.cores, self.lanes
        request.allow.extend(self.allow)
        self.world.state_machine.workers.register_worker(request)

    def heartbeat(self, *reports: pb.SlotReport) -> pb.HeartbeatReply:
        request = pb.HeartbeatRequest(worker=self.name, session=self.session, slots=reports)
        return self.world.heartbeat(request)

    def report(self) -> None:
        self.heartbeat()

    def of(self, slot: int, box: int = 0) -> records_pb2.WorkerAssignment:
        (found,) = (a for a in self.heartbeat().assignments if (a.box, a.slot) == (box, slot))
        return found

    def slot_report(self, assignment: records_pb2.WorkerAssignment, phase: pb.SlotPhase.ValueType) -> pb.SlotReport:
        report = pb.SlotReport(run=assignment.run, attempt=assignment.attempt, box=assignment.box)
        report.slot, report.generation, report.phase = assignment.slot, assignment.generation, phase
        return report

    def ready(self) -> pb.HeartbeatReply:
        """Report that the runner of every assigned slot is ready."""
        return self.heartbeat(*(self.slot_report(assignment, pb.READY) for assignment in self.heartbeat().assignments))

    def lose(self, assignment: records_pb2.WorkerAssignment, message: str = "killed by SIGKILL") -> pb.HeartbeatReply:
        report = self.slot_report(assignment, pb.FAILED)
        report.lost = True
        report.error.CopyFrom(records_pb2.ErrorDetail(name="WorkerLostError", message=message))
        return self.heartbeat(report)


@dataclass
class FakeBox:
    """Training process that has opened one box of a run."""

    world: FakeCluster
    request: pb.OpenRunRequest
    reply: pb.OpenRunReply
    position: Position | None = None
    abandoned: dict[int, int] = field(default_factory=dict)
    epoch_starts: list[Position] = field(default_factory=list)
    omits_epoch_starts: bool = False
    epoch_ended: bool = False

    def progress(self) -> pb.WatchRunRequest:
        request = pb.WatchRunRequest(run=self.reply.run, attempt=self.reply.attempt, box=self.request.box)
        request.client_id, request.epoch_ended = self.request.client_id, self.epoch_ended
        request.abandoned.extend(pb.AbandonedEpoch(epoch=epoch, step=step) for epoch, step in self.abandoned.items())
        request.epoch_starts.extend(start.to_proto() for start in self.epoch_starts)
        request.omits_epoch_starts = self.omits_epoch_starts
        if self.position is not None:
            request.delivered.CopyFrom(self.position.to_proto())
        return request

    def watch(self) -> pb.WatchRunReply:
        return self.world.watch(self.progress())

    def report(self) -> None:
        self.watch()

    def deliver(self, steps: int) -> None:
        """Deliver `steps` more batches to the loop, and report the position."""
        if self.position is None:
            self.position = start_of(self.request)
        for _ in range(steps):
            self.position.deliver()
        self.watch()

    def abandon_epoch(self) -> None:
        """Abandon the epoch, as by `break`, and report this."""
        assert self.position is not None
        self.abandoned[self.position.epoch] = self.position.step
        self.position.abandon_epoch()
        self.watch()

    def phases(self) -> list[str]:
        return [pb.SlotPhase.Name(slot.phase) for slot in self.watch().slots]

    def close(self, error: PenstockError | None = None, *, finished: bool = False, forget: bool = False) -> None:
        request = pb.CloseRunRequest(run=self.reply.run, attempt=self.reply.attempt, box=self.request.box)
        request.client_id, request.forget, request.finished = self.request.client_id, forget, finished
        if error is not None:
            request.error.CopyFrom(detail_of(error))
        self.world.state_machine.attempts.close_run(request)

    def refused(self) -> PenstockError:
        """Return the error of a WatchRun call of the box; AssertionError if it is answered."""
        try:
            self.watch()
        except PenstockError as error:
            return error
        raise AssertionError("the watch was answered")
