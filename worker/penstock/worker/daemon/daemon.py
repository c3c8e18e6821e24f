"""The worker daemon: registers with the coordinator, starts and stops slots. It never runs user code. Each heartbeat's
reply holds the whole set of slots to run, so a lost, late or repeated message does no harm. The event loop itself sends
them, so that a daemon that hangs loses its lease, and other workers get its slots."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.proto.errors import OverloadedError, PenstockError, SupersededError
from penstock.proto.lane.frames import LANE_PROTOCOL
from penstock.proto.rpc.addresses import host_id, socket_path
from penstock.proto.rpc.bounds.polling import HOLD_S, MOST, PollPace, intervals, within
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.credentials.tickets import check_ticket
from penstock.proto.rpc.version import VERSION
from penstock.proto.rpc.wire_errors import detail_of
from penstock.proto.state.loader_names import BY_VALUE, MAIN
from penstock.proto.v1 import coordinator_pb2, lane_pb2, records_pb2
from penstock.runtime.process.liveness_file import LivenessWriter
from penstock.worker.daemon.heartbeats import fitted
from penstock.worker.daemon.listeners import LaneListeners, slot_of
from penstock.worker.daemon.worker_settings import DaemonSettings, own_name, slot_bytes, user_of_runners
from penstock.worker.processes.child_processes import about_slot
from penstock.worker.processes.fork_servers import KeptForkServer, TemporaryFolder, end_orphans
from penstock.worker.processes.interpreters import StartedForkServer
from penstock.worker.processes.process_use import cores
from penstock.worker.processes.turn_queue import TurnQueue
from penstock.worker.processes.user_code import check_allowed, check_plain
from penstock.worker.slots.blobs import Blobs
from penstock.worker.slots.slot import Slot
from penstock.worker.slots.slot_record import (
    COORDINATOR_ERRORS,
    DaemonCounters,
    SlotHost,
    SlotKey,
    SnapshotQuota,
    key_of,
)

_log = logging.getLogger("penstock.worker")

RETRY_S = 0.3
UNAVAILABLE_AGAIN_S = 60.0
"""Seconds between two log lines that say that the coordinator cannot be reached."""
ATTACH_DEADLINE_S = 30.0
HELPERS_AT_ONCE = 2
"""Smallest limit on simultaneous helper processes; with more than two cores it is one per core."""
ANSWERS_AT_ONCE = 1024


class Daemon:
    """Worker daemon: runs each assigned slot in a child process. `run()` returns after `stop()`. fork_server: already
    started one; None: one is started for the first slot. stop: event that is the same as `stop()`."""

    def __init__(
        self,
        settings: DaemonSettings,
        fork_server: StartedForkServer | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.settings = settings
        user = user_of_runners(settings)
        self._tempdir = TemporaryFolder(user)
        self.host = SlotHost(
            settings.name or own_name(),
            AsyncCoordinatorClient(settings.coordinator, settings.token, tls=settings.tls, insecure=settings.insecure),
            Blobs(self._connect),
            KeptForkServer(self._tempdir.path, sandboxed=not settings.no_sandbox, user=user, started=fork_server),
            TurnQueue(cores()),
            TurnQueue(max(HELPERS_AT_ONCE, cores())),
            SnapshotQuota(every_s=1.0, bytes_per_s=4 << 20),
            DaemonCounters(),
            lambda: self._dirty.set(),
            settings.runner_memory,
            settings.embedded,
            slot_bytes(settings),
        )
        self._session = secrets.token_hex(8)
        self._liveness = LivenessWriter(settings.liveness_file)
        self._hold_s = HOLD_S
        self.lease_s = 0.0
        """Seconds without a heartbeat after which the coordinator counts this worker as dead; 0 before the first."""
        self._pace = PollPace()
        self.state_answers: Counter[str] = Counter()
        """By result: "ok", "error" or "dropped" (not sent)."""
        self.started_at = time.monotonic()
        self.answered_at: float | None = None
        """Monotonic time in seconds; None before the first answer."""
        self._slots: dict[SlotKey, Slot] = {}
        self._unstarted: dict[SlotKey, coordinator_pb2.SlotReport] = {}
        self._answered: set[str] = set()
        self._answering = 0
        self._unanswered = False
        self._made = self._seen = 0
        """Versions of the coordinator's replies: the last one applied, and the one reported as known (0: send all
        again)."""
        beside = socket_path(settings.coordinator)
        self.listeners = LaneListeners(
            self._attach, settings.tls, insecure=settings.insecure, folder=beside and beside.parent
        )
        self._clock_offset = 0.0
        """Coordinator's Unix time minus this worker's monotonic clock at the last reply, in seconds."""
        self._dirty = asyncio.Event()
        self._assigned = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that stop slots, never cancelled, so that the runners are reaped."""
        self._draining = self._leaving = False
        """Reasons why this worker gets no new slots: the coordinator drains it, or it is about to end."""
        self._stuck = 0
        """Slots for which no other worker has free capacity, during a drain."""
        self._commit_mark = b""
        """Newest journal commit that the coordinator reported, signed, in each heartbeat: a coordinator that restarts
        with an older journal detects the missing commits."""
        self._replied = asyncio.Event()
        self.stopping = stop or asyncio.Event()
        self._at_once = asyncio.Event()

    # ---- life cycle

    def stop(self, *, interrupted: bool = False) -> None:
        """End `run` once no slot runs here, or after `drain_s` seconds. `interrupted`: by Ctrl-C, the second of which
        ends it at once. (Schedulers repeat SIGTERM, and mean the same by it.)"""
        if interrupted and self.stopping.is_set():
            self._at_once.set()
        self.stopping.set()

    async def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Register, call `ready` with the worker's name, serve until `stop()`, migrate the slots, end all processes."""
        self.listeners.open(self.settings.listen)
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            registering = asyncio.ensure_future(self._register(first=True))
            await asyncio.wait([registering, stop], return_when="FIRST_COMPLETED")
            if not registering.done():  # stopped before a coordinator was reached
                registering.cancel()
                return
            registering.result()
            if os.geteuid() == 0 and not (self.settings.runner_user or self.settings.embedded):
                _log.warning("user code runs as root, and can change all that root can: set --runner-user USER")
            _log.info(
                "worker %s: %d slots, batches at %s", self.host.name, self.settings.slots, self.listeners.tcp_address
            )
            if ready is not None:
                ready(self.host.name)
            loops = [asyncio.ensure_future(work) for work in (self._heartbeats(), self._report_changes())]
            migrating = asyncio.ensure_future(self._migrate_slots())
            done, _ = await asyncio.wait([*loops, migrating], return_when="FIRST_COMPLETED")
            for task in [*loops, migrating, stop]:
                task.cancel()
            for task in done:
                task.result()
        finally:
            await self._leave()

    async def _migrate_slots(self) -> None:
        """Wait for a stop request, then until every slot has moved or ended, or `drain_s` is over, or a second Ctrl-C.
        Slots for which no other worker has room stay: their job may have got the same signal, and still save."""
        await self.stopping.wait()
        self._leaving = True
        self._dirty.set()
        until, told = time.monotonic() + self.settings.drain_s, False
        at_once = asyncio.ensure_future(self._at_once.wait())
        while self._slots and not at_once.done() and (left_s := until - time.monotonic()) > 0:
            if self._draining and self._stuck >= len(self._slots) and not told:
                _log.info("worker %s: no other worker can take its %d slots", self.host.name, len(self._slots))
                told = True
            self._replied.clear()
            replied = asyncio.ensure_future(self._replied.wait())
            await asyncio.wait([replied, at_once], timeout=left_s, return_when="FIRST_COMPLETED")
            replied.cancel()
        at_once.cancel()

    def _connect(self) -> CoordinatorClient:
        settings = self.settings
        return CoordinatorClient(settings.coordinator, settings.token, tls=settings.tls, insecure=settings.insecure)

    async def _leave(self) -> None:
        with contextlib.suppress(PenstockError, TimeoutError):
            request = coordinator_pb2.DeregisterWorkerRequest(worker=self.host.name, session=self._session)
            await asyncio.wait_for(self.host.coordinator.deregister(request), 2.0)
        self.listeners.close()
        for task in self._tasks:
            task.cancel()
        for key in list(self._slots):
            self._stop_slot(key)
        await asyncio.gather(*self._tasks, *self._ending, return_exceptions=True)
        await self.host.fork_server.close()
        self.host.blobs.close()
        await end_orphans()
        self._tempdir.close()
        await self.host.coordinator.close()

    async def _register(self, first: bool = False) -> None:
        request = coordinator_pb2.RegisterWorkerRequest(
            version=VERSION,
            worker=self.host.name,
            session=self._session,
            host_id=host_id(),
            slots=self.settings.slots,
            cores=cores(),
            lane_protocol=LANE_PROTOCOL,
            local_address=self.listeners.local_address,
            tcp_address=self.listeners.tcp_address,
            allow=self.settings.allow,
            draining=self._draining,
            commit_mark=self._commit_mark,
        )
        while True:
            try:
                reply = await self.host.coordinator.register(request)
                self._hold_s, self.lease_s = intervals(reply)
                self._note_answer()
                # a coordinator that does not know this worker may be a new one, whose version numbers start again
                self._made = self._seen = 0
                return
            except OverloadedError as error:
                self._liveness.turned()
                _log.info("the coordinator is too busy to register this worker; trying again: %s", error.message)
                # a random delay, so that the workers do not all retry at once
                await asyncio.sleep(error.retry_after_s * random.uniform(1.0, 1.5))
            except COORDINATOR_ERRORS as error:
                if first:
                    _log.info("waiting for the coordinator: %s", error.message)
                    first = False
                self._liveness.turned()
                await asyncio.sleep(RETRY_S)

    async def _heartbeats(self) -> None:
        away_since, logged = 0.0, 0.0
        while True:
            await asyncio.sleep(self._pace.delay_s())
            try:
                reply = await self.host.coordinator.heartbeat(self._heartbeat(self._hold_s))
                self._note_answer()
            except COORDINATOR_ERRORS as error:
                self._liveness.turned()
                now = asyncio.get_running_loop().time()
                if not away_since:
                    away_since = logged = now
                    _log.warning("the coordinator is unreachable; running slots continue: %s", error.message)
                elif now - logged > UNAVAILABLE_AGAIN_S:
                    logged = now
                    _log.warning("the coordinator has been unreachable for %.0f s: %s", now - away_since, error.message)
                await asyncio.sleep(RETRY_S)
                continue
            if away_since:
                _log.warning("the coordinator is reachable again")
                away_since = 0.0
            if reply.register_again:
                await self._register()
                continue
            self._take(reply)

    async def _report_changes(self) -> None:
        """Send a heartbeat as soon as a slot's report changes, while the long poll still waits for its reply."""
        pace = PollPace()  # a runner may change its report with each message
        while True:
            await self._dirty.wait()
            await asyncio.sleep(pace.delay_s())
            self._dirty.clear()
            try:
                reply = await self.host.coordinator.heartbeat(self._heartbeat(0.0))
            except COORDINATOR_ERRORS:
                await asyncio.sleep(RETRY_S)
                self._dirty.set()
                continue
            self._note_answer()
            if not reply.register_again:
                self._take(reply)

    def _note_answer(self) -> None:
        self.answered_at = time.monotonic()
        self._liveness.note_answer()

    def _take(self, reply: coordinator_pb2.HeartbeatReply) -> None:
        self._hold_s, self.lease_s = intervals(reply)
        self._clock_offset = within(reply.wall_s, MOST, 0.0) - time.monotonic()
        if reply.draining != self._draining:
            drains = "drains: its slots move to other workers"
            _log.info("worker %s: %s", self.host.name, drains if reply.draining else "takes slots again")
        self._draining, self._stuck = reply.draining, reply.stuck
        self._commit_mark = reply.commit_mark
        quota = self.host.snapshot_quota
        quota.every_s = within(reply.snapshot_every_s, MOST, quota.every_s)
        quota.bytes_per_s = within(reply.snapshot_bytes_per_s, MOST, quota.bytes_per_s)
        # a reply with a lower version was overtaken by the reply to a later heartbeat
        if not reply.unchanged and reply.version >= self._made:
            self._made = self._seen = reply.version
            self._apply(reply)
        self._replied.set()

    def _heartbeat(self, hold_s: float) -> coordinator_pb2.HeartbeatRequest:
        return coordinator_pb2.HeartbeatRequest(
            worker=self.host.name,
            session=self._session,
            seen_version=self._seen,
            hold_s=hold_s,
            lease_s=self.lease_s,
            leaving=self._leaving,
            slots=fitted([slot.report() for slot in self._slots.values()] + [*self._unstarted.values()]),
        )

    # ---- assignments

    def _apply(self, reply: coordinator_pb2.HeartbeatReply) -> None:
        # twice the slots at most: a hostile coordinator could assign more than a heartbeat can report as lost
        assignments = reply.assignments[: 2 * self.settings.slots]
        wanted = {key_of(assignment): assignment for assignment in assignments}
        why = {key_of(taken): taken.why for taken in reply.taken}
        for key in [key for key in self._slots if key not in wanted]:
            slot = self._slots[key]
            slot.record.log.info(
                "%s: removed from worker %s: %s", slot.record.name, self.host.name, why.get(key, "no reason given")
            )
            self._stop_slot(key)
        self._unstarted = {key: report for key, report in self._unstarted.items() if key in wanted}
        for key, assignment in wanted.items():
            if key in self._unstarted:
                continue
            if key in self._slots:
                self._slots[key].assigned(assignment)
            else:
                self._start_slot(key, assignment)
        self._assigned.set()
        self._assigned = asyncio.Event()
        self._drop_unused()
        open_requests = {request.request for request in reply.state_requests}
        self._answered &= open_requests
        for request in reply.state_requests:
            if request.request in self._answered:
                continue
            if self._answering >= ANSWERS_AT_ONCE:
                self._unanswered = True
                break
            self._answered.add(request.request)
            self._answering += 1
            self._spawn(self._answer_one(request))

    def _start_slot(self, key: SlotKey, assignment: records_pb2.WorkerAssignment) -> None:
        try:
            if len(self._slots) >= self.settings.slots:
                raise OverloadedError(f"all {self.settings.slots} slots of worker {self.host.name} are in use")
            self._begin_slot(key, assignment)
        except (PenstockError, OSError) as error:  # for example no memory or no descriptors
            _log.warning("run %s box %d slot %d cannot be started: %s", *key[:1], *key[2:4], error)
            self._unstarted[key] = coordinator_pb2.SlotReport(
                **about_slot(assignment),
                phase=coordinator_pb2.FAILED,
                error=detail_of(error),
                lost=True,
            )
            self._dirty.set()

    def _begin_slot(self, key: SlotKey, assignment: records_pb2.WorkerAssignment) -> None:
        loader = assignment.loader
        loader.ClearField("allow")
        loader.allow.extend(self.settings.allow)
        slot = self._slots[key] = Slot(self.host, assignment)
        try:
            if not self.settings.embedded:
                check_plain(loader)
            if not (self.settings.embedded and loader.input_fn.startswith((MAIN + ":", BY_VALUE + ":"))):
                check_allowed(loader.input_fn, self.settings.allow)
        except PenstockError as error:
            slot.fail(detail_of(error), lost=False)
            return
        slot.start()

    def _stop_slot(self, key: SlotKey) -> None:
        self.listeners.drop(key)
        task = asyncio.ensure_future(self._slots.pop(key).stop())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _drop_unused(self) -> None:
        """Release values of runs without a slot here."""
        needed = [slot.record.assignment for slot in self._slots.values()]
        self.host.blobs.keep({name for each in needed for name in (each.loader.arguments_blob, each.resume.blob)})

    async def _answer_one(self, request: coordinator_pb2.StateRequest) -> None:
        request.deadline_s = within(request.deadline_s, MOST, 0.0)
        try:
            await self._answer(request)
        finally:
            self._answering -= 1
            if self._unanswered:
                self._unanswered, self._seen = False, 0  # the next reply repeats the postponed requests

    async def _answer(self, request: coordinator_pb2.StateRequest) -> None:
        key = (request.run, request.attempt, request.box, request.slot, request.generation)
        slot = self._slots.get(key)
        answered = None if slot is None else await slot.answer(request)
        if slot is None or answered is None:
            self.state_answers["dropped"] += 1
            self._not_answered(request.request)
            return
        answer, data = answered
        answer.session = self._session
        try:
            await self.host.coordinator.put_state(answer, data)
            self.state_answers["error" if answer.HasField("error") else "ok"] += 1
        except PenstockError as error:
            self.state_answers["dropped"] += 1
            record = slot.record
            record.log.warning(
                "%s: the slot's state could not be sent to the coordinator: %s", record.name, error.message
            )
            self._not_answered(request.request)

    def _not_answered(self, request: str) -> None:
        """Let the coordinator send its whole reply again, which repeats the request if it is still open."""
        self._answered.discard(request)
        self._seen = 0

    # ---- lanes

    async def _attach(self, sock: socket.socket, hello: lane_pb2.Hello) -> None:
        slot = self._slots.get(slot_of(hello))
        if slot is None:
            raise SupersededError(
                f"worker {self.host.name} no longer has box {hello.box} slot {hello.slot} of run {hello.run}: it moved"
            )
        now = self._clock_offset + time.monotonic()
        check_ticket(hello.ticket, slot.record.assignment.lane_key, now, slot.record.name)
        self.listeners.note_ticket(hello)
        await slot.lanes.attach(sock, hello, ATTACH_DEADLINE_S)

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
