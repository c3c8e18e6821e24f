"""Fake workers and boxes: they send a coordinator the calls of real ones, many of them on one connection.

A fake worker does what worker/penstock/worker/daemon/daemon.py does: it registers, keeps one long poll open, reports a
change at once beside it, makes a slot's first snapshot durable before the slot is READY, sends later ones at its quota,
and answers state requests. A fake box opens the run and watches it, and its training loop takes STEPS_PER_S batches a
second. Neither has runners, rings or lanes, because a coordinator has no contact with these.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError, PenstockError
from penstock.proto.rpc.calls import AsyncCoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = ["FakeBox", "FakeWorker", "Payload", "Tally"]

STEPS_PER_S = 10.0
"""Speed of each fake box's training loop, in steps per second."""
RETRY_S = 2.0
"""Mean pause before a call is retried, in seconds. A real daemon waits 0.3 s in a process of its own; thousands of fake
workers in one process that retried so often would prevent this process from connecting at all."""
JOB = "fleet"


@dataclass
class Tally:
    """Measurements that all fake workers and boxes add to. Times are those of time.monotonic(), in seconds."""

    heartbeats: int = 0
    watches: int = 0
    longest_gap_s: float = 0.0
    """Longest time in seconds between two heartbeats of the same worker."""
    shortest_margin: float = float("inf")
    """Smallest ratio of a worker's lease (seconds of silence after which it counts as dead) to the time between two of
    its heartbeats. Below 1 a worker was too late."""
    assigned: list[tuple[tuple[int, int], float]] = field(default_factory=list)
    """Assignments: pairs of (box, slot) and the time at which the slot's worker got the assignment."""
    settled: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of a box's number and the time at which the box knew that all its slots were READY."""
    snapshots: int = 0
    snapshot_bytes: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    retried: Counter[str] = field(default_factory=Counter)
    """Messages of errors after which calls were tried again, because the coordinator could not be reached."""
    lost: int = 0
    """Number of slots that were moved because a worker missed its lease."""

    async def pause(self, error: PenstockError) -> None:
        """Count an error because of which a call is tried again, and wait about RETRY_S seconds."""
        self.retried[error.message] += 1
        await asyncio.sleep(random.uniform(0.5, 1.5) * RETRY_S)

    def failed(self, who: str, error: BaseException) -> None:
        if len(self.failures) < 20:
            self.failures.append(f"{who}: {type(error).__name__}: {error}"[:500])


@dataclass
class Payload:
    """Contents of the states and snapshots that fake workers send, the same for all workers. Only their sizes
    matter."""

    state: bytes = bytes(1024)
    snapshot: bytes = bytes(1024)
    sending: bool = False
    """True if workers send further snapshots after the first one of a slot."""


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait for their end. Without this wait, gRPC would wait forever for a call that is still being
    cancelled when its channel is closed."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class FakeWorker:
    """Fake worker daemon with one slot."""

    def __init__(self, name: str, client: AsyncCoordinatorClient, tally: Tally, payload: Payload) -> None:
        self.name = name
        self.session = f"{name}-1"
        self.assignments: dict[tuple[int, int, int], records_pb2.WorkerAssignment] = {}
        self.assigned = asyncio.Event()
        """Event that is set when this worker gets a new assignment."""
        self._client = client
        self._tally = tally
        self._payload = payload
        self._ready: set[tuple[int, int, int]] = set()
        self._answered: set[str] = set()
        self._version = 0
        self.heartbeat_s, self._lease_s = 1.0, 3.0
        self._share_s, self._share_bytes_per_s = 1.0, float(4 << 20)
        self._last_beat = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._total = 0

    async def register(self) -> None:
        request = pb.RegisterWorkerRequest(worker=self.name, session=self.session, host_id="fleet", slots=1)
        request.local_address, request.tcp_address = f"{self.name}.lanes", "127.0.0.1:1"
        while True:
            try:
                reply = await self._client.register(request)
                self._told(reply)
                return
            except (CoordinatorUnavailableError, DeadlineError) as error:
                await self._tally.pause(error)

    async def start(self) -> None:
        """Register the worker, and start its heartbeats and its uploads of snapshots. Return when it is registered."""
        await self.register()
        self._spawn(self._heartbeats())
        self._spawn(self._uploads())

    async def come_back(self) -> None:
        """Register again, as a worker process that was started anew does. Its slots were given to other workers."""
        number = int(self.session.rpartition("-")[2])
        self.session = f"{self.name}-{number + 1}"
        self._version, self._last_beat = 0, 0.0
        self._make_it_so(pb.HeartbeatReply())
        await self.register()

    async def drain(self) -> None:
        await self._client.deregister(pb.DeregisterWorkerRequest(worker=self.name, session=self.session))

    async def stop(self) -> None:
        await _cancelled(*self._tasks)

    # ---- heartbeats

    def _told(self, reply: pb.RegisterWorkerReply | pb.HeartbeatReply) -> None:
        self.heartbeat_s, self._lease_s = reply.heartbeat_s, reply.lease_s
        if isinstance(reply, pb.HeartbeatReply):
            self._share_s, self._share_bytes_per_s = reply.snapshot_every_s, reply.snapshot_bytes_per_s

    async def _beat(self, version: int, hold_s: float) -> pb.HeartbeatReply:
        now = time.monotonic()
        if self._last_beat:
            gap = now - self._last_beat
            self._tally.longest_gap_s = max(self._tally.longest_gap_s, gap)
            self._tally.shortest_margin = min(self._tally.shortest_margin, self._lease_s / max(gap, 1e-6))
        self._last_beat = now
        self._tally.heartbeats += 1
        request = pb.HeartbeatRequest(worker=self.name, session=self.session, seen_version=version, hold_s=hold_s)
        request.lease_s = self._lease_s
        for key, assignment in self.assignments.items():
            request.slots.append(self._report(key, assignment))
        return await self._client.heartbeat(request)

    def _report(self, key: tuple[int, int, int], assignment: records_pb2.WorkerAssignment) -> pb.SlotReport:
        ready = key in self._ready
        report = pb.SlotReport(run=assignment.run, attempt=assignment.attempt, box=assignment.box)
        report.slot, report.generation = assignment.slot, assignment.generation
        report.phase = pb.READY if ready else pb.STARTING
        if ready:
            report.capabilities.state_methods, report.capabilities.length = 4, -1
        report.produced, report.batches_per_s = self._total, 1.0
        return report

    async def _heartbeats(self) -> None:
        while True:
            try:
                reply = await self._beat(self._version, self.heartbeat_s)
            except (CoordinatorUnavailableError, DeadlineError) as error:
                await self._tally.pause(error)
                continue
            if reply.register_again:
                await self.register()
                self._version = 0
                continue
            self._told(reply)
            self._take(reply)

    async def _report_change(self) -> None:
        """Report a change of a slot to the coordinator at once, beside the heartbeat that is waiting for a reply."""
        while True:
            try:
                reply = await self._beat(self._version, 0.0)
            except (CoordinatorUnavailableError, DeadlineError) as error:
                await self._tally.pause(error)
                continue
            if not reply.register_again:
                self._take(reply)
            return

    def _take(self, reply: pb.HeartbeatReply) -> None:
        if reply.version >= self._version and not reply.unchanged:
            self._version = reply.version
            self._make_it_so(reply)

    def _make_it_so(self, reply: pb.HeartbeatReply) -> None:
        now = time.monotonic()
        wanted = {(a.box, a.slot, a.generation): a for a in reply.assignments}
        for key in [key for key in self.assignments if key not in wanted]:
            del self.assignments[key]
            self._ready.discard(key)
        for key, assignment in wanted.items():
            if key not in self.assignments:
                self.assignments[key] = assignment
                self._tally.assigned.append((key[:2], now))
                self.assigned.set()
                self._spawn(self._begin(key, assignment))
        open_requests = {request.request for request in reply.state_requests}
        self._answered &= open_requests
        for request in reply.state_requests:
            if request.request not in self._answered:
                self._answered.add(request.request)
                self._spawn(self._answer(request))

    # ---- slots

    async def _begin(self, key: tuple[int, int, int], assignment: records_pb2.WorkerAssignment) -> None:
        await self._put(assignment, 0)
        if key in self.assignments:
            self._ready.add(key)
            await self._report_change()

    async def _uploads(self) -> None:
        while not self._payload.sending:
            await asyncio.sleep(0.5)
        await asyncio.sleep(random.random() * self._share_s)
        while True:
            size = 0
            if self._payload.sending and self._ready:
                self._total += 10
                size = len(self._payload.snapshot)
                for assignment in list(self.assignments.values()):
                    await self._put(assignment, self._total)
            await asyncio.sleep(max(self._share_s, size / self._share_bytes_per_s))

    async def _put(self, assignment: records_pb2.WorkerAssignment, total: int) -> None:
        header = pb.SnapshotHeader(run=assignment.run, attempt=assignment.attempt, box=assignment.box)
        header.slot, header.generation, header.total, header.epoch_start = (
            assignment.slot,
            assignment.generation,
            total,
            not total,
        )
        while True:
            try:
                reply = await self._client.put_snapshot(header, self._payload.snapshot)
            except CoordinatorUnavailableError as error:
                await self._tally.pause(error)
                continue
            except PenstockError as error:
                self._tally.failed(self.name, error)
                return
            self._tally.snapshots += not reply.refused
            self._tally.refused += bool(reply.refused)
            self._tally.snapshot_bytes += 0 if reply.refused else len(self._payload.snapshot)
            return

    async def _answer(self, request: pb.StateRequest) -> None:
        answer = pb.StateAnswer(request=request.request, worker=self.name, session=self.session)
        answer.samples_streamed, answer.digest = request.position.total, request.position.total
        answer.capabilities.state_methods, answer.capabilities.length = 4, -1
        try:
            await self._client.put_state(answer, self._payload.state)
        except PenstockError as error:
            self._tally.failed(self.name, error)
            self._answered.discard(request.request)
            self._version = 0  # the next reply repeats the request

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._tally.failed(self.name, error)
            raise


class FakeBox:
    """Fake training process of one box: opens the run, watches it, and takes steps at STEPS_PER_S."""

    def __init__(self, number: int, boxes: int, workers: int, client: AsyncCoordinatorClient, tally: Tally) -> None:
        self.number = number
        self.attempt = 0
        self.opened_at = 0.0
        self._boxes = boxes
        self._workers = workers
        self._client = client
        self._tally = tally
        self._hold_s, self._lease_s = 1.0, 0.0
        self._trains_since = 0.0
        self._watching: asyncio.Task[None] | None = None

    @property
    def client_id(self) -> str:
        return f"client-{self.number}"

    async def open(self) -> None:
        request = pb.OpenRunRequest(job=JOB, client_id=self.client_id, box=self.number, num_boxes=self._boxes)
        request.num_workers_per_box, request.host_id, request.attempt_key = self._workers, f"host-{self.number}", "k"
        request.loader.input_fn = "module:function"
        request.loader.arguments = bytes(200)
        request.loader.options.retention_steps = 1000
        self.opened_at = time.monotonic()
        while True:
            try:
                reply = await self._client.open_run(request)
                break
            except (CoordinatorUnavailableError, DeadlineError) as error:
                await self._tally.pause(error)
        self.attempt, self._hold_s, self._lease_s = reply.attempt, reply.heartbeat_s, reply.lease_s

    def start(self) -> None:
        self._watching = asyncio.ensure_future(self._watch())

    def train(self) -> None:
        self._trains_since = time.monotonic()

    async def stop(self) -> None:
        if self._watching is not None:
            await _cancelled(self._watching)

    @property
    def step(self) -> int:
        return int((time.monotonic() - self._trains_since) * STEPS_PER_S) if self._trains_since else 0

    def progress(self, seen: int = 0, hold_s: float = 0.0) -> pb.WatchRunRequest:
        request = pb.WatchRunRequest(run=f"{JOB}/0", attempt=self.attempt, box=self.number, client_id=self.client_id)
        request.seen_version, request.hold_s, request.lease_s = seen, hold_s, self._lease_s
        step = self.step
        if step:
            position = request.delivered
            position.step, position.cursor = step, step % self._workers
            position.live.extend(range(self._workers))
            whole, more = divmod(step, self._workers)
            for slot in range(self._workers):
                total = whole + (slot < more)
                position.slots.add(delivered=total, total=total)
        return request

    async def _watch(self) -> None:
        seen, settled = 0, False
        while True:
            try:
                reply = await self._client.watch_run(self.progress(seen, self._hold_s))
            except (CoordinatorUnavailableError, DeadlineError) as error:
                await self._tally.pause(error)
                continue
            except PenstockError as error:
                self._tally.failed(f"box {self.number}", error)
                return
            self._tally.watches += 1
            self._hold_s, self._lease_s = reply.heartbeat_s, reply.lease_s
            if reply.version != seen:
                seen = reply.version
                self._tally.lost += sum("has not reported" in view.note for view in reply.slots)
                if not settled and all(view.phase == pb.READY for view in reply.slots):
                    settled = True
                    self._tally.settled.append((self.number, time.monotonic()))
