"""The gRPC edge: waits, transfers and deadlines around the registry, which knows none of them.

One event loop and no locks: a registry method runs from start to end without anybody else. Long polls are coroutines
that sleep on the topics that the registry announces. The bytes of snapshots and blobs go through one thread of their
own, so that a slow disk delays a worker's snapshot and never a lease.

A value in parts is gathered in memory up to the size that its header declared, which was checked against the budget
before the first byte was taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc.aio

from penstock.appliance.admission import Admission, address_of
from penstock.appliance.books import Topic
from penstock.appliance.checks import check_counts
from penstock.appliance.ledger import Drop
from penstock.appliance.limits import TICK_SHARE, Limits
from penstock.appliance.model import SlotKey
from penstock.appliance.registry import Registry
from penstock.appliance.states import Gathered
from penstock.appliance.store import Store
from penstock.proto.calls import blob_name, pieces
from penstock.proto.channel import detail_of, error_of
from penstock.proto.errors import (
    DeadlineError,
    InvalidArgumentError,
    JournalError,
    ProtocolError,
    StateUnavailableError,
)
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorServicer

log = logging.getLogger("penstock.appliance")

_Result = TypeVar("_Result")
_Context = grpc.aio.ServicerContext[Any, Any]


class Signals:
    """Wakes whoever waits for a topic, in the order in which they came: a set's order would differ in each process, and
    a simulated history could not be played again."""

    def __init__(self) -> None:
        self._waiting: dict[Topic, dict[asyncio.Event, None]] = {}

    def changed(self, topic: Topic) -> None:
        for event in self._waiting.get(topic, ()):
            event.set()

    def wake_all(self) -> None:
        for topic in self._waiting:
            self.changed(topic)

    @contextlib.contextmanager
    def on(self, topic: Topic) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        events = self._waiting.setdefault(topic, {})
        events[event] = None
        try:
            yield event
        finally:
            events.pop(event, None)
            if not events and self._waiting.get(topic) is events:
                del self._waiting[topic]


class Transfer:
    """The data parts that follow a header: never more than was declared, and in the end exactly that."""

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._size = size
        self._data = io.BytesIO()  # a list would take more for pieces than for what is in them, if they are short

    def add(self, piece: bytes) -> None:
        if self._data.tell() + len(piece) > self._size:
            raise ProtocolError(f"{self._what}: more than the {self._size} bytes declared")
        self._data.write(piece)

    def all(self) -> bytes:
        if self._data.tell() != self._size:
            raise ProtocolError(f"{self._what}: {self._size} bytes declared, {self._data.tell()} came")
        return self._data.getvalue()


class Service(CoordinatorServicer):
    """
    Args:
        registry: told of every call.
        store: where the bytes are; used from this object's thread only.
        signals: its `changed` is the registry's.
    """

    def __init__(self, registry: Registry, store: Store, signals: Signals, limits: Limits) -> None:
        self._registry = registry
        self._ledger = registry.books.ledger
        self._store = store
        self._signals = signals
        self._limits = limits
        self._disk = ThreadPoolExecutor(1, "penstock-store")
        self._admission = Admission(limits.admissions, time.monotonic)
        self._drops: list[Drop] = []
        self._closing = False

    async def _on_disk(self, work: Callable[..., _Result], *args: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *args)

    async def run_ticker(self) -> None:
        """Looks at the leases and removes from disk what the ledger has dropped; for ever."""
        period_s = min(self._limits.worker_lease_s, self._limits.client_lease_s) / TICK_SHARE
        while True:
            await asyncio.sleep(period_s)
            try:
                self._registry.tick()
                self._drops += self._ledger.take_drops()
                if self._drops:
                    await self._on_disk(self._store.drop, list(self._drops))
                    self._drops.clear()
            except JournalError as error:
                log.error("%s", error)  # a full disk: nothing was acknowledged; the next tick tries again

    def wind_down(self) -> None:
        """Answers all long polls now; called before the server stops."""
        self._closing = True
        self._signals.wake_all()

    def close(self) -> None:
        self._disk.shutdown()

    async def _hold(
        self, topic: Topic, hold_s: float, lease_s: float, look: Callable[[], tuple[_Result, bool]]
    ) -> _Result:
        """Repeats `look` whenever the topic changes, until it says that its result is new or the hold is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(hold_s, lease_s * self._limits.hold_share)
        with self._signals.on(topic) as event:
            while True:
                result, new = look()
                if new or self._closing or loop.time() >= until:
                    return result
                event.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await event.wait()

    # -------------------------------------------------------------------------------------------------------- clients

    async def OpenRun(self, request: pb.OpenRunRequest, context: _Context) -> pb.OpenRunReply:
        self._admission.admit(address_of(context.peer()), "OpenRun")
        return self._registry.open_run(request)

    async def WatchRun(self, request: pb.WatchRunRequest, context: _Context) -> pb.WatchRunReply:
        self._registry.watch_run(request)

        def look() -> tuple[pb.WatchRunReply, bool]:
            reply = self._registry.box_view(request)
            return reply, reply.version != request.seen_version

        topic = ("box", request.run, request.attempt, request.box)
        return await self._hold(topic, request.hold_s, self._limits.client_lease_s, look)

    async def CloseRun(self, request: pb.CloseRunRequest, context: _Context) -> pb.CloseRunReply:
        self._registry.close_run(request)
        return pb.CloseRunReply()

    async def FetchState(self, request: pb.FetchStateRequest, context: _Context) -> AsyncIterator[pb.StatePart]:
        gathered = await self._gathered(request)
        for record, data in gathered.records:
            first = record.local_worker_id == 0
            yield pb.StatePart(record=record, position=gathered.positions.get(record.box) if first else None)
            for piece in pieces(data):
                yield pb.StatePart(data=piece)

    async def _gathered(self, request: pb.FetchStateRequest) -> Gathered:
        loop = asyncio.get_running_loop()
        until = loop.time() + request.deadline_s
        gathering = self._registry.begin_state(request)
        try:
            with self._signals.on(gathering.topic) as event:
                while not gathering.done:
                    event.clear()
                    async with asyncio.timeout_at(until):
                        await event.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"the state of run {gathering.run} at step {gathering.step} was not complete after "
                f"{request.deadline_s:g} s; waited for {gathering.waits_for()}"
            ) from error
        finally:
            self._registry.end_state(gathering)
        if gathering.failure is not None:
            raise error_of(detail_of(gathering.failure))  # a copy: several askers raise it
        assert gathering.result is not None
        return gathering.result

    # -------------------------------------------------------------------------------------------------------- workers

    async def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: _Context) -> pb.RegisterWorkerReply:
        self._admission.admit(address_of(context.peer()), "RegisterWorker")
        return self._registry.register_worker(request)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: _Context) -> pb.HeartbeatReply:
        self._registry.heartbeat(request)

        def look() -> tuple[pb.HeartbeatReply, bool]:
            reply = self._registry.worker_view(request)
            return reply, reply.register_again or reply.version != request.seen_version

        try:
            return await self._hold(("worker", request.worker), request.hold_s, self._limits.worker_lease_s, look)
        except asyncio.CancelledError:
            if not self._closing:
                self._registry.worker_hung_up(request.worker, request.session)
            raise

    async def DeregisterWorker(
        self, request: pb.DeregisterWorkerRequest, context: _Context
    ) -> pb.DeregisterWorkerReply:
        self._registry.deregister_worker(request)
        return pb.DeregisterWorkerReply()

    async def PutSnapshot(self, parts: AsyncIterator[pb.SnapshotPart], context: _Context) -> pb.PutSnapshotReply:
        header = (await anext(parts, pb.SnapshotPart())).header
        check_counts(epoch=header.epoch, total=header.total, delivered=header.delivered)
        check_counts(samples=header.samples, step=header.step)
        key = SlotKey(header.run, header.attempt, header.box, header.slot)
        self._registry.slot_of_generation(key, header.generation)
        refused = self._ledger.why_refused(key, header.size)
        if refused:
            return pb.PutSnapshotReply(refused=refused, free_bytes=self._ledger.free)
        transfer = Transfer("PutSnapshot", header.size)
        with self._ledger.expecting(header.size):
            async for part in parts:
                transfer.add(part.data)
            self._registry.slot_of_generation(key, header.generation)
            await self._on_disk(self._store.put_snapshot, header, transfer.all())
        self._registry.snapshot_stored(header)
        return pb.PutSnapshotReply(free_bytes=self._ledger.free)

    async def GetSnapshots(self, request: pb.GetSnapshotsRequest, context: _Context) -> AsyncIterator[pb.SnapshotPart]:
        key = SlotKey(request.run, request.attempt, request.box, request.slot)
        self._registry.slot_of_generation(key, request.generation)
        for kept in self._ledger.snapshots(key):
            found = await self._on_disk(self._store.snapshot, key, kept)
            if found is None:
                continue  # dropped since: a newer one that serves as well follows
            header, data = found
            yield pb.SnapshotPart(header=header)
            for piece in pieces(data):
                yield pb.SnapshotPart(data=piece)

    async def PutState(self, parts: AsyncIterator[pb.AnswerPart], context: _Context) -> pb.PutStateReply:
        answer = (await anext(parts, pb.AnswerPart())).answer
        if answer.state_bytes > self._limits.value_max:
            raise InvalidArgumentError(
                f"a state of {answer.state_bytes} bytes is above the {self._limits.value_max} that can be taken"
            )
        transfer = Transfer("PutState", answer.state_bytes)
        async for part in parts:
            transfer.add(part.data)
        self._registry.answer_state(answer, transfer.all())
        return pb.PutStateReply()

    # ---------------------------------------------------------------------------------------------- blobs, operators

    async def PutBlob(self, parts: AsyncIterator[pb.BlobPart], context: _Context) -> pb.PutBlobReply:
        first = await anext(parts, pb.BlobPart())
        name, size = first.blob, first.size
        if not self._ledger.has_blob(name):
            refused = self._ledger.why_blob_refused(size)
            if refused:
                raise InvalidArgumentError(f"a blob for run {first.run_hint or '?'} cannot be kept: {refused}")
            transfer = Transfer("PutBlob", size)
            with self._ledger.expecting(size):
                async for part in parts:
                    transfer.add(part.data)
                data = transfer.all()
                if await self._on_disk(blob_name, data) != name:
                    raise ProtocolError(f"PutBlob: {size} bytes came that are not those of {name}")
                await self._on_disk(self._store.put_blob, name, data)
        self._registry.blob_stored(name, size)
        return pb.PutBlobReply(blob=name)

    async def GetBlob(self, request: pb.GetBlobRequest, context: _Context) -> AsyncIterator[pb.BlobPart]:
        data = await self._on_disk(self._store.blob, request.blob)
        if data is None:
            raise StateUnavailableError(f"the coordinator has no blob {request.blob!r}")
        for piece in pieces(data):
            yield pb.BlobPart(data=piece)

    async def Status(self, request: pb.StatusRequest, context: _Context) -> pb.StatusReply:
        return self._registry.status()
