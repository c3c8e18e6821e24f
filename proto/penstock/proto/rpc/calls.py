"""Clients of the coordinator: a blocking client for training jobs and commands, an asyncio one for the worker daemon.

Both add the metadata and a deadline, translate errors and divide large values into parts, whose sizes and digests are
checked. The token crosses the network as it is, so it is sent only to a Unix socket in a private folder, over TLS, or
where the caller allows clear text. A call is repeated only with a token that was replaced: only the caller knows
whether to wait for a coordinator that restarts. Every call is idempotent, so it may be repeated after
CoordinatorUnavailableError or DeadlineError.
`deadline_s` is the seconds that a call may take, plus a long poll's `hold_s`; state queries and changes of a mixture
have their own.

The blocking client makes each call in a thread of its own: gRPC does not end a call at its deadline, nor close a
channel, if the kernel refuses it threads or memory (`ulimit -u`, `ulimit -v`)."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from penstock.proto.rpc.quiet_grpc import grpc  # before grpc_health imports it

# isort: split
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from penstock.proto.errors import (
    CoordinatorUnavailableError,
    DeadlineError,
    ForkedProcessError,
    InvalidArgumentError,
    OverloadedError,
    PenstockError,
    TlsError,
    UnsafeBindError,
)
from penstock.proto.rpc.addresses import refuse_clear_token, refuse_strangers
from penstock.proto.rpc.bounds.message_bounds import bytes_channel, owned, parsed_reply
from penstock.proto.rpc.bounds.reply_parts import BlobParts, SnapshotParts, StateParts, blob_name
from penstock.proto.rpc.channel import CHUNK, REQUEST_MAX, connect, connect_aio
from penstock.proto.rpc.credentials.tokens import BEARER, check_token, read_again
from penstock.proto.rpc.tls import Renewing, Tls, diagnose
from penstock.proto.rpc.version import PROTOCOL, PROTOCOL_KEY, VERSION, VERSION_KEY
from penstock.proto.rpc.wire_errors import answer_of, closed_here, translating
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorStub
from penstock.runtime.process import forks

DEADLINE_S = 10.0
"""Seconds that a call may take, in addition to the hold of a long poll."""
TRANSFER_DEADLINE_S = 120.0
"""Seconds that a call with a state or a snapshot may take: 1 GiB at 10 MB/s."""
LATE_S = 5.0
"""Seconds after a call's deadline, at which gRPC ends it, until the blocking client waits no longer for gRPC."""
CLOSE_S = 2.0
"""Longest wait of the blocking client for a channel to be closed, in seconds."""
DIAGNOSE_S = 2.0
"""Timeout in seconds of each step of finding out whether TLS is why calls to a listening coordinator fail."""
ARGUMENTS_INLINE = 4 * 1024
"""Bytes above which a loader's arguments are sent as a blob. Otherwise every slot's assignment would repeat them."""


@dataclass
class FetchedState:
    records: list[tuple[pb.WorkerRecord, bytes]] = field(default_factory=list)
    """Record and encoded state of each worker of all boxes, in order of global_worker_id."""
    positions: dict[int, records_pb2.BoxPosition] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------- to and from parts


def pieces(data: bytes | memoryview) -> Iterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield bytes(view[start : start + CHUNK])


def blob_parts(data: bytes, run_hint: str) -> Iterator[pb.BlobPart]:
    yield pb.BlobPart(run_hint=run_hint, blob=blob_name(data), size=len(data))
    for piece in pieces(data):
        yield pb.BlobPart(data=piece)


def snapshot_parts(header: pb.SnapshotHeader, data: bytes) -> Iterator[pb.SnapshotPart]:
    sized = owned(header)
    sized.size = len(data)
    yield pb.SnapshotPart(header=sized, data=data[:CHUNK])
    for piece in pieces(memoryview(data)[CHUNK:]):
        yield pb.SnapshotPart(data=piece)


def answer_parts(answer: pb.StateAnswer, data: bytes) -> Iterator[pb.AnswerPart]:
    sized = owned(answer)
    sized.state_bytes = len(data)
    yield pb.AnswerPart(answer=sized, data=data[:CHUNK])
    for piece in pieces(memoryview(data)[CHUNK:]):
        yield pb.AnswerPart(data=piece)


def _sendable(method: str, request: Any) -> Any:
    """Return a message, or a fresh iterator of parts for each try. Raises InvalidArgumentError for too large a request,
    which gRPC would refuse without a reason."""
    if not isinstance(request, Message):
        return request()
    if (size := request.ByteSize()) > REQUEST_MAX:
        raise InvalidArgumentError(f"a request {method} must have at most {REQUEST_MAX} bytes, got {size}")
    return request


async def _async(parts: Iterable[_Part]) -> AsyncIterator[_Part]:
    for part in parts:
        yield part


_Part = TypeVar("_Part")
_Reply = TypeVar("_Reply")
_Request = Message | Callable[[], Any]
_Metadata = tuple[tuple[str, str], ...]
_RELEASE = ((PROTOCOL_KEY, str(PROTOCOL)), (VERSION_KEY, VERSION))

_unusable: ForkedProcessError | None = None
"""Error that all calls raise in the forked child of a process that had an open client."""


class _Client:
    """What both clients share: the token and release that each call shows, and the errors of calls."""

    def __init__(
        self,
        address: str,
        token: str,
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`insecure`: allows to send the token over TCP without TLS."""
        check_token(token)
        refuse_clear_token(address, encrypted=tls is not None, insecure=insecure)
        self.address = address
        self.deadline_s = deadline_s
        self._token = token
        self._files = None if tls is None else Renewing(tls)
        self._closed = False
        self._reached = False
        self._displaced = False
        """True if others could have put a socket in the coordinator's place, to which the channel then connected."""
        self._begin()
        self._open()

    def _begin(self) -> None:
        """Prepare what lasts beyond a channel."""

    @property
    def metadata(self) -> _Metadata:
        return (("authorization", f"{BEARER}{self._token}"), *_RELEASE)

    @contextmanager
    def _guarded(self, method: str, deadline_s: float) -> Iterator[None]:
        self._refuse_strangers(method)
        with translating(self.address, method, deadline_s, lambda: self._closed):
            yield
        self._reached = True

    def _refuse_strangers(self, method: str) -> None:
        """Raise CoordinatorUnavailableError while others could be in the coordinator's place: its folder may have gone
        since, and a channel connects again by itself."""
        try:
            refuse_strangers(self.address)
        except UnsafeBindError as error:
            self._displaced = True
            raise CoordinatorUnavailableError(f"{method} is not sent to the coordinator: {error.message}") from error
        if self._displaced and not self._closed:
            self._displaced = False
            self._open()

    @property
    def _tls(self) -> Tls | None:
        return None if self._files is None else self._files.tls

    def _open(self) -> None:
        """Open a channel with the current certificate files."""
        raise NotImplementedError

    def _renew_files(self) -> None:
        """Connect with new certificates after a failed call, if the files have changed. Open calls are kept."""
        if self._files is not None and not self._closed and self._files.renew():
            self._open()

    def again(self, error: grpc.RpcError, shown: _Metadata) -> bool:
        """Return True if a call that was refused for its token can be made again, because its file has another one
        now."""
        if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
            return False
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return False
        self._token = read_again(self._token)
        return self.metadata != shown

    def _tls_trouble(self, error: CoordinatorUnavailableError) -> TlsError | None:
        """TLS error that explains why the coordinator has never answered; None if it has, because it may come back."""
        if self._reached or isinstance(error, OverloadedError):
            return None
        return diagnose(self.address, self._tls, f"the coordinator at {self.address}", DIAGNOSE_S)


class _Call:
    """One call of the blocking client, which another thread makes."""

    def __init__(self) -> None:
        self.outcome: queue.SimpleQueue[tuple[Any, BaseException | None] | None] = queue.SimpleQueue()
        """None: the first part of a streamed answer has arrived."""
        self.given_up = False
        """True if the caller waits no longer: nothing that arrives may be used."""

    def make(self, work: Callable[[_Call], Any]) -> None:
        try:
            self.outcome.put((work(self), None))
        except BaseException as error:
            self.outcome.put((None, error))


class _Waits:
    """Waits of callers for their calls, which other threads make."""

    def __init__(self) -> None:
        self._calls: set[_Call] = set()
        self._failure: PenstockError | None = None

    def wait_for(self, work: Callable[[_Call], Any], timeout_s: float, begins_s: float | None = None) -> Any:
        """Return what `work` returns in another thread, which is to report the begin of the answer within `begins_s`.
        Raises its error, that of `fail`, queue.Empty after `timeout_s`; PenstockError if there can be no other
        thread."""
        call = _Call()
        self._calls.add(call)
        try:
            if self._failure is not None:
                raise self._failure
            try:
                threading.Thread(target=call.make, args=(work,), name="penstock-call", daemon=True).start()
            except RuntimeError as error:
                raise PenstockError(f"the coordinator cannot be called: {error}. Raise `ulimit -u` and `-v`") from error
            ended = call.outcome.get(timeout=timeout_s if begins_s is None else min(begins_s, timeout_s))
            while ended is None:
                ended = call.outcome.get(timeout=timeout_s)
        finally:
            call.given_up = True
            self._calls.discard(call)
        answer, failure = ended
        if failure is not None:
            raise failure
        return answer

    def fail(self, error: PenstockError) -> None:
        """End all waits with an error, also later ones. From any thread."""
        self._failure = error
        for call in list(self._calls):
            call.outcome.put((None, error))


class CoordinatorClient(_Client):
    """Client with blocking calls; several threads may use it. `close` and `fail`, from any thread, end calls under way.
    Raises ForkedProcessError in a forked child."""

    def _begin(self) -> None:
        if _unusable is not None:
            raise _unusable
        self._waits = _Waits()
        self._owner = forks.OwnerProcess()
        forks.keep(self)

    def _open(self) -> None:
        self._channel = connect(self.address, self._tls)
        self._stub = CoordinatorStub(bytes_channel(self._channel))
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def forked(self) -> None:
        """Make all calls fail in a process that user code has forked, in which gRPC has no threads."""
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
            self._renew_files()
            trouble = self._tls_trouble(error)
            if trouble is not None:
                raise trouble from error
            raise

    def _made(
        self, method: str, deadline_s: float, once: Callable[[_Call, _Metadata], Any], begins_s: float | None = None
    ) -> Any:
        def made(call: _Call) -> Any:
            while True:
                shown = self.metadata
                try:
                    return once(call, shown)
                except grpc.RpcError as error:
                    if not self.again(error, shown):
                        raise

        with self._guarded(method, deadline_s):
            try:
                return self._waits.wait_for(made, deadline_s + LATE_S, None if begins_s is None else begins_s + LATE_S)
            except queue.Empty:
                waited_s = deadline_s if begins_s is None else begins_s
                raise DeadlineError(
                    f"the coordinator at {self.address} did not answer {method} within {waited_s:g} s. Check its load, "
                    "the network, and how many threads and how much memory this process may have (ulimit -u -v)"
                ) from None

    def _ask(self, method: str, deadline_s: float, request: _Request, _: type[_Reply]) -> _Reply:
        """`request`: a message, or a function that returns an iterator of its parts, called before each try."""

        def once(_: _Call, shown: _Metadata) -> Any:
            return getattr(self._stub, method)(_sendable(method, request), timeout=deadline_s, metadata=shown)

        return cast(_Reply, parsed_reply(method, self._made(method, deadline_s, once)))

    def _read(
        self,
        method: str,
        deadline_s: float,
        request: Any,
        take: Callable[[Any], None],
        begins_s: float | None = None,
    ) -> None:
        """Pass the parts of a streamed reply to `take`. `begins_s`: seconds until the first part."""

        def once(call: _Call, shown: _Metadata) -> None:
            parts = getattr(self._stub, method)(request, timeout=deadline_s, metadata=shown)
            try:
                for number, part in enumerate(parts):
                    if not number:
                        call.outcome.put(None)
                    if call.given_up:
                        raise closed_here(self.address, f"during {method}")
                    take(parsed_reply(method, part))
            except PenstockError:
                parts.cancel()
                raise

        self._made(method, deadline_s, once, begins_s)

    def fail(self, error: PenstockError) -> None:
        """End calls under way, and later ones, with an error."""
        self._waits.fail(error)

    def close(self) -> None:
        self._closed = True
        closing = threading.Thread(target=self._channel.close, name="penstock-close", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread: gRPC lacks them too, so the channel stays open
            closing.start()
            closing.join(CLOSE_S)
        if closing.is_alive() or closing.ident is None:
            self.fail(closed_here(self.address, "during a call"))

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reach(self, timeout_s: float) -> bool:
        """Wait until the channel is connected; False after `timeout_s` seconds. Use it instead of sleeping after a
        CoordinatorUnavailableError: a blocking channel reconnects only while a call waits for it."""

        def check(_: object) -> object:
            try:
                self._refuse_strangers("Check")
            except CoordinatorUnavailableError:
                time.sleep(timeout_s)
                raise
            return self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)

        try:
            self._waits.wait_for(check, timeout_s + LATE_S)
        except (grpc.RpcError, queue.Empty, PenstockError):
            return False
        except ValueError:  # the channel is closed
            return False
        return True

    def open_run(self, request: pb.OpenRunRequest) -> pb.OpenRunReply:
        """Join a box to the open attempt of a run, or open the next one: see OpenRunRequest in coordinator.proto."""
        arguments = request.loader.arguments
        if len(arguments) > ARGUMENTS_INLINE:
            request = owned(request)
            request.loader.arguments_blob = self.put_blob(arguments, f"{request.job}/{request.ordinal}")
            request.loader.ClearField("arguments")
        return self._ask("OpenRun", self.deadline_s, request, pb.OpenRunReply)

    def watch_run(self, request: pb.WatchRunRequest) -> pb.WatchRunReply:
        return self._ask("WatchRun", request.hold_s + self.deadline_s, request, pb.WatchRunReply)

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        return self._ask("Heartbeat", request.hold_s + self.deadline_s, request, pb.HeartbeatReply)

    def close_run(self, request: pb.CloseRunRequest, *, deadline_s: float | None = None) -> None:
        self._ask("CloseRun", deadline_s or self.deadline_s, request, pb.CloseRunReply)

    def fetch_state(self, request: pb.FetchStateRequest) -> FetchedState:
        request.packs = True
        state = StateParts()
        deadline_s = request.deadline_s
        self._read("FetchState", deadline_s + TRANSFER_DEADLINE_S, request, state.add, begins_s=deadline_s)
        return FetchedState(state.records(), state.positions)

    def put_blob(self, data: bytes, run_hint: str = "") -> str:
        """Store bytes at the coordinator, unless it has them. Return their name. `run_hint`: the run, for messages."""
        return self._ask("PutBlob", TRANSFER_DEADLINE_S, partial(blob_parts, data, run_hint), pb.PutBlobReply).blob

    def get_blob(self, name: str) -> bytes:
        parts: list[bytes] = []
        self.get_blob_into(name, parts.append)
        return b"".join(parts)

    def get_blob_into(self, name: str, write: Callable[[bytes], None]) -> None:
        """Fetch a blob, and pass its bytes to `write`. Use them only after the return: the blob is checked as a whole
        at the end. Raises StateCorruptError."""
        blob = BlobParts(name, write)
        self._read("GetBlob", TRANSFER_DEADLINE_S, pb.GetBlobRequest(blob=name), blob.add)
        blob.check()

    def status(self, *, deadline_s: float | None = None) -> pb.StatusReply:
        return self._ask("Status", deadline_s or self.deadline_s, pb.StatusRequest(), pb.StatusReply)

    def drain(self, worker: str, *, undo: bool = False, look: bool = False) -> pb.DrainWorkerReply:
        """Move a worker's slots to other workers. `undo`: end the drain instead; `look`: only return how far it is."""
        request = pb.DrainWorkerRequest(worker=worker, undo=undo, look=look)
        return self._ask("DrainWorker", self.deadline_s, request, pb.DrainWorkerReply)

    def end_run(self, run: str) -> pb.EndRunReply:
        """End a run (JOB/ORDINAL), or all runs of a job (JOB). Raises UnknownRunError."""
        return self._ask("EndRun", self.deadline_s, pb.EndRunRequest(run=run), pb.EndRunReply)

    def change_mixture(self, request: pb.ChangeMixtureRequest) -> pb.ChangeMixtureReply:
        """Change a run's mixture. Waits up to `deadline_s` for workers to try it, and for boxes to answer."""
        return self._ask("ChangeMixture", request.deadline_s + 5.0, request, pb.ChangeMixtureReply)

    def open_dashboard(self) -> str:
        """Return the dashboard's URL; an embedded coordinator starts it now. Raises InvalidArgumentError if none."""
        return self._ask("OpenDashboard", self.deadline_s, pb.OpenDashboardRequest(), pb.OpenDashboardReply).url

    def fetch_histories(self, run: str, box: int) -> list[pb.History]:
        """Return the histories of a box, oldest first, from which `penstock replay` makes its batches again."""
        parts: list[pb.HistoryPart] = []
        self._read("FetchHistory", self.deadline_s, pb.FetchHistoryRequest(run=run, box=box), parts.append)
        return [part.history for part in parts]

    def fetch_snapshot(self, header: pb.SnapshotHeader) -> bytes:
        """`header`: the snapshot's entry in the history of a box. Raises StateUnavailableError if it was deleted."""
        parts: list[pb.HistoryPart] = []
        self._read("FetchHistory", TRANSFER_DEADLINE_S, pb.FetchHistoryRequest(snapshot=header), parts.append)
        return b"".join(part.data for part in parts)


class AsyncCoordinatorClient(_Client):
    """Client with asyncio calls, for worker daemons. Create it in the running event loop."""

    def _open(self) -> None:
        self._channel = connect_aio(self.address, self._tls)
        self._stub = CoordinatorStub(bytes_channel(self._channel))

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> AsyncCoordinatorClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _wait(self, method: str, deadline_s: float, once: Callable[[_Metadata], Awaitable[Any]]) -> Any:
        try:
            with self._guarded(method, deadline_s):
                while True:
                    shown = self.metadata
                    try:
                        return await once(shown)
                    except grpc.RpcError as error:
                        if not self.again(error, shown):
                            raise
        except CoordinatorUnavailableError as error:
            self._renew_files()
            trouble = await asyncio.to_thread(self._tls_trouble, error)
            if trouble is not None:
                raise trouble from error
            raise

    async def _ask(self, method: str, deadline_s: float, request: _Request, _: type[_Reply]) -> _Reply:

        async def once(shown: _Metadata) -> Any:
            made = getattr(self._stub, method)(_sendable(method, request), timeout=deadline_s, metadata=shown)
            return await (answer_of(made) if isinstance(made, grpc.aio.StreamUnaryCall) else made)

        return cast(_Reply, parsed_reply(method, await self._wait(method, deadline_s, once)))

    async def _read(self, method: str, deadline_s: float, request: Any, take: Callable[[Any], None]) -> None:

        async def once(shown: _Metadata) -> None:
            made = getattr(self._stub, method)(request, timeout=deadline_s, metadata=shown)
            try:
                async for part in made:
                    take(parsed_reply(method, part))
            except PenstockError:
                made.cancel()
                raise

        await self._wait(method, deadline_s, once)

    async def register(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerReply:
        return await self._ask("RegisterWorker", self.deadline_s, request, pb.RegisterWorkerReply)

    async def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        return await self._ask("Heartbeat", request.hold_s + self.deadline_s, request, pb.HeartbeatReply)

    async def deregister(self, request: pb.DeregisterWorkerRequest) -> None:
        await self._ask("DeregisterWorker", self.deadline_s, request, pb.DeregisterWorkerReply)

    async def put_snapshot(self, header: pb.SnapshotHeader, data: bytes) -> pb.PutSnapshotReply:
        """Wait until a snapshot is on the coordinator's disk, or refused because space is short (reply.refused); older
        ones are kept. Raises SupersededError for one of an old generation."""
        parts = partial(snapshot_parts, header, data)
        return await self._ask("PutSnapshot", TRANSFER_DEADLINE_S, lambda: _async(parts()), pb.PutSnapshotReply)

    async def get_snapshots(self, request: pb.GetSnapshotsRequest) -> list[tuple[pb.SnapshotHeader, bytes]]:
        snapshots = SnapshotParts()
        await self._read("GetSnapshots", TRANSFER_DEADLINE_S, request, snapshots.add)
        return snapshots.all()

    async def put_state(self, answer: pb.StateAnswer, data: bytes = b"") -> None:
        parts = partial(answer_parts, answer, data)
        await self._ask("PutState", TRANSFER_DEADLINE_S, lambda: _async(parts()), pb.PutStateReply)

    async def get_blob(self, name: str) -> bytes:
        parts: list[bytes] = []
        blob = BlobParts(name, parts.append)
        await self._read("GetBlob", TRANSFER_DEADLINE_S, pb.GetBlobRequest(blob=name), blob.add)
        blob.check()
        return b"".join(parts)

    # Calls of a training job, for the coordinator's tests and load generators.

    async def put_blob(self, data: bytes, run_hint: str = "") -> str:
        parts = partial(blob_parts, data, run_hint)
        return (await self._ask("PutBlob", TRANSFER_DEADLINE_S, lambda: _async(parts()), pb.PutBlobReply)).blob

    async def open_run(self, request: pb.OpenRunRequest) -> pb.OpenRunReply:
        return await self._ask("OpenRun", self.deadline_s, request, pb.OpenRunReply)

    async def watch_run(self, request: pb.WatchRunRequest) -> pb.WatchRunReply:
        return await self._ask("WatchRun", request.hold_s + self.deadline_s, request, pb.WatchRunReply)

    async def close_run(self, request: pb.CloseRunRequest) -> None:
        await self._ask("CloseRun", self.deadline_s, request, pb.CloseRunReply)

    async def fetch_state(self, request: pb.FetchStateRequest) -> FetchedState:
        request.packs = True
        state = StateParts()
        await self._read("FetchState", request.deadline_s + TRANSFER_DEADLINE_S, request, state.add)
        return FetchedState(state.records(), state.positions)

    async def status(self) -> pb.StatusReply:
        return await self._ask("Status", self.deadline_s, pb.StatusRequest(), pb.StatusReply)
