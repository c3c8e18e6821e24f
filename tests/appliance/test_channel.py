"""Channels, servers and errors between the two, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from coroutines import Test, as_test, in_loop
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from penstock.client.stream.open_run import _plain
from penstock.proto.errors import (
    CATALOGUE,
    AuthenticationError,
    CoordinatorUnavailableError,
    DeadlineError,
    InvalidArgumentError,
    LaneClosedError,
    PenstockError,
    PortTakenError,
    ProtocolError,
    StateCorruptError,
    VersionSkewError,
    error_named,
)
from penstock.proto.rpc import calls, wire_errors
from penstock.proto.rpc.auth_interceptor import SERVICE
from penstock.proto.rpc.bounds.reply_parts import blob_name
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.channel import CHUNK, RunningServer, connect_aio, server_aio
from penstock.proto.rpc.version import VERSION
from penstock.proto.rpc.wire_errors import detail_of, error_of
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import coordinator_pb2_grpc as rpc
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.logs import LONGEST

TOKEN = "token"
Context = Any


class Scripted(rpc.CoordinatorServicer):
    """A coordinator that does what the request's job says."""

    def __init__(self) -> None:
        self.held = threading.Event()
        self.ending = asyncio.Event()
        self.turns_to_end = 0

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.OpenRunReply:
        if request.job == "bug":
            raise ZeroDivisionError("by nought")
        if request.job:
            raise error_named(request.job, "what it says", "Traceback: far away")
        return pb.OpenRunReply(run=request.loader.arguments_blob or "inline")

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> pb.WatchRunReply:
        self.held.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            for _ in range(self.turns_to_end):
                await asyncio.sleep(0)
        raise AssertionError

    async def GetBlob(self, request: pb.GetBlobRequest, context: Context) -> AsyncIterator[pb.BlobPart]:
        yield pb.BlobPart(data=b"part")
        if request.blob == "broken":
            raise InvalidArgumentError("in mid-stream")

    async def PutBlob(self, parts: AsyncIterator[pb.BlobPart], context: Context) -> pb.PutBlobReply:
        whole = b"".join([part.data async for part in parts])
        return pb.PutBlobReply(blob=blob_name(whole))

    async def GetSnapshots(self, request: pb.GetSnapshotsRequest, context: Context) -> AsyncIterator[pb.SnapshotPart]:
        yield pb.SnapshotPart(header=pb.SnapshotHeader(size=3))
        yield pb.SnapshotPart(data=b"xy")

    async def FetchState(self, request: pb.FetchStateRequest, context: Context) -> AsyncIterator[Any]:
        if not request.run:
            await asyncio.Event().wait()
        yield b"\xff" * 9

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> Any:
        return b"\xff" * 9


@contextlib.asynccontextmanager
async def serving(listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[RunningServer, Scripted]]:
    servicer = Scripted()  # type: ignore[abstract]  # calls that are not scripted are answered UNIMPLEMENTED
    served = await server_aio(listen, TOKEN, lambda server: rpc.add_CoordinatorServicer_to_server(servicer, server))
    try:
        yield served, servicer
    finally:
        await served.stop(0)


Trial = Callable[[RunningServer, Scripted, AsyncCoordinatorClient], Awaitable[None]]


def trial(body: Trial, *, token: str = TOKEN, deadline_s: float = 20.0, listen: str = "127.0.0.1:0") -> None:
    async def run() -> None:
        async with (
            serving(listen) as (served, servicer),
            AsyncCoordinatorClient(served.address, token, deadline_s=deadline_s, insecure=True) as client,
        ):
            await body(served, servicer, client)

    asyncio.run(run())


def on_server(**options: Any) -> Callable[[Test], Callable[..., None]]:
    """Make a test of a coroutine function: it may name `served`, `servicer`, `client` and fixtures."""
    return as_test(lambda test: trial(test, **options), "served", "servicer", "client")


# -------------------------------------------------------------------------------------------------------------- errors


@on_server()
async def test_every_error_crosses_with_its_traceback(served: RunningServer, client: AsyncCoordinatorClient) -> None:
    blocking = CoordinatorClient(served.address, TOKEN, insecure=True)
    for name, entry in CATALOGUE.items():
        request = pb.OpenRunRequest(job=name)
        with pytest.raises(entry.error) as caught:
            await client.open_run(request)
        with pytest.raises(entry.error) as caught_blocking:
            await asyncio.to_thread(blocking.open_run, request)
        for error in (caught.value, caught_blocking.value):
            assert (type(error), error.message) == (entry.error, "what it says")
            assert error.remote_traceback == "Traceback: far away"
            cause = error.__context__
            assert isinstance(cause, grpc.RpcError | grpc.aio.AioRpcError)
            assert cause.code() is grpc.StatusCode[entry.status]
            assert cause.details() == "what it says"
    blocking.close()


@on_server()
async def test_server_bug_arrives_with_its_traceback(client: AsyncCoordinatorClient) -> None:
    with pytest.raises(PenstockError) as caught:
        await client.open_run(pb.OpenRunRequest(job="bug"))
    assert caught.value.message == "ZeroDivisionError: by nought"
    assert 'raise ZeroDivisionError("by nought")' in caught.value.remote_traceback
    assert "in OpenRun" in caught.value.remote_traceback


@on_server()
async def test_error_in_mid_stream_is_raised(client: AsyncCoordinatorClient) -> None:
    with pytest.raises(InvalidArgumentError, match="in mid-stream"):
        await client.get_blob("broken")


def test_long_details_keep_both_ends() -> None:
    long = "the cause\n" + "é" * 200_000 + "\nthe place"
    detail = detail_of(InvalidArgumentError("m" * 100_000, remote_traceback=long))
    assert detail.ByteSize() < wire_errors.METADATA_MAX * 3 // 4  # base64 on top, and other metadata beside
    assert detail.remote_traceback.startswith("the cause\n")
    assert detail.remote_traceback.endswith("\nthe place")
    assert "bytes left out" in detail.remote_traceback
    assert type(error_of(detail)) is InvalidArgumentError


def test_texts_of_a_peer_are_plain() -> None:
    """They are printed where they arrive."""
    forged = "\x1b[2J\n2026 INFO forged\u202e" + "x" * (1 << 20)
    view = _plain(pb.SlotView(note=forged, worker=forged))
    detail = records_pb2.ErrorDetail(name="StateCorruptError", message=forged, remote_traceback=forged)
    error = error_of(detail)
    assert type(error) is StateCorruptError
    for text in (view.note, view.worker, error.message, error.remote_traceback):
        assert text.startswith("\\x1b[2J\n2026 INFO forged\\u202exxx")
        assert len(text) < LONGEST + 100
    assert error_of(records_pb2.ErrorDetail(name="DeadlineError", message="a\n\tb – 漢字")).message == "a\n    b – 漢字"


# ------------------------------------------------------------------------------------------------------ who may call


@on_server(token="other")
async def test_wrong_token_is_refused(client: AsyncCoordinatorClient) -> None:
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.open_run(pb.OpenRunRequest()),
        lambda: client.get_blob("x"),
        lambda: client.put_blob(b"x" * 3 * CHUNK),
    ]
    for call in calls:
        with pytest.raises(AuthenticationError, match=r"the token is wrong: set the same PENSTOCK_TOKEN"):
            await call()


@in_loop
async def test_health_needs_no_token_and_has_no_watch() -> None:
    async with serving() as (served, _), connect_aio(served.address) as bare:
        stub = health_pb2_grpc.HealthStub(bare)
        for service in ("", SERVICE):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(health_pb2.HealthCheckRequest(), timeout=20).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        served.health.serving = False
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("token", ["", "line\nbreak"])
def test_token_that_fits_no_header_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgumentError, match="one word of 1 to"):
        CoordinatorClient("127.0.0.1:1", token, insecure=True)


# ------------------------------------------------------------------------------------------------------ absent peers


@in_loop
async def test_nobody_there_names_the_address() -> None:
    async with serving() as (served, _):
        address = served.address
    async with AsyncCoordinatorClient(address, TOKEN, insecure=True) as client:
        with pytest.raises(CoordinatorUnavailableError, match=rf"the coordinator at {address} cannot be reached"):
            await client.status()
    with (
        CoordinatorClient(address, TOKEN, insecure=True) as blocking,
        pytest.raises(CoordinatorUnavailableError, match=address),
    ):
        blocking.get_blob("x")


@on_server(deadline_s=0.25)
async def test_deadline_names_address_call_and_seconds(served: RunningServer, client: AsyncCoordinatorClient) -> None:
    expected = (
        f"the coordinator at {served.address} did not answer WatchRun within 0.5 s. Check its load and the network"
    )
    with pytest.raises(DeadlineError) as caught:
        await client.watch_run(pb.WatchRunRequest(hold_s=0.25))
    assert caught.value.message == expected
    with (
        CoordinatorClient(served.address, TOKEN, deadline_s=0.25, insecure=True) as blocking,
        pytest.raises(DeadlineError),
    ):
        await asyncio.to_thread(blocking.watch_run, pb.WatchRunRequest(hold_s=0.25))


@on_server()
async def test_a_wait_for_a_silent_coordinator_ends(
    served: RunningServer, servicer: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that a transfer may take is not time to wait for its begin; and what ends the run ends its calls."""
    monkeypatch.setattr(calls, "LATE_S", 0.5)
    with CoordinatorClient(served.address, TOKEN, insecure=True) as client:
        with pytest.raises(DeadlineError, match="did not answer FetchState within 1 s"):
            await asyncio.to_thread(client.fetch_state, pb.FetchStateRequest(deadline_s=1))
        watching = asyncio.ensure_future(asyncio.to_thread(client.watch_run, pb.WatchRunRequest(hold_s=60)))
        await asyncio.to_thread(servicer.held.wait, 10)
        client.fail(PenstockError("the embedded coordinator has ended"))
        for call in (watching, asyncio.to_thread(client.status)):
            with pytest.raises(PenstockError, match="has ended"):
                await call


@on_server()
async def test_own_close_differs_from_lost_peer(
    served: RunningServer, servicer: Scripted, client: AsyncCoordinatorClient
) -> None:
    waiting = asyncio.ensure_future(client.watch_run(pb.WatchRunRequest(hold_s=60)))
    await asyncio.to_thread(servicer.held.wait, 10)
    await client.close()
    with pytest.raises(LaneClosedError, match=r"was closed on this side during WatchRun"):
        await waiting
    with pytest.raises(LaneClosedError, match="was closed on this side before Status"):
        await client.status()

    servicer.held.clear()
    blocking = CoordinatorClient(served.address, TOKEN, insecure=True)
    pending = asyncio.create_task(asyncio.to_thread(blocking.watch_run, pb.WatchRunRequest(hold_s=60)))
    await asyncio.to_thread(servicer.held.wait, 10)
    blocking.close()
    with pytest.raises(LaneClosedError, match="was closed on this side during WatchRun"):
        await pending
    with pytest.raises(LaneClosedError, match="was closed on this side before Status"):
        await asyncio.to_thread(blocking.status)


def test_end_with_lost_peers_prints_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """As when a machine is shut down: the event loop ends while handlers of calls whose peers are gone do."""

    async def run(turns: int) -> None:
        async with serving() as (served, servicer):
            client = AsyncCoordinatorClient(served.address, TOKEN, insecure=True)
            servicer.turns_to_end = turns
            call = asyncio.ensure_future(client.watch_run(pb.WatchRunRequest(hold_s=30)))
            await asyncio.to_thread(servicer.held.wait, 20)
            await client.close()
            with pytest.raises(LaneClosedError):
                await call
            await servicer.ending.wait()

    for turns in range(40):
        asyncio.run(run(turns))
    assert "Traceback" not in capfd.readouterr().err


@in_loop
async def test_call_unknown_to_old_coordinator_is_named() -> None:
    served = await server_aio("127.0.0.1:0", TOKEN, lambda server: None)
    async with AsyncCoordinatorClient(served.address, TOKEN, insecure=True) as client:
        with pytest.raises(VersionSkewError, match=f"does not know the call Status, which Penstock {VERSION} makes"):
            await client.status()
    await served.stop(0)


# ------------------------------------------------------------------------------------------------------------- values


@on_server()
async def test_large_loader_arguments_become_a_blob(served: RunningServer) -> None:
    with CoordinatorClient(served.address, TOKEN, insecure=True) as blocking:
        request = pb.OpenRunRequest()
        request.loader.arguments = b"a" * 5_000_000
        assert (await asyncio.to_thread(blocking.open_run, request)).run == blob_name(request.loader.arguments)
        assert len(request.loader.arguments) == 5_000_000  # the caller's message is his own
        request.loader.arguments = b"a" * 100
        assert (await asyncio.to_thread(blocking.open_run, request)).run == "inline"


@on_server()
async def test_message_above_the_limit_is_an_error(served: RunningServer, client: AsyncCoordinatorClient) -> None:
    with pytest.raises(InvalidArgumentError, match="a request RegisterWorker must have at most"):
        await client.register(pb.RegisterWorkerRequest(worker="w" * 5_000_000))


async def nothing() -> AsyncIterator[pb.BlobPart]:
    await asyncio.Event().wait()
    yield pb.BlobPart()


def overtaken(call: Any) -> Any:
    """A call whose status a write that fails puts another in place of: gRPC's order of events, forced, for it happens
    in one of some fifty refusals."""
    ended: list[Any] = []

    def write_fails(over: Any) -> None:
        if not ended:
            ended.append(over)
            asyncio.get_running_loop().call_soon(call._cython_call.set_internal_error, "SendMessageOperation")

    call.add_done_callback(write_fails)
    return call


@on_server(token="other")
async def test_refusal_is_received_despite_failed_write(
    client: AsyncCoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, calls = client._stub.PutBlob, list[Any]()

    def made(_: AsyncIterator[pb.BlobPart], **named: Any) -> Any:
        calls.append(overtaken(put(nothing(), **named)))
        return calls[-1]

    monkeypatch.setattr(client._stub, "PutBlob", made)
    with pytest.raises(AuthenticationError, match=r"the token is wrong"):
        await client.put_blob(b"x")
    assert await calls[-1].code() is grpc.StatusCode.INTERNAL  # what it says itself


@on_server()
async def test_received_bytes_match_the_declaration(client: AsyncCoordinatorClient) -> None:
    with pytest.raises(ProtocolError, match="GetSnapshots: a value must have the declared 3 bytes, got 2"):
        await client.get_snapshots(pb.GetSnapshotsRequest())
    with pytest.raises(StateCorruptError, match="the stored value other arrived damaged: its digest differs"):
        await client.get_blob("other")


@on_server()
async def test_what_is_no_reply_is_an_error(served: RunningServer, client: AsyncCoordinatorClient) -> None:
    """gRPC gives None for a reply that it cannot parse, which ended the worker."""
    state, heartbeat = pb.FetchStateRequest(run="job/0"), pb.HeartbeatRequest()
    with CoordinatorClient(served.address, TOKEN, insecure=True) as blocking:
        for call in (
            client.heartbeat(heartbeat),
            client.fetch_state(state),
            asyncio.to_thread(blocking.heartbeat, heartbeat),
            asyncio.to_thread(blocking.fetch_state, state),
        ):
            with pytest.raises(ProtocolError, match=r"a reply of .* cannot be decoded"):
                await call


# ---------------------------------------------------------------------------------------------------------- addresses


def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    async def body(served: RunningServer, _: Scripted, client: AsyncCoordinatorClient) -> None:
        assert served.address == listen
        assert (await client.open_run(pb.OpenRunRequest())).run == "inline"
        with pytest.raises(PortTakenError, match="is in use by another process"):
            await server_aio(served.address, TOKEN, lambda server: None)

    tmp_path.chmod(0o700)
    listen = f"unix:{tmp_path}/coordinator"
    trial(body, listen=listen)


@in_loop
async def test_calls_of_a_whole_fleet_at_once_are_all_answered() -> None:
    """All are sent before the server's event loop, which is this one, takes the first of them. By default grpcio 1.85
    cancels a third of them."""
    async with serving() as (served, _), connect_aio(served.address) as channel:
        call: Any = channel.unary_unary("/penstock.Nobody/Nothing")  # refused in one turn of the loop
        answers: list[Any] = await asyncio.gather(*(call(b"", timeout=60) for _ in range(4000)), return_exceptions=True)
    assert Counter(answer.code() for answer in answers) == {grpc.StatusCode.UNIMPLEMENTED: 4000}


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("0.0.0.0:0", "can be reached from other machines"),
        ("host:99999", 'must be "host:port"'),
        ("unix:x", 'must be "host:port"'),
    ],
)
def test_addresses_that_are_refused(listen: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        asyncio.run(server_aio(listen, TOKEN, lambda server: None))


def test_foreign_address_is_not_port_taken() -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot listen on 192\.0\.2\.1:0: .*assign requested address"):
        asyncio.run(server_aio("192.0.2.1:0", TOKEN, lambda server: None, insecure=True))


def test_moved_coordinator_is_found_by_name(tmp_path: Path) -> None:
    """gRPC's own pause between two looks at a name is 30 s, and until it gives a silent peer up a minute: both are
    longer than all leases."""
    names = tmp_path / "hosts"
    names.touch()
    program = Path(__file__).parents[1] / "support" / "moving_coordinator.py"
    command = ["unshare", "--mount", sys.executable, str(program), str(names), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if "unshare" in done.stderr or "mount" in done.stderr.splitlines()[-1:]:
        pytest.skip(f"a table of names of its own needs unshare(1) and mount(2): {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) < 20
