"""Calls to the coordinator: what the training job (blocking) and the worker daemon (asyncio) hold.

Both wrap the generated stub and add what every call needs: the metadata, a deadline (no wait without one), translation
of errors (penstock.proto.channel.translating) and the cutting of large values into parts. They keep no state and do
not retry: only the caller knows whether it may wait for a coordinator that restarts ("reconnecting, n s") and what it
has to say again. Every call is idempotent, so a caller may repeat any of them after CoordinatorUnavailableError or
DeadlineError. `deadline_s` is in seconds throughout; long polls add their `hold_s`, state queries their own deadline.

A value that travels in parts is checked against the size that its header declares; a blob against its name.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from penstock.proto import forks
from penstock.proto.channel import CHUNK, Tls, connect, connect_aio, metadata, translating
from penstock.proto.errors import (
    CoordinatorUnavailableError,
    ForkedProcessError,
    OverloadedError,
    ProtocolError,
    StateCorruptError,
    TlsError,
)
from penstock.proto.tls import diagnose
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorStub
from penstock.proto.wire_errors import answer_of

__all__ = ["AsyncCoordinatorClient", "CoordinatorClient", "FetchedState", "blob_name"]

DEADLINE_S = 10.0
"""Seconds that a call may take, beyond any hold: the coordinator answers in milliseconds, or is stopped or far gone."""
TRANSFER_DEADLINE_S = 120.0
"""Seconds for a call that moves a state or a snapshot: 1 GiB over 10 MB/s."""
DIAGNOSE_S = 2.0
"""Seconds for a second look at a coordinator that listens and cannot be talked to: is it TLS?"""
ARGUMENTS_INLINE = 64 * 1024
"""Bytes of a loader's arguments above which they travel as a blob: the spec is repeated for every slot."""

_Header = TypeVar("_Header", pb.SnapshotHeader, pb.WorkerRecord)


@dataclass
class FetchedState:
    """The state of a run at a step."""

    records: list[tuple[pb.WorkerRecord, bytes]] = field(default_factory=list)
    """One per worker of every box, by global_worker_id: the record and its envelope."""
    positions: dict[int, records_pb2.BoxPosition] = field(default_factory=dict)
    """Box -> where it stands at the step."""


def blob_name(data: bytes) -> str:
    """The name under which the coordinator keeps these bytes."""
    return hashlib.sha256(data).hexdigest()


# ------------------------------------------------------------------------------------------------- to and from parts


def pieces(data: bytes) -> Iterator[bytes]:
    """`data` in pieces of CHUNK bytes; none for no bytes."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield bytes(view[start : start + CHUNK])


def _first(data: bytes) -> tuple[bytes, Iterator[bytes]]:
    """What goes with the header, so that a small value is one message, and the rest."""
    if len(data) <= CHUNK:
        return data, iter(())
    return b"", pieces(data)


def blob_parts(data: bytes, run_hint: str) -> Iterator[pb.BlobPart]:
    yield pb.BlobPart(run_hint=run_hint, blob=blob_name(data), size=len(data))
    for piece in pieces(data):
        yield pb.BlobPart(data=piece)


def snapshot_parts(header: pb.SnapshotHeader, data: bytes) -> Iterator[pb.SnapshotPart]:
    sized = pb.SnapshotHeader()
    sized.CopyFrom(header)
    sized.size = len(data)
    first, more = _first(data)
    yield pb.SnapshotPart(header=sized, data=first)
    for piece in more:
        yield pb.SnapshotPart(data=piece)


def answer_parts(answer: pb.StateAnswer, data: bytes) -> Iterator[pb.AnswerPart]:
    sized = pb.StateAnswer()
    sized.CopyFrom(answer)
    sized.state_bytes = len(data)
    first, more = _first(data)
    yield pb.AnswerPart(answer=sized, data=first)
    for piece in more:
        yield pb.AnswerPart(data=piece)


async def _async(parts: Iterable[_Part]) -> AsyncIterator[_Part]:
    for part in parts:
        yield part


class Gather(Generic[_Header]):
    """Puts headers and the data parts that follow them together again. Raises ProtocolError when sizes do not agree."""

    def __init__(self, what: str, size_of: Callable[[Any], int]) -> None:
        self._what = what
        self._size_of: Callable[[Any], int] = size_of
        self._done: list[tuple[_Header, bytes]] = []
        self._header: _Header | None = None
        self._data: list[bytes] = []
        self._bytes = 0

    def add(self, header: _Header | None, data: bytes) -> None:
        if header is not None:
            self._close()
            self._header = header
        if data:
            if self._header is None:
                raise ProtocolError(f"{self._what}: data before any header")
            self._bytes += len(data)
            if self._bytes > self._size_of(self._header):
                raise ProtocolError(f"{self._what}: more than the {self._size_of(self._header)} bytes declared")
            self._data.append(data)

    def _close(self) -> None:
        if self._header is None:
            return
        declared = self._size_of(self._header)
        if declared != self._bytes:
            raise ProtocolError(f"{self._what}: {declared} bytes declared, {self._bytes} came")
        self._done.append((self._header, b"".join(self._data)))
        self._header, self._data, self._bytes = None, [], 0

    def all(self) -> list[tuple[_Header, bytes]]:
        self._close()
        return self._done


class _StateGather:
    def __init__(self) -> None:
        self._records: Gather[pb.WorkerRecord] = Gather("FetchState", lambda record: record.state_bytes)
        self._positions: dict[int, records_pb2.BoxPosition] = {}

    def add(self, part: pb.StatePart) -> None:
        for one in part.parts:
            self.add(one)
        if part.parts:
            return
        if part.HasField("record") and part.HasField("position"):
            self._positions[part.record.box] = part.position
        self._records.add(part.record if part.HasField("record") else None, part.data)

    def all(self) -> FetchedState:
        return FetchedState(self._records.all(), self._positions)


def _snapshot_gather() -> Gather[pb.SnapshotHeader]:
    return Gather("GetSnapshots", lambda header: header.size)


def _checked_blob(name: str, data: bytes) -> bytes:
    if blob_name(data) != name:
        raise StateCorruptError(f"blob {name} came as {len(data)} bytes with the digest {blob_name(data)}")
    return data


_Part = TypeVar("_Part")
_Reply = TypeVar("_Reply")


class _Base:
    def __init__(self, address: str, token: str, tls: Tls | None, deadline_s: float) -> None:
        self.address = address
        self.deadline_s = deadline_s
        self._metadata = metadata(token)
        self._tls = tls
        self._closed = False
        self._reached = False

    @contextmanager
    def _guarded(self, method: str, deadline_s: float) -> Iterator[None]:
        with translating(self.address, method, deadline_s, lambda: self._closed):
            yield
        self._reached = True

    def _tls_trouble(self, error: CoordinatorUnavailableError) -> TlsError | None:
        """Whether TLS is why there was never an answer. A coordinator that did answer once is away, whatever the
        reason: it may be back with another certificate."""
        if self._reached or isinstance(error, OverloadedError):
            return None
        return diagnose(self.address, self._tls, f"the coordinator at {self.address}", DIAGNOSE_S)


_unusable: ForkedProcessError | None = None
"""Why this process, a forked child of one that was connected, cannot call a coordinator."""


class CoordinatorClient(_Base):
    """Blocking calls, for training jobs and the command line. Thread safe; `close` from any thread ends pending calls
    with LaneClosedError."""

    def __init__(self, address: str, token: str, *, tls: Tls | None = None, deadline_s: float = DEADLINE_S) -> None:
        if _unusable is not None:
            raise _unusable
        super().__init__(address, token, tls, deadline_s)
        self._owner = forks.Owner()
        forks.keep(self)
        self._channel = connect(address, tls)
        self._stub = CoordinatorStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def forked(self) -> None:
        """See penstock.proto.forks. gRPC whose threads were left behind answers no other client here either."""
        global _unusable
        if not self._closed:
            _unusable = self._owner.error(f"the connection to the coordinator at {self.address}")

    @contextmanager
    def _guarded(self, method: str, deadline_s: float) -> Iterator[None]:
        if _unusable is not None:
            raise _unusable
        try:
            with super()._guarded(method, deadline_s):
                yield
        except CoordinatorUnavailableError as error:
            trouble = self._tls_trouble(error)
            if trouble is not None:
                raise trouble from error
            raise

    def close(self) -> None:
        self._closed = True
        self._channel.close()

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def reach(self, timeout_s: float) -> bool:
        """Wait until there is a connection, or the time is over: what to do instead of sleeping after a
        CoordinatorUnavailableError. A blocking channel only works on its connection while a call waits for it; between
        calls that fail at once it would stay where it is for 5 s, whatever happens at the other end."""
        try:
            self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError:
            return False
        except ValueError:  # the channel is closed
            return False
        return True

    def open_run(self, request: pb.OpenRunRequest, *, deadline_s: float | None = None) -> pb.OpenRunReply:
        """Large loader arguments go ahead as a blob. See OpenRunRequest for what opens, joins and supersedes."""
        deadline_s = deadline_s or self.deadline_s
        arguments = request.loader.arguments
        if len(arguments) > ARGUMENTS_INLINE:
            small = pb.OpenRunRequest()
            small.CopyFrom(request)
            small.loader.arguments_blob = self.put_blob(arguments, f"{request.job}/{request.ordinal}")
            small.loader.ClearField("arguments")
            request = small
        with self._guarded("OpenRun", deadline_s):
            return self._stub.OpenRun(request, timeout=deadline_s, metadata=self._metadata)

    def watch_run(self, request: pb.WatchRunRequest) -> pb.WatchRunReply:
        deadline_s = request.hold_s + self.deadline_s
        with self._guarded("WatchRun", deadline_s):
            return self._stub.WatchRun(request, timeout=deadline_s, metadata=self._metadata)

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        deadline_s = request.hold_s + self.deadline_s
        with self._guarded("Heartbeat", deadline_s):
            return self._stub.Heartbeat(request, timeout=deadline_s, metadata=self._metadata)

    def close_run(self, request: pb.CloseRunRequest, *, deadline_s: float | None = None) -> None:
        deadline_s = deadline_s or self.deadline_s
        with self._guarded("CloseRun", deadline_s):
            self._stub.CloseRun(request, timeout=deadline_s, metadata=self._metadata)

    def fetch_state(self, request: pb.FetchStateRequest) -> FetchedState:
        deadline_s = request.deadline_s + TRANSFER_DEADLINE_S
        request.packs = True
        gather = _StateGather()
        with self._guarded("FetchState", deadline_s):
            for part in self._stub.FetchState(request, timeout=deadline_s, metadata=self._metadata):
                gather.add(part)
        return gather.all()

    def put_blob(self, data: bytes, run_hint: str = "", *, deadline_s: float = TRANSFER_DEADLINE_S) -> str:
        """Keeps the bytes at the coordinator for the run "job/ordinal"; returns their name (for Resume.blob).

        Boxes that put the same bytes send them once, if the first has ended when the others begin."""
        with self._guarded("PutBlob", deadline_s):
            parts = blob_parts(data, run_hint)
            return self._stub.PutBlob(parts, timeout=deadline_s, metadata=self._metadata).blob

    def get_blob(self, name: str, *, deadline_s: float = TRANSFER_DEADLINE_S) -> bytes:
        with self._guarded("GetBlob", deadline_s):
            parts = self._stub.GetBlob(pb.GetBlobRequest(blob=name), timeout=deadline_s, metadata=self._metadata)
            data = b"".join(part.data for part in parts)
        return _checked_blob(name, data)

    def get_blob_into(
        self, name: str, write: Callable[[bytes], None], *, deadline_s: float = TRANSFER_DEADLINE_S
    ) -> None:
        """Give the bytes to `write` as they come. They are the blob's only if this returns."""
        digest = hashlib.sha256()
        with self._guarded("GetBlob", deadline_s):
            for part in self._stub.GetBlob(pb.GetBlobRequest(blob=name), timeout=deadline_s, metadata=self._metadata):
                digest.update(part.data)
                write(part.data)
        if digest.hexdigest() != name:
            raise StateCorruptError(f"blob {name} came with the digest {digest.hexdigest()}")

    def status(self, *, deadline_s: float | None = None) -> pb.StatusReply:
        deadline_s = deadline_s or self.deadline_s
        with self._guarded("Status", deadline_s):
            return self._stub.Status(pb.StatusRequest(), timeout=deadline_s, metadata=self._metadata)

    def drain(self, worker: str, *, undo: bool = False, look: bool = False) -> pb.DrainWorkerReply:
        """Have a worker drained, or take slots again; or only look how far it is."""
        request = pb.DrainWorkerRequest(worker=worker, undo=undo, look=look)
        with self._guarded("DrainWorker", self.deadline_s):
            return self._stub.DrainWorker(request, timeout=self.deadline_s, metadata=self._metadata)

    def fetch_histories(self, run: str, box: int) -> list[pb.History]:
        """Of all attempts that are remembered, oldest first; empty for a run or box that is not known."""
        request = pb.FetchHistoryRequest(run=run, box=box)
        with self._guarded("FetchHistory", self.deadline_s):
            parts = self._stub.FetchHistory(request, timeout=self.deadline_s, metadata=self._metadata)
            return [part.history for part in parts]

    def fetch_snapshot(self, header: pb.SnapshotHeader, *, deadline_s: float = TRANSFER_DEADLINE_S) -> bytes:
        """The bytes of a snapshot that a history named. StateUnavailableError: it is not kept any more."""
        request = pb.FetchHistoryRequest(snapshot=header)
        with self._guarded("FetchHistory", deadline_s):
            parts = self._stub.FetchHistory(request, timeout=deadline_s, metadata=self._metadata)
            return b"".join(part.data for part in parts)


class AsyncCoordinatorClient(_Base):
    """Calls for the running event loop, for worker daemons. Make it inside the loop."""

    def __init__(self, address: str, token: str, *, tls: Tls | None = None, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(address, token, tls, deadline_s)
        self._channel = connect_aio(address, tls)
        self._stub = CoordinatorStub(self._channel)

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> AsyncCoordinatorClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _wait(self, method: str, deadline_s: float, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        try:
            with self._guarded(method, deadline_s):
                return await call()
        except CoordinatorUnavailableError as error:
            trouble = await asyncio.to_thread(self._tls_trouble, error)
            if trouble is not None:
                raise trouble from error
            raise

    async def register(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerReply:
        limit = self.deadline_s
        call = self._stub.RegisterWorker
        return await self._wait("RegisterWorker", limit, lambda: call(request, timeout=limit, metadata=self._metadata))

    async def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        limit = request.hold_s + self.deadline_s
        call = self._stub.Heartbeat
        return await self._wait("Heartbeat", limit, lambda: call(request, timeout=limit, metadata=self._metadata))

    async def deregister(self, request: pb.DeregisterWorkerRequest) -> None:
        limit = self.deadline_s
        call = self._stub.DeregisterWorker
        await self._wait("DeregisterWorker", limit, lambda: call(request, timeout=limit, metadata=self._metadata))

    async def drain(self, worker: str, *, undo: bool = False) -> pb.DrainWorkerReply:
        """Have a worker drained, or take slots again."""
        limit = self.deadline_s
        call, request = self._stub.DrainWorker, pb.DrainWorkerRequest(worker=worker, undo=undo)
        return await self._wait("DrainWorker", limit, lambda: call(request, timeout=limit, metadata=self._metadata))

    async def put_snapshot(
        self, header: pb.SnapshotHeader, data: bytes, *, deadline_s: float = TRANSFER_DEADLINE_S
    ) -> pb.PutSnapshotReply:
        """Returns when the snapshot is on disk, or was refused for want of room (reply.refused says why; the older
        ones stay). Raises SupersededError for one of an old generation."""
        call, parts = self._stub.PutSnapshot, _async(snapshot_parts(header, data))
        return await self._wait(
            "PutSnapshot", deadline_s, lambda: answer_of(call(parts, timeout=deadline_s, metadata=self._metadata))
        )

    async def get_snapshots(
        self, request: pb.GetSnapshotsRequest, *, deadline_s: float = TRANSFER_DEADLINE_S
    ) -> list[tuple[pb.SnapshotHeader, bytes]]:
        """All that are kept of the slot, oldest first."""
        gather = _snapshot_gather()
        with self._guarded("GetSnapshots", deadline_s):
            async for part in self._stub.GetSnapshots(request, timeout=deadline_s, metadata=self._metadata):
                gather.add(part.header if part.HasField("header") else None, part.data)
        return gather.all()

    async def put_state(
        self, answer: pb.StateAnswer, data: bytes = b"", *, deadline_s: float = TRANSFER_DEADLINE_S
    ) -> None:
        call, parts = self._stub.PutState, _async(answer_parts(answer, data))
        await self._wait(
            "PutState", deadline_s, lambda: answer_of(call(parts, timeout=deadline_s, metadata=self._metadata))
        )

    async def put_blob(self, data: bytes, run_hint: str = "", *, deadline_s: float = TRANSFER_DEADLINE_S) -> str:
        call, parts = self._stub.PutBlob, _async(blob_parts(data, run_hint))
        reply = await self._wait(
            "PutBlob", deadline_s, lambda: answer_of(call(parts, timeout=deadline_s, metadata=self._metadata))
        )
        return reply.blob

    async def get_blob(self, name: str, *, deadline_s: float = TRANSFER_DEADLINE_S) -> bytes:
        request, data = pb.GetBlobRequest(blob=name), []
        with self._guarded("GetBlob", deadline_s):
            async for part in self._stub.GetBlob(request, timeout=deadline_s, metadata=self._metadata):
                data.append(part.data)
        return _checked_blob(name, b"".join(data))

    # What a training job calls; the coordinator's tests and asyncio programs use these.

    async def open_run(self, request: pb.OpenRunRequest) -> pb.OpenRunReply:
        limit = self.deadline_s
        call = self._stub.OpenRun
        return await self._wait("OpenRun", limit, lambda: call(request, timeout=limit, metadata=self._metadata))

    async def watch_run(self, request: pb.WatchRunRequest) -> pb.WatchRunReply:
        limit = request.hold_s + self.deadline_s
        call = self._stub.WatchRun
        return await self._wait("WatchRun", limit, lambda: call(request, timeout=limit, metadata=self._metadata))

    async def close_run(self, request: pb.CloseRunRequest) -> None:
        limit = self.deadline_s
        call = self._stub.CloseRun
        await self._wait("CloseRun", limit, lambda: call(request, timeout=limit, metadata=self._metadata))

    async def fetch_state(self, request: pb.FetchStateRequest) -> FetchedState:
        deadline_s = request.deadline_s + TRANSFER_DEADLINE_S
        request.packs = True
        gather = _StateGather()
        with self._guarded("FetchState", deadline_s):
            async for part in self._stub.FetchState(request, timeout=deadline_s, metadata=self._metadata):
                gather.add(part)
        return gather.all()

    async def fetch_histories(self, run: str, box: int) -> list[pb.History]:
        request, limit = pb.FetchHistoryRequest(run=run, box=box), self.deadline_s
        with self._guarded("FetchHistory", limit):
            parts = self._stub.FetchHistory(request, timeout=limit, metadata=self._metadata)
            return [part.history async for part in parts]

    async def status(self) -> pb.StatusReply:
        limit = self.deadline_s
        call, request = self._stub.Status, pb.StatusRequest()
        return await self._wait("Status", limit, lambda: call(request, timeout=limit, metadata=self._metadata))
