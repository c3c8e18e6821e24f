"""The coordinator's gRPC service: adds waits, transfers of data and deadlines to the state machine, which has none.

One event loop and no locks: a method of the state machine is never interrupted, and its changes are on disk before its
reply or error (GroupCommit). Long polls wait for topics that it announces. A thread of its own writes and reads
snapshots and blobs (SnapshotWriter), so that a slow disk never delays a lease. A value in parts is collected in memory
up to its declared size, which is checked against the budget with the first part; while memory is short, the rest stays
at the sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

from penstock.appliance.core import box_history
from penstock.appliance.core.cluster import Topic
from penstock.appliance.core.entities import Attempt
from penstock.appliance.core.leases import HEARTBEAT_S
from penstock.appliance.core.request_checks import check_counts, check_name
from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.core.state_queries import ANSWERS_FREED
from penstock.appliance.core.state_query import BoxState, StateQuery
from penstock.appliance.journal.journal import GroupCommit
from penstock.appliance.journal.snapshot_index import Drop, DropBlob, DropSnapshot, SlotKey
from penstock.appliance.journal.snapshot_store import ClosedRun, InflowBudget, SnapshotWriter, Store
from penstock.appliance.server.closed_runs import MEMORY_CLOSED_BYTES, ClosedRuns, boxes_of, parts_of
from penstock.appliance.server.mixture_calls import MixtureCalls
from penstock.appliance.server.rate_limits import RateLimiter, address_of
from penstock.appliance.server.recent_queries import RecentQueries
from penstock.appliance.server.state_stream import in_json, packed, parts
from penstock.appliance.server.topic_signals import TopicSignals
from penstock.appliance.server.transfers import MinimumRate, ended_when_slow
from penstock.proto.errors import (
    DeadlineError,
    InvalidArgumentError,
    JournalError,
    OverloadedError,
    ProtocolError,
    StateUnavailableError,
)
from penstock.proto.rpc.auth_interceptor import credential, jobs_share_token
from penstock.proto.rpc.bounds.reply_parts import VALUE_MAX, blob_name
from penstock.proto.rpc.calls import pieces
from penstock.proto.rpc.channel import CHUNK
from penstock.proto.rpc.wire_errors import detail_of, error_of
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorServicer
from penstock.runtime.telemetry.counters import CallCounters, Histogram
from penstock.runtime.telemetry.logs import RepeatedWarnings

log = logging.getLogger("penstock.appliance")

TRANSFERS_MAX = 64 << 20
"""Most bytes of received snapshots that wait to be written, and the same of blobs; half is for small values."""
READS_MAX = 128 << 20
"""Most bytes of snapshots and blobs being sent to readers; half is for small values."""
JSON_MAX = 8 << 20
"""Largest state of a slot that is sent as JSON, in bytes: some 50 ms, in which heartbeats wait."""
WATCHES_MAX = 4
"""Most long polls held for one box or worker; the oldest is then answered, whose connection is lost."""
QUERIES_OF_TOKEN_MAX = 1024
"""Most open state queries of one credential token, over all runs."""
DISK_ERROR_EVERY_S = 60.0
STATUS_S, STATUS_LOOK_S = 0.3, 0.01
"""Longest wait in seconds for the reports of idle peers, before a status is made; and seconds between two looks."""
REPORT_S = 2.0
"""Longest wait in seconds for a box's position, before its history is sent."""

_Context = grpc.aio.ServicerContext[Any, Any]
_Key = TypeVar("_Key")


@contextlib.contextmanager
def _counted(counts: Counter[_Key], key: _Key) -> Iterator[None]:
    """Return a context that `counts` contains once more."""
    counts[key] += 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]


@dataclass(frozen=True)
class CoordinatorCounters:
    """Figures that are in the metrics but not in a status reply."""

    calls: CallCounters
    commits: Histogram
    snapshot_bytes: int
    snapshot_limit: int
    boxes: dict[tuple[str, int], tuple[int, int]]
    """(run, box) -> the attempt's first step, and 1 + the slot for which the box waits (0 = none)."""
    run_ends: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of runs that have ended for it."""
    workers_lost: int = 0
    free_bytes: int | None = None
    """Free space of the state directory's filesystem; None if the cluster state is in memory."""


class Service(CoordinatorServicer):
    """The Coordinator service of coordinator.proto, in one event loop. Only the writer's thread uses `store`; the
    state machine must announce its changes to `signals`; `unreceived_s` returns the age of the oldest call that may
    be queued in gRPC."""

    def __init__(
        self,
        state_machine: StateMachine,
        store: Store,
        signals: TopicSignals,
        unreceived_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._unreceived_s, self._wall = unreceived_s, time.time
        self._state_machine = state_machine
        self._snapshot_index = state_machine.cluster.snapshot_index
        self._store = store
        self._signals = signals
        self._rate_limiter = RateLimiter(time.monotonic)
        self._journal = GroupCommit(state_machine.cluster.journal)
        self._disk = SnapshotWriter(store)
        self._snapshots_in, self._blobs_in = InflowBudget(TRANSFERS_MAX), InflowBudget(TRANSFERS_MAX)
        self._reads = InflowBudget(READS_MAX)
        self._queries: Counter[str] = Counter()
        """Digest of a credential token -> its state queries under way."""
        self._turn = asyncio.Lock()
        """Lets each turn (iteration) of the event loop send only one large message (state_stream.py)."""
        self._drops: list[Drop] = []
        self._heartbeats: Counter[tuple[str, str]] = Counter()
        """(name, session) of a worker -> its heartbeats under way."""
        self._watches: Counter[str] = Counter()
        """Secret of a box's client -> its WatchRun calls under way."""
        self._closing = False
        self._fetches = RecentQueries(time.monotonic, self._wall)
        self._mixtures = MixtureCalls(state_machine, signals.on, self._complete)
        in_memory = state_machine.cluster.journal.path is None
        limit = MEMORY_CLOSED_BYTES if in_memory else self._snapshot_index.budget // 2
        self._closed = ClosedRuns(store.closed(), self._wall, limit)
        self._disk_errors = RepeatedWarnings(log, every_s=DISK_ERROR_EVERY_S, level=logging.ERROR)
        self._status_task: asyncio.Task[pb.StatusReply] | None = None
        self.on_end: Callable[[str, pb.RunEnd], None] = lambda run, end: None
        """Called with a run's name and its end, once both are in the journal."""
        self.dashboard = ""
        """URL; "" if none is served."""
        self.open_dashboard: Callable[[], None] | None = None
        """Starts the dashboard; None if none starts on demand."""

    async def run_ticker(self) -> None:
        """Check leases and remove dropped values from disk, until cancelled. Raises JournalError if a peer's report
        shows that commits are missing."""
        journal = self._state_machine.cluster.journal
        while True:
            await asyncio.sleep(self._state_machine.cluster.limits.tick_s)
            if journal.lost is not None:
                raise journal.lost
            try:
                async with self._journal.synced():
                    self._state_machine.tick(self._unreceived_s())
                self.tell_ends()
                await self._keep_closed()
                self._drops += self._snapshot_index.take_drops()
                if self._drops and not self._disk.is_dropping:
                    drops, self._drops = self._drops, []
                    self._disk.drop(drops, self._not_dropped)
            except JournalError as error:
                self._log_disk(error)  # no call was acknowledged, and the next tick tries again

    def tell_ends(self) -> None:
        """Tell the ends of runs since the last call."""
        ends = self._state_machine.cluster.new_ends
        while ends:
            self.on_end(*ends.popleft())

    async def _keep_closed(self) -> None:
        """Write the last fetched state of each run that has ended since the last call."""
        for query in self._state_machine.state_queries.take_closed():
            parts = parts_of(query)
            one = ClosedRun(query.run, query.attempt, query.step, self._wall(), sum(map(len, parts)))
            gone = self._closed.superfluous(one)
            if gone is None:
                log.info("run %s is closed; its last state of %d bytes is too large to be kept", one.run, one.size)
                continue
            try:
                await self._disk.run(self._store.keep_closed, one, parts, gone)
            except JournalError as error:
                log.error("run %s is closed; its last state cannot be written and is not kept: %s", one.run, error)
            else:
                self._closed.add(one, gone)

    def _log_disk(self, error: Exception) -> None:
        """Log an error of the disk, which is often the same in each tick, once a minute."""
        self._disk_errors.warning("disk", str(error))

    def _not_dropped(self, drops: list[Drop], error: Exception) -> None:
        self._log_disk(error)
        self._drops += drops  # the next tick tries again

    def _spare(self, drop: Drop) -> None:
        """Cancel the queued removal of a value that is about to be written again."""
        self._snapshot_index.spare(drop)
        self._drops = [other for other in self._drops if other != drop]
        self._disk.spare(drop)

    def wind_down(self) -> None:
        """Answer all long polls at once, before the server stops."""
        self._closing = True
        self._signals.wake_all()

    async def save_histories(self) -> None:
        """Write the history of each open box that has reported to the journal, before the coordinator ends."""
        cluster = self._state_machine.cluster
        for attempt in cluster.open_attempts():
            for box in attempt.boxes.values():
                if box.reported:
                    cluster.save_history(attempt, box)
        await self._journal.sync()

    def close(self) -> None:
        self._disk.close()
        self._journal.close()

    async def _hold(self, topic: Topic, hold_s: float, seen: float, version: Callable[[], float]) -> None:
        """Hold a long poll for `hold_s`, or until `version()`, called when the topic changes, differs from `seen`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + hold_s
        if hold_s <= 0 or version() != seen:
            return
        with self._signals.on(topic, WATCHES_MAX) as event:
            while version() == seen and not self._closing and not event.over and loop.time() < until:
                await event.comes(until)

    # -------------------------------------------------------------------------------------------------------- clients

    async def OpenRun(self, request: pb.OpenRunRequest, context: _Context) -> pb.OpenRunReply:
        self._rate_limiter.admit(address_of(context.peer()), "OpenRun")
        # checked only here, because the journal may hold names that older releases accepted
        check_name("job", request.job)
        async with self._journal.synced():
            return self._state_machine.attempts.open_run(request, credential())

    async def WatchRun(self, request: pb.WatchRunRequest, context: _Context) -> pb.WatchRunReply:
        attempts, who = self._state_machine.attempts, request.client_id
        with _counted(self._watches, who):
            try:
                async with self._journal.synced():
                    attempts.report_box(request)
                    self._signals.changed(("report", request.run, request.box))
                    topic = ("box", request.run, request.attempt, request.box)
                    hold_s, seen = attempts.box_hold(request), request.seen_version
                    await self._hold(topic, hold_s, seen, lambda: attempts.box_version(request))
                    return attempts.box_view(request)
            except asyncio.CancelledError:
                if self._watches[who] == 1 and not self._closing:  # as for heartbeats
                    attempts.box_hung_up(request)
                raise

    async def CloseRun(self, request: pb.CloseRunRequest, context: _Context) -> pb.CloseRunReply:
        async with self._journal.synced():
            self._state_machine.attempts.close_run(request)
        await self._keep_closed()
        return pb.CloseRunReply()

    async def FetchState(self, request: pb.FetchStateRequest, context: _Context) -> AsyncIterator[Any]:
        """Yield the requested state in parts, box after box; in messages of several if the caller `packs`."""
        loop = asyncio.get_running_loop()
        until, sent, restarts = loop.time() + request.deadline_s, 0, None
        query: StateQuery | None = None
        with self._counted_query(credential()), self._fetches.noted(request) as noted:
            closed = self._closed.find(request) if self._is_over(request) else None
            if closed is not None:
                noted.attempt, noted.message.step = closed.attempt, closed.step
                for state in boxes_of(await self._disk.run(self._store.closed_parts, closed.run)):
                    noted.message.bytes += state.size
                    for part in parts([await self._written(state, request)]):
                        await self._next_turn()
                        yield part
                return
            try:
                async with self._journal.synced():
                    query = self._state_machine.begin_state(request)
                noted.attempt, noted.message.step = query.attempt, query.step  # the request may be for the newest
                restarts = query.restarts
                while sent < query.num_boxes:
                    async with self._journal.synced():
                        states = await self._message(query, sent, until, request)
                    before = loop.time()
                    noted.message.bytes += sum(state.size for state in states)
                    written = [await self._written(state, request) for state in states]
                    if query.restarts != restarts:  # what was sent does not belong to the present answers
                        if sent and not request.packs:
                            raise query.restarted()
                        if sent:
                            yield pb.StatePart(anew=True).SerializeToString()
                        sent, restarts = 0, query.restarts
                        continue
                    for message in packed(written) if request.packs else parts(written):
                        await self._next_turn()
                        yield message
                        # The time that a slow reader of the answer takes does not count against the workers' deadline.
                        until, before = until + loop.time() - before, loop.time()
                        query.deadline = max(query.deadline, until)
                    for _ in states:
                        if query.restarts == restarts:
                            self._state_machine.state_queries.sent(query, sent)
                        sent += 1
            finally:
                if query is not None:  # the query counts this caller, even if the journal could not be written
                    self._state_machine.state_queries.end(query, sent if query.restarts == restarts else 0)

    async def _next_turn(self) -> None:
        async with self._turn:
            await asyncio.sleep(0)

    @contextlib.contextmanager
    def _counted_query(self, token: str) -> Iterator[None]:
        """Count a state query of this token while the context is open. Raises OverloadedError above the limit."""
        if self._queries[token] >= QUERIES_OF_TOKEN_MAX:
            raise OverloadedError(f"one token must have at most {QUERIES_OF_TOKEN_MAX} open state queries: retry later")
        with _counted(self._queries, token):
            yield

    def _is_over(self, request: pb.FetchStateRequest) -> bool:
        run = self._state_machine.cluster.runs.get(request.run)
        of_job = request.HasField("progress") or request.aggregate_blob
        return run is not None and run.current is None and not of_job

    async def _written(self, state: BoxState, request: pb.FetchStateRequest) -> BoxState:
        if request.format != pb.STATE_JSON or request.aggregate_blob:
            return state
        return await asyncio.to_thread(in_json, state, JSON_MAX)

    async def _message(
        self, query: StateQuery, number: int, until: float, request: pb.FetchStateRequest
    ) -> list[BoxState]:
        """Return the states of box `number`, and, if the caller accepts packed messages, of the following boxes that
        fit: otherwise it would get hundreds of messages. `until`: in the event loop's time."""
        states: list[BoxState] = []
        free_bytes = CHUNK
        while number < query.num_boxes:
            state = await self._complete(query, number, until, request.deadline_s)
            if states and state.message_size > free_bytes:
                break
            states.append(state)
            free_bytes -= state.message_size
            number += 1
            if not request.packs or free_bytes <= 0:
                break
        return states

    async def _complete(self, query: StateQuery, number: int, until: float, deadline_s: float) -> BoxState:
        """Return the states of box `number` once complete. Raises the query's error, DeadlineError at `until`."""
        with self._signals.on(query.topic(number)) as event:
            while number not in query.boxes and query.failure is None:
                if not await event.comes(until):
                    raise self._state_machine.state_queries.late(query, deadline_s)
        if query.failure is not None:
            raise error_of(detail_of(query.failure))  # a copy, because several callers raise it
        return query.boxes[number]

    # -------------------------------------------------------------------------------------------------------- workers

    async def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: _Context) -> pb.RegisterWorkerReply:
        self._rate_limiter.admit(address_of(context.peer()), "RegisterWorker")
        check_name("worker", request.worker)
        async with self._journal.synced():
            return self._state_machine.workers.register_worker(request)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: _Context) -> pb.HeartbeatReply:
        workers, who = self._state_machine.workers, (request.worker, request.session)
        with _counted(self._heartbeats, who):
            try:
                async with self._journal.synced():
                    workers.report_worker(request)
                    hold_s, seen = workers.worker_hold(request), request.seen_version
                    topic = ("worker", request.worker)
                    await self._hold(topic, hold_s, seen, lambda: workers.worker_version(request))
                    return workers.worker_view(request)
            except asyncio.CancelledError:
                # A worker with another heartbeat under way is alive: the worker has reconnected before the old
                # connection's end was noticed.
                if self._heartbeats[who] == 1 and not self._closing:
                    workers.worker_hung_up(*who)
                raise

    async def DeregisterWorker(
        self, request: pb.DeregisterWorkerRequest, context: _Context
    ) -> pb.DeregisterWorkerReply:
        async with self._journal.synced():
            self._state_machine.workers.deregister_worker(request)
        return pb.DeregisterWorkerReply()

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: _Context) -> pb.DrainWorkerReply:
        async with self._journal.synced():
            return self._state_machine.workers.drain_worker(request)

    async def PutSnapshot(self, parts: AsyncIterator[pb.SnapshotPart], context: _Context) -> pb.PutSnapshotReply:
        coming = MinimumRate("PutSnapshot", parts)
        async with self._journal.synced():
            first = await anext(coming, pb.SnapshotPart())
            header = first.header
            check_counts(epoch=header.epoch, total=header.total, delivered=header.delivered)
            check_counts(samples=header.samples, step=header.step)
            key = SlotKey(header.run, header.attempt, header.box, header.slot)
            self._state_machine.slot_of_generation(key, header.generation)
            if refused := self._snapshot_index.why_refused(key, header.size):
                return pb.PutSnapshotReply(refused=refused, free_bytes=self._snapshot_index.free)
            async with self._snapshots_in.taken(header.size, credential()):
                # checked again, because the budget may have changed during the transfer
                if refused := self._snapshot_index.why_refused(key, header.size):
                    return pb.PutSnapshotReply(refused=refused, free_bytes=self._snapshot_index.free)
                with self._snapshot_index.expecting(header.size):
                    data = await coming.whole(first.data, header.size)
                    self._state_machine.slot_of_generation(key, header.generation)
                    self._spare(DropSnapshot(key, header.total, header.epoch))
                    try:
                        await self._disk.put_snapshot(header, data)
                    except JournalError as error:
                        if all(kept.epoch != header.epoch for kept in self._snapshot_index.snapshots(key)):
                            raise  # the loop may have left the epochs before early, and nobody can replay across that
                        self._log_disk(error)
                        return pb.PutSnapshotReply(refused=error.message, free_bytes=self._snapshot_index.free)
            self._state_machine.snapshot_stored(header)
            return pb.PutSnapshotReply(free_bytes=self._snapshot_index.free)

    async def GetSnapshots(self, request: pb.GetSnapshotsRequest, context: _Context) -> AsyncIterator[pb.SnapshotPart]:
        key = SlotKey(request.run, request.attempt, request.box, request.slot)
        async with self._journal.synced():
            slot = self._state_machine.slot_to_recover(key, request.generation)
        firsts = [records_pb2.FirstBatch(epoch=e, began=t, digest=d) for (e, t), d in sorted(slot.firsts.items())]
        for kept in self._snapshot_index.snapshots(key):
            async with self._reads.taken(kept.size, credential()):
                found = await self._disk.run(self._store.snapshot, key, kept)
                if found is None:
                    continue  # dropped since the listing; a newer one that serves as well follows
                header, data = found
                header.firsts.extend(firsts)
                firsts = []
                yield pb.SnapshotPart(header=header)
                async for piece in self._read("GetSnapshots", data):
                    yield pb.SnapshotPart(data=piece)

    async def PutState(self, parts: AsyncIterator[pb.AnswerPart], context: _Context) -> pb.PutStateReply:
        coming = MinimumRate("PutState", parts)
        first = await anext(coming, pb.AnswerPart())
        answer, queries = first.answer, self._state_machine.state_queries
        if answer.state_bytes > VALUE_MAX:
            raise InvalidArgumentError(
                f"a state must have at most {VALUE_MAX} bytes, got {answer.state_bytes}: return less from state_dict()"
            )
        if not queries.wanted(answer.request):
            return pb.PutStateReply()  # a late answer: no query needs its bytes
        await self._admitted(answer)
        if not queries.wanted(answer.request):
            return pb.PutStateReply()  # its callers left while it waited, so no query counts its bytes
        try:
            data = await coming.whole(first.data, answer.state_bytes, lambda: queries.wanted(answer.request))
            if queries.wanted(answer.request):
                async with self._journal.synced():
                    self._state_machine.answer_state(answer, data)
        except BaseException:
            queries.lost(answer.request)
            raise
        return pb.PutStateReply()

    async def _admitted(self, answer: pb.StateAnswer) -> None:
        """Wait for memory for a worker's answer. Raises DeadlineError at its query's deadline."""
        queries, now = self._state_machine.state_queries, self._state_machine.clock
        with self._signals.on(ANSWERS_FREED) as event:
            while (left_s := queries.admit(answer.request, answer.state_bytes, now())) is not None:
                if not await event.comes(asyncio.get_running_loop().time() + left_s):
                    raise DeadlineError(
                        f"the coordinator had no memory for a state of {answer.state_bytes} bytes (request "
                        f"{answer.request}) before its deadline: fetch fewer states at once"
                    )

    # ---------------------------------------------------------------------------------------------- blobs, operators

    async def PutBlob(self, parts: AsyncIterator[pb.BlobPart], context: _Context) -> pb.PutBlobReply:
        coming = MinimumRate("PutBlob", parts)
        first = await anext(coming, pb.BlobPart())
        name, size = first.blob, first.size
        if not self._snapshot_index.has_blob(name):
            self._check_blob(first)
            async with self._blobs_in.taken(size, credential()):
                if not self._snapshot_index.has_blob(name):  # else another box has sent the same blob meanwhile
                    await self._take_blob(first, coming)
        self._snapshot_index.add_blob(name, size, self._state_machine.clock(), credential())
        return pb.PutBlobReply(blob=name)

    def _check_blob(self, first: pb.BlobPart) -> None:
        refused = self._snapshot_index.why_blob_refused(first.size, "" if jobs_share_token() else credential())
        if refused:
            raise InvalidArgumentError(f"the value for run {first.run_hint or '?'} cannot be stored: {refused}")

    async def _take_blob(self, first: pb.BlobPart, coming: MinimumRate[pb.BlobPart]) -> None:
        self._check_blob(first)
        name, size = first.blob, first.size
        with self._snapshot_index.expecting(size):
            data = await coming.whole(first.data, size)
            if await self._disk.run(blob_name, data) != name:
                raise ProtocolError(f"PutBlob: the {size} bytes received do not have the declared digest {name}")
            self._spare(DropBlob(name))
            await self._disk.run(self._store.put_blob, name, data)

    async def GetBlob(self, request: pb.GetBlobRequest, context: _Context) -> AsyncIterator[pb.BlobPart]:
        async with self._reads.taken(self._snapshot_index.blob_size(request.blob), credential()):
            data = await self._disk.run(self._store.blob, request.blob)
            if data is None:
                raise StateUnavailableError(
                    f"the coordinator does not have the value {request.blob!r}: start the job again"
                )
            async for piece in self._read("GetBlob", data):
                yield pb.BlobPart(data=piece)

    async def _read(self, what: str, data: bytes) -> AsyncIterator[bytes]:
        with ended_when_slow(what) as reader:
            for piece in pieces(data):
                await self._next_turn()
                yield piece
                reader.taken += len(piece)

    async def FetchHistory(self, request: pb.FetchHistoryRequest, context: _Context) -> AsyncIterator[pb.HistoryPart]:
        if request.HasField("snapshot"):
            at = request.snapshot
            check_counts(attempt=at.attempt, epoch=at.epoch, total=at.total)
            key = SlotKey(at.run, at.attempt, at.box, at.slot)
            kept = self._snapshot_index.find(key, at.total, at.epoch)
            async with self._reads.taken(kept.size, credential()):
                found = await self._disk.run(self._store.snapshot, key, kept)
                if found is None:
                    raise StateUnavailableError(
                        f"the snapshot after batch {at.total} of box {at.box} slot {at.slot} was dropped"
                    )
                async for piece in self._read("FetchHistory", found[1]):
                    yield pb.HistoryPart(data=piece)
            return
        await self._renew_report(request.run, request.box)
        cluster = self._state_machine.cluster
        journal, present = cluster.journal.path, cluster.history(request.run, request.box)
        past = [] if journal is None else await asyncio.to_thread(box_history.past, journal, request.run, request.box)
        for one in past:
            if present is None or one.attempt != present.attempt:  # else the attempt has ended meanwhile
                yield pb.HistoryPart(history=one)
        if present is not None:
            yield pb.HistoryPart(history=present)

    async def _renew_report(self, run: str, number: int) -> None:
        box = self._state_machine.attempts.ask(run, number)
        if box is not None:
            await self._hold(("report", run, number), REPORT_S, box.reported_at, lambda: box.reported_at)

    async def _renew_idle_reports(self) -> None:
        """Let peers report that do so rarely while they are idle, so that a status is as fresh as of others."""
        if self._state_machine.cluster.limits.idle_report_s <= HEARTBEAT_S:
            return
        now = self._state_machine.clock()
        silent = self._state_machine.ask_silent(now - HEARTBEAT_S)
        while silent and self._state_machine.clock() < now + STATUS_S:
            await asyncio.sleep(STATUS_LOOK_S)
            silent = [peer for peer in silent if peer.reported_at < now]

    async def EndRun(self, request: pb.EndRunRequest, context: _Context) -> pb.EndRunReply:
        async with self._journal.synced():
            reply = self._state_machine.attempts.end_run(request)
        await self._keep_closed()
        return reply

    async def ChangeMixture(self, request: pb.ChangeMixtureRequest, context: _Context) -> pb.ChangeMixtureReply:
        async with self._journal.synced():
            return await self._mixtures.change(request)

    async def OpenDashboard(self, request: pb.OpenDashboardRequest, context: _Context) -> pb.OpenDashboardReply:
        if not self.dashboard:
            if self.open_dashboard is None:
                raise InvalidArgumentError("the coordinator has no dashboard: start it with --http HOST:PORT")
            self.open_dashboard()
        return pb.OpenDashboardReply(url=self.dashboard)

    async def Status(self, request: pb.StatusRequest, context: _Context) -> pb.StatusReply:
        return await self.snapshot()

    def counters(self, calls: CallCounters) -> CoordinatorCounters:
        cluster = self._state_machine.cluster
        boxes = {
            (attempt.run, box.number): (box.start.step, box.waiting_for)
            for attempt in cluster.open_attempts()
            for box in attempt.boxes.values()
        }
        return CoordinatorCounters(
            calls=calls,
            commits=self._journal.seconds,
            snapshot_bytes=self._snapshot_index.used,
            snapshot_limit=self._snapshot_index.budget,
            free_bytes=None if cluster.journal.path is None else shutil.disk_usage(cluster.journal.path.parent).free,
            run_ends=cluster.run_ends,
            workers_lost=cluster.workers_lost,
            boxes=boxes,
        )

    def attempts(self) -> list[Attempt]:
        return self._state_machine.cluster.open_attempts()

    async def snapshot(self) -> pb.StatusReply:
        """Return a status of now with everything that an operator may see; concurrent callers share one."""
        if self._status_task is None or self._status_task.done():
            self._status_task = asyncio.get_running_loop().create_task(self._make_status())
        return await asyncio.shield(self._status_task)

    async def _make_status(self) -> pb.StatusReply:
        await self._renew_idle_reports()
        reply = pb.StatusReply()
        for _ in self._state_machine.status_steps(reply):
            await asyncio.sleep(0)  # thousands of slots go into the reply in steps, between which other tasks run
        states = self._fetches.messages()
        for run in reply.runs:
            if run.run in states:
                run.states.extend(states[run.run])
            kept = None if run.open else self._closed.get(run.run)
            if kept is not None:
                run.kept_step, run.kept_wall_s = kept.step, kept.wall_s
        reply.dashboard = self.dashboard
        return reply
