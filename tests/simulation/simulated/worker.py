"""A worker daemon and its runners, as far as the coordinator and a training loop can tell them from real ones.

The daemon does what penstock.worker.daemon.daemon does: it registers, holds one long poll and tells changes beside it,
makes what it runs equal to what it is told, sends snapshots, answers state requests. A runner produces the reference's
batches, a few ahead of the loop, takes snapshots as it goes, and on recovery replays from the base that the real one
would choose. What a runner claims or serves is checked against the truth on the spot.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from simulated.network import Network
from simulated.reference import Batch, BoxPlan
from simulated.truth import Base, Owner, Truth
from simulated.virtual import Process, World

from penstock.proto.errors import (
    CoordinatorUnavailableError,
    DeadlineError,
    JournalError,
    PenstockError,
    StateUnavailableError,
    SupersededError,
    WorkerLostError,
)
from penstock.proto.rpc.bounds.reply_parts import SnapshotParts
from penstock.proto.rpc.calls import answer_parts, snapshot_parts
from penstock.proto.rpc.credentials.tickets import check_ticket
from penstock.proto.rpc.wire_errors import detail_of
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = ["Daemon", "Take"]

HOLD_S = 1.0
CALL_S = 10.0
RETRY_S = 0.3
UPLOAD_S = 1.0
AHEAD = 3
"""Batches produced before the loop wants them."""
AWAY = (CoordinatorUnavailableError, DeadlineError, JournalError)
"""Try again: the coordinator is away, or its disk is full."""

Key = tuple[str, int, int, int, int]
"""(run, attempt, box, slot, generation)."""


@dataclass(frozen=True)
class Take:
    """The loop wants the batch after `total` of this slot, in epoch `epoch`, of which it has `delivered`."""

    key: Key
    ticket: str
    epoch: int
    delivered: int
    total: int


@dataclass
class Runner:
    """Runner of a slot under one generation."""

    process: Process
    daemon: Daemon
    assignment: records_pb2.WorkerAssignment
    plan: BoxPlan
    phase: pb.SlotPhase.ValueType = pb.STARTING
    error: records_pb2.ErrorDetail | None = None
    lost: bool = False
    starts: list[Base] = field(default_factory=list)
    durable: set[Base] = field(default_factory=set)
    ends: dict[int, int] = field(default_factory=dict)
    """Pass -> total where it ended, as this runner saw it."""
    epoch: int = 0
    index: int = 0
    """Batches produced of this epoch."""
    total: int = 0
    wanted: int = 0
    """The loop has taken up to here."""
    sought: bool = False
    """The runner is at the loop's position: at once on a start, on recovery after the first demand."""
    opening: bool = False
    """The beginning of this epoch is not durable yet."""
    refreshed: bool = False
    """The migration target has fetched what became durable while it prepared."""
    handing: bool = False
    migrated: bool = False
    alive: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        a = self.assignment
        return a.run, a.attempt, a.box, a.slot, a.generation

    def spawn(self, work: Any) -> None:
        self.tasks.append(self.process.spawn(work))

    def stop(self) -> None:
        self.alive = False
        for task in self.tasks:
            task.cancel()
        self._wake()

    def fail(self, error: PenstockError, *, lost: bool) -> None:
        if self.alive and self.phase != pb.FAILED:
            self.phase, self.error, self.lost = pb.FAILED, detail_of(error), lost
            self.daemon.truth.failed(self.key, lost)
            self.stop()
            self.daemon.dirty.set()

    # ---- its life

    async def live(self) -> None:
        try:
            await self._start()
        except PenstockError as error:
            self.fail(error, lost=isinstance(error, CoordinatorUnavailableError))
            return
        self.daemon.truth.ready(self.key)
        self.phase = pb.READY
        self.daemon.dirty.set()
        self._wake()
        self.spawn(self._produce())
        self.spawn(self._upload())

    async def _start(self) -> None:
        a, rng = self.assignment, self.daemon.world.rng
        await asyncio.sleep(rng.uniform(0.01, 0.4))
        if a.recovery:
            self._load(await self.daemon.patiently("GetSnapshots", self._request_snapshots()))
            return
        slots = a.start.slots
        at = slots[a.slot] if slots else records_pb2.SlotPosition()
        self.epoch, self.index, self.total = a.start.epoch, at.delivered, at.total
        self.wanted, self.sought = self.total, True
        start = Base(self.epoch, self.total, self.index)
        self.starts.append(start)
        await self._make_durable(start)  # before any batch can be fetched

    def _load(self, parts: list[pb.SnapshotPart]) -> None:
        snapshots = SnapshotParts()
        for part in parts:
            snapshots.add(part)
        for header, data in snapshots.all():
            start = Base(header.epoch, header.total, header.delivered)
            self.daemon.truth.loads(self.key, start, data)
            if start not in self.durable:
                self.starts.append(start)
                self.durable.add(start)

    async def _refresh(self) -> None:
        """A successor's first demand: its predecessor went on until now."""
        self.refreshed = True
        try:
            self._load(await self.daemon.call("GetSnapshots", self._request_snapshots()))
        except AWAY:
            pass  # then from what was there when it began

    async def prepare_migration(self) -> None:
        self.handing = True
        if self.assignment.is_target:  # the model's replay takes no time
            await asyncio.sleep(self.daemon.world.rng.uniform(0.0, 0.4))
            self.migrated = True
            self.daemon.dirty.set()
            return
        newest = max((start for start in self.starts if start.total <= self.wanted), default=None)
        if newest is not None and newest not in self.durable:
            await self._make_durable(newest)
        self.migrated = True
        self.daemon.dirty.set()

    def _request_snapshots(self) -> pb.GetSnapshotsRequest:
        run, attempt, box, slot, generation = self.key
        return pb.GetSnapshotsRequest(run=run, attempt=attempt, box=box, slot=slot, generation=generation)

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _change(self) -> None:
        """Raises StateUnavailableError once it is over."""
        if not self.alive:
            raise StateUnavailableError(f"the runner of {self.key} has ended")
        await self.changed.wait()

    # ---- batches

    async def _produce(self) -> None:
        cadence, batch_s = self.daemon.cadence, self.daemon.batch_s
        while True:
            at_end = self.index == self.plan.length(self.assignment.slot, self.epoch)
            idle = not self.sought or self.opening
            if idle or at_end or self.total >= self.wanted + AHEAD:
                if at_end and not idle:
                    self.ends.setdefault(self.epoch, self.total)
                    self._wake()
                await self.changed.wait()
                continue
            epoch = self.epoch
            await asyncio.sleep(batch_s)
            if self.epoch != epoch:
                continue  # the loop has left that epoch
            self.index += 1
            self.total += 1
            if self.total % cadence == 0:
                self.starts.append(Base(self.epoch, self.total, self.index))
            self._wake()

    async def take(self, wish: Take) -> Batch | None:
        """The next batch, or None where the epoch has ended."""
        while self.phase != pb.READY:
            await self._change()
        if self.assignment.is_target and not self.refreshed:
            await self._refresh()
        if not self.sought:
            self._seek(wish)
        if wish.epoch > self.epoch:
            self._open_epoch(wish)
        while self.opening:
            await self._change()
        if (wish.epoch, wish.total - wish.delivered) != (self.epoch, self.total - self.index):
            raise SupersededError(f"a late wish for batch {wish.total + 1} of epoch {wish.epoch}")
        self.wanted = max(self.wanted, wish.total)
        self._wake()
        while self.epoch == wish.epoch:
            if self.total > wish.total:
                mixed_from = tuple(change.step for change in self.assignment.mixture_changes)
                return Batch(self.assignment.slot, wish.epoch, wish.delivered + 1, wish.total + 1, mixed_from)
            if self.ends.get(wish.epoch) == wish.total:
                return None
            await self._change()
        raise SupersededError("the epoch was left meanwhile")

    def open(self, wish: Take) -> None:
        """The loop begins an epoch, at this total of the slot. A recovering runner hears that with the first wish."""
        if self.sought and wish.epoch > self.epoch:
            self._open_epoch(wish)

    def _seek(self, wish: Take) -> None:
        """Recovery: replay from the newest base before the last delivered batch."""
        place = (wish.epoch, wish.total)
        usable = [start for start in self.starts if start.epoch <= wish.epoch and start.total <= wish.total]
        before = [start for start in usable if start.total < wish.total] or usable
        start = max(before, default=None)
        self.daemon.truth.restarts(self.key, self.plan, start, place)
        self.epoch, self.index, self.total = wish.epoch, wish.delivered, wish.total
        self.wanted, self.sought = wish.total, True
        if start is not None and start.epoch < wish.epoch and wish.delivered == 0:
            self._begin_pass()

    def _open_epoch(self, wish: Take) -> None:
        began = wish.total - wish.delivered
        natural = wish.epoch == self.epoch + 1 and self.ends.get(self.epoch) == began
        self.ends[self.epoch] = began
        self.starts = [start for start in self.starts if start.epoch < self.epoch or start.total <= began]
        self.epoch, self.index, self.total = wish.epoch, 0, began
        if natural:
            self.starts.append(Base(self.epoch, began, 0))
        else:
            self._begin_pass()
        self._wake()

    def _begin_pass(self) -> None:
        """Start behind an abandoned epoch, which cannot be replayed: no batch before this one is durable."""
        start = Base(self.epoch, self.total, 0)
        self.starts.append(start)
        self.opening = True
        self.spawn(self._open(start))

    async def _open(self, start: Base) -> None:
        if await self._make_durable(start):
            self.opening = False
            self._wake()

    # ---- snapshots

    async def _upload(self) -> None:
        while True:
            # What the loop has not been handed may never happen, if it leaves the epoch.
            newest = max((start for start in self.starts if start.total <= self.wanted), default=None)
            if newest is not None and newest not in self.durable:
                await self._make_durable(newest)
            await asyncio.sleep(UPLOAD_S)

    async def _make_durable(self, start: Base) -> bool:
        """False if this runner is fenced: it has nothing more to give to anybody."""
        run, attempt, box, slot, generation = self.key
        header = pb.SnapshotHeader(run=run, attempt=attempt, box=box, slot=slot, generation=generation)
        header.epoch, header.total, header.delivered = start.epoch, start.total, start.delivered
        data = self.daemon.truth.content(self.key, start)
        while True:
            try:
                reply = await self.daemon.call("PutSnapshot", list(snapshot_parts(header, data)))
            except AWAY:
                await asyncio.sleep(RETRY_S)
                continue
            except PenstockError:
                return False
            self.durable.add(start)
            if not reply.refused:
                self.daemon.truth.acknowledged(self.key, start)
            return True

    # ---- states

    async def state(self, request: pb.StateRequest, answer: pb.StateAnswer) -> bytes:
        epoch, delivered, total = request.epoch, request.position.delivered, request.position.total
        began = total - delivered
        while self.phase != pb.READY:
            await self._change()
        if request.HasField("mixture"):
            known = len(self.assignment.mixture_changes)
            change = records_pb2.MixtureChange(position=request.mixture.steps, epoch=known)
            return pb.MixturePlan(change=change).SerializeToString()
        while True:
            end = self.ends.get(epoch - 1, began)
            # As the real one: it was ahead in an epoch that the loop has left, and has not heard of the next one yet.
            unheard = end > began and self.epoch < epoch
            if unheard:
                await self._change()
                continue
            if end != began:
                answer.ended, answer.ended_epoch, answer.ended_total = True, epoch - 1, end
                return b""
            if self.ends.get(epoch, total) < total:
                answer.ended, answer.ended_epoch, answer.ended_total = True, epoch, self.ends[epoch]
                return b""
            produced = self.sought and self.total >= total
            if produced or not self.sought:
                # A recovering runner waits for its loop, which may wait for this state: what was delivered can be
                # replayed. (A real one finds out by its digests where it cannot.)
                starts = [start for start in self.starts if start.epoch <= epoch and start.total <= total]
                start = max(starts, default=None)
                if self.daemon.truth.can_replay(self.key, self.plan, start, (epoch, total), produced):
                    break
                if produced or start is None:  # as the real one: nothing is kept
                    raise StateUnavailableError(f"batch {total} cannot be reached from {start}")
            await self._change()
        end = began + self.plan.length(self.assignment.slot, epoch)
        if end < total:  # found by replay
            answer.ended, answer.ended_epoch, answer.ended_total = True, epoch, end
            return b""
        return self.daemon.truth.content(self.key, Base(epoch, total, delivered))


class Daemon:
    """Daemon of one incarnation of a worker."""

    def __init__(
        self, world: World, network: Network, truth: Truth, name: str, *, slots: int, host: str, session: str
    ) -> None:
        self.world = world
        self.truth = truth
        self.name = name
        self.session = session
        self.slots = slots
        self.host = host
        self.cadence = world.rng.choice((1, 2, 3))
        self.batch_s = world.rng.choice((0.01, 0.05, 0.2))
        self.process = world.process(name)
        self.process.serve = self._serve
        self.dirty = asyncio.Event()
        self.leaving = self.draining = False
        self.drains = False
        """Drain state in the coordinator's last reply."""
        self.superseded = False
        self.runners: dict[Key, Runner] = {}
        self._network = network
        self._made = self._seen = 0
        """Version of the newest reply that was obeyed: an older one was overtaken. And what heartbeats say of it: 0 to
        be told everything again."""
        self._hold_s, self._lease_s = HOLD_S, 0.0
        self._commit_mark = b""
        self._registrations = 0
        self._answered: set[str] = set()
        self.process.spawn(self._run())

    @property
    def owner(self) -> Owner:
        return self.name, self.session

    async def call(self, method: str, request: Any, deadline_s: float = CALL_S) -> Any:
        return await self._network.call(self.process, "coordinator", method, request, deadline_s)

    async def patiently(self, method: str, request: Any) -> Any:
        """Again and again while the coordinator is away."""
        while True:
            try:
                return await self.call(method, request)
            except AWAY:
                await asyncio.sleep(RETRY_S)

    # ---- heartbeats

    async def _run(self) -> None:
        await self._register()
        self.process.spawn(self._report_changes())
        while True:
            registration, hold_s = self._registrations, self._hold_s
            try:
                reply = await self.call("Heartbeat", self._heartbeat(hold_s), hold_s + CALL_S)
            except AWAY:
                await asyncio.sleep(RETRY_S)
                continue
            if reply.register_again:
                await self._register()
                continue
            self._take(reply, registration)

    async def _register(self) -> None:
        request = pb.RegisterWorkerRequest(worker=self.name, session=self.session, host_id=self.host, slots=self.slots)
        request.local_address, request.tcp_address = f"@{self.name}", f"{self.name}:1"
        request.draining, request.commit_mark = self.drains, self._commit_mark
        try:
            reply = await self.patiently("RegisterWorker", request)
            self._registrations += 1
            self._hold_s, self._lease_s = reply.heartbeat_s, reply.lease_s
            self._made = self._seen = 0
        except SupersededError:
            self.superseded = True  # another process has this name, as far as the coordinator knows
            self.process.kill()
            await asyncio.Event().wait()

    async def _report_changes(self) -> None:
        while True:
            await self.dirty.wait()
            self.dirty.clear()
            registration = self._registrations
            try:
                reply = await self.call("Heartbeat", self._heartbeat(0.0))
            except AWAY:
                await asyncio.sleep(RETRY_S)
                self.dirty.set()
                continue
            if not reply.register_again:
                self._take(reply, registration)

    def _heartbeat(self, hold_s: float) -> pb.HeartbeatRequest:
        request = pb.HeartbeatRequest(worker=self.name, session=self.session, seen_version=self._seen, hold_s=hold_s)
        request.lease_s = self._lease_s
        for (run, attempt, box, slot, generation), runner in self.runners.items():
            request.slots.add(
                run=run,
                attempt=attempt,
                box=box,
                slot=slot,
                generation=generation,
                phase=runner.phase,
                error=runner.error,
                lost=runner.lost,
                migrated=runner.migrated,
            )
        request.leaving = self.draining
        return request

    def _take(self, reply: pb.HeartbeatReply, registration: int) -> None:
        self._hold_s, self._lease_s = reply.heartbeat_s, reply.lease_s
        self.drains, self._commit_mark = reply.draining, reply.commit_mark
        stale = registration != self._registrations or reply.version < self._made
        if not (self.leaving or stale or reply.unchanged):
            self._made = self._seen = reply.version
            self._make_it_so(reply)

    def _make_it_so(self, reply: pb.HeartbeatReply) -> None:
        wanted = {(a.run, a.attempt, a.box, a.slot, a.generation): a for a in reply.assignments}
        for key in [key for key in self.runners if key not in wanted]:
            self.runners.pop(key).stop()
        for key, assignment in wanted.items():
            if key not in self.runners:
                plan = self.truth.starts(key, self.owner, assignment)
                runner = self.runners[key] = Runner(self.process, self, assignment, plan)
                runner.spawn(runner.live())
            elif assignment.prepare_migration and not self.runners[key].handing:
                self.runners[key].spawn(self.runners[key].prepare_migration())
            elif not assignment.prepare_migration:
                self.runners[key].handing = self.runners[key].migrated = False
        self._answered &= {request.request for request in reply.state_requests}
        for request in reply.state_requests:
            if request.request not in self._answered:
                self._answered.add(request.request)
                self.process.spawn(self._answer(request))

    async def _answer(self, request: pb.StateRequest) -> None:
        runner = self.runners.get((request.run, request.attempt, request.box, request.slot, request.generation))
        if runner is None:
            self._not_answered(request.request)
            return
        answer = pb.StateAnswer(request=request.request, worker=self.name, session=self.session)
        data = b""
        try:
            async with asyncio.timeout(request.deadline_s):
                data = await runner.state(request, answer)
        except TimeoutError:
            answer.error.CopyFrom(detail_of(DeadlineError(f"no state at step {request.step} in time")))
        except PenstockError as error:
            answer.error.CopyFrom(detail_of(error))
        for epoch, total in runner.ends.items():
            answer.ends.add(epoch=epoch, total=total)
        try:
            await self.call("PutState", list(answer_parts(answer, data)))
        except PenstockError:
            self._not_answered(request.request)

    def _not_answered(self, request: str) -> None:
        self._answered.discard(request)
        self._seen = 0

    # ---- lanes

    async def _serve(self, method: str, wish: Take) -> Batch | None:
        runner = self.runners.get(wish.key)
        if runner is None or not runner.alive:
            raise SupersededError(f"worker {self.name} does not run {wish.key}")
        check_ticket(wish.ticket, runner.assignment.lane_key, 0.0, str(wish.key))  # a scenario is over within a term
        if method == "Open":
            runner.open(wish)
            return None
        return await runner.take(wish)

    # ---- what befalls it

    def lose_runner(self, key: Key) -> None:
        self.runners[key].fail(WorkerLostError("killed by SIGKILL"), lost=True)

    async def leave(self) -> None:
        """Migrate the slots, for a limited time, and end."""
        until = self.world.now + self.world.rng.choice((0.0, 1.0, 4.0))
        self.draining = True
        self.dirty.set()
        while self.runners and self.world.now < until:
            await asyncio.sleep(0.2)
        self.leaving = True
        request = pb.DeregisterWorkerRequest(worker=self.name, session=self.session)
        try:
            await self.call("DeregisterWorker", request, 2.0)
        except PenstockError:
            pass
        self.process.kill()
