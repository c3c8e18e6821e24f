"""The only place that opens a gRPC channel or server, and the only one where errors change between their two forms.

Why one place. Four things must agree between the two ends of every connection, and each fails quietly when it does
not: keepalive (a client that pings more often than its server allows is thrown out), message caps, who may call
(token) and what is spoken (protocol number). They stand here side by side, client and server.

Who may call. Every call carries "authorization: Bearer TOKEN" and "penstock-protocol: N" as metadata. The clients of
penstock.proto.calls add it to each call (see `metadata`); interceptors would do on sync channels, but on asyncio ones
each of them costs a task a call and hides cancellation. The server checks both before any handler of ours runs, the
token in constant time. Health checks need no token: probes have none, and learn nothing but "serving".

Errors. A handler raises whatever it likes; `_Guard` turns a PenstockError into its status of the catalogue plus an
ErrorDetail in trailing metadata, and anything else into UNKNOWN with the traceback, for a bug must be readable from
where it hurts. `translating` is the way back: no grpc.RpcError leaves it, and every error names the address.

Addresses are "host:port" or "unix-abstract:name". Abstract names leave no file behind, but belong to a network
namespace: see `host_id`. TLS will enter at `_channel_credentials` and `_server_credentials` and nowhere else; until
then a server binds to loopback unless it is told `insecure`.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import os
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib import metadata as _package
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from penstock.proto.errors import (
    CATALOGUE,
    AuthenticationError,
    CoordinatorUnavailableError,
    DeadlineError,
    InvalidArgumentError,
    LaneClosedError,
    PenstockError,
    PortTakenError,
    VersionSkewError,
    error_named,
    format_remote,
)
from penstock.proto.v1 import records_pb2

__all__ = [
    "CHUNK",
    "PROTOCOL",
    "VERSION",
    "Served",
    "connect",
    "connect_aio",
    "detail_of",
    "error_of",
    "host_id",
    "metadata",
    "read_token",
    "server_aio",
    "translating",
]

PROTOCOL = 1
"""Number of the control protocol. Peers of another number are refused at their first call."""

try:
    VERSION = _package.version("penstock")
except _package.PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0.1.0"

CHUNK = 512 * 1024
"""Bytes of a data part. Whatever can be large is cut into these, so that no message comes near its cap."""

REQUEST_MAX = 4 * 1024 * 1024
"""Largest request that the coordinator takes (gRPC's own default, made explicit)."""
REPLY_MAX = 32 * 1024 * 1024
"""Largest reply that a peer of the coordinator takes: a heartbeat's reply holds a loader's spec per slot."""

METADATA_MAX = 64 * 1024
"""Errors travel in trailing metadata, whose default cap of 8 KiB is less than a traceback. Both ends set it."""
MESSAGE_KEEP = 8 * 1024
TRACEBACK_KEEP = 24 * 1024
"""Characters kept of an error's message and remote traceback; with base64 on top they stay below METADATA_MAX."""

ERROR_KEY = "penstock-error-bin"
PROTOCOL_KEY = "penstock-protocol"
VERSION_KEY = "penstock-version"

_HEALTH = f"/{health.SERVICE_NAME}/"
SERVICE = "penstock.proto.v1.Coordinator"

# A peer that does not answer a ping for 5 s, 10 s after its last byte, is gone: half-open TCP and SIGSTOP show within
# 15 s. Leases are shorter and find the same by silence; this one is for the side that holds no lease.
_KEEPALIVE = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000))
_COMMON = (*_KEEPALIVE, ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0))

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    ("grpc.max_send_message_length", REQUEST_MAX),
    ("grpc.max_receive_message_length", REPLY_MAX),
    ("grpc.max_metadata_size", METADATA_MAX),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_MAX),
    # A coordinator is inside the cluster; a proxy for the outside world (http_proxy) is never the way to it.
    ("grpc.enable_http_proxy", 0),
    # A restarted coordinator is found again within a second: callers retry, gRPC's own backoff goes up to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This one is also how long a connection may take to be made. A coordinator that thousands of daemons come back to
    # at once takes seconds; to give up and begin anew would only make it more.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two channels of one process are two connections; sharing one would let a closed client disturb another.
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # The server's side of the bargain: without it a client that pings more often than every 5 minutes is thrown out.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_send_message_length", REPLY_MAX),
    ("grpc.max_receive_message_length", REQUEST_MAX),
    ("grpc.max_metadata_size", METADATA_MAX),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_MAX),
    # With the default, a second coordinator on the same port would silently take half of the connections.
    ("grpc.so_reuseport", 0),
)


# ---------------------------------------------------------------------------------------------------------- client


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What every call carries. InvalidArgumentError for a token that cannot stand in a header."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgumentError("a token is one word of printable ASCII characters")
    return (("authorization", f"Bearer {token}"), (PROTOCOL_KEY, str(PROTOCOL)), (VERSION_KEY, VERSION))


def _channel_credentials() -> grpc.ChannelCredentials | None:
    return None  # TLS enters here


def _server_credentials() -> grpc.ServerCredentials | None:
    return None  # and here


def _check_address(address: str) -> None:
    scheme, _, rest = address.partition(":")
    if scheme == "unix-abstract" and rest:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgumentError(f'the address {address!r} is neither "host:port" nor "unix-abstract:name"')


def connect(address: str) -> grpc.Channel:
    """A blocking channel to the coordinator. Opens no connection yet; use it through calls.CoordinatorClient."""
    _check_address(address)
    credentials = _channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)


def connect_aio(address: str) -> grpc.aio.Channel:
    """The same for the running event loop; use it through calls.AsyncCoordinatorClient."""
    _check_address(address)
    credentials = _channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)


# ---------------------------------------------------------------------------------------------------------- errors


def _middle_out(text: str, keep: int) -> str:
    """`text` in at most about `keep` bytes: the ends stay, for a traceback says at its ends where and why."""
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= keep:
        return raw.decode()
    half = keep // 2
    head, tail = raw[:half].decode(errors="ignore"), raw[-half:].decode(errors="ignore")
    return f"{head}\n... {len(raw) - 2 * half} bytes left out ...\n{tail}"


def detail_of(error: BaseException) -> records_pb2.ErrorDetail:
    """The error as a message, for fields of type ErrorDetail and for trailing metadata.

    A PenstockError keeps its name and the remote traceback that it brought along; anything else is a bug or a user's
    exception that nobody named, so it becomes a PenstockError that carries this process's traceback.
    """
    if isinstance(error, PenstockError):
        name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in CATALOGUE), "PenstockError")
        message, remote = error.message, error.remote_traceback
    else:
        name, message, remote = "PenstockError", _one_line(error), format_remote(error)
    return records_pb2.ErrorDetail(
        name=name,
        message=_middle_out(message, MESSAGE_KEEP),
        remote_traceback=_middle_out(remote, TRACEBACK_KEEP),
    )


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def error_of(detail: records_pb2.ErrorDetail) -> PenstockError:
    """The way back from `detail_of`."""
    return error_named(detail.name, detail.message, detail.remote_traceback)


def _error_of_rpc(error: grpc.RpcError, address: str, method: str, deadline_s: float, closed: bool) -> PenstockError:
    code, details = grpc.StatusCode.UNKNOWN, str(error)
    trailing: tuple[Any, ...] = ()
    if isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        code, details, trailing = error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
    for key, value in trailing:
        if key == ERROR_KEY and isinstance(value, bytes):
            try:
                return error_of(records_pb2.ErrorDetail.FromString(value))
            except DecodeError:
                break  # a peer's nonsense: the status still says something
    where = f"the coordinator at {address}"
    if code is grpc.StatusCode.CANCELLED and closed:
        return LaneClosedError(f"the connection to {where} was closed on this side during {method}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return CoordinatorUnavailableError(f"{where} cannot be reached ({method}): {details}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{where} did not answer {method} within {deadline_s:g} s")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return VersionSkewError(
            f"{where} does not know the call {method}, which Penstock {VERSION} makes: install one release on both ends"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(f"{where} refused {method}: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidArgumentError(f"{method} to {where} is too large: {details}")
    return PenstockError(f"{method} at {where} failed with {code.name}: {details}")


@contextmanager
def translating(address: str, method: str, deadline_s: float, closed: Callable[[], bool]) -> Iterator[None]:
    """Around a call, sync or awaited: whatever gRPC raises comes out as an error of ours, chained to its cause.

    Args:
        address: of the coordinator, for messages.
        method: the call's name, for messages.
        deadline_s: the deadline that was given to the call, seconds.
        closed: true once this side has closed the channel; tells "we closed it" from "the peer vanished".
    """
    try:
        yield
    except grpc.RpcError as error:
        raise _error_of_rpc(error, address, method, deadline_s, closed()) from error
    except (grpc.aio.UsageError, ValueError) as error:
        if isinstance(error, PenstockError) or not closed():
            raise
        raise LaneClosedError(f"the connection to the coordinator at {address} is closed: no {method}") from error
    except asyncio.CancelledError as error:
        # A closed aio channel cancels its pending calls, which looks as if our task had been cancelled.
        task = asyncio.current_task()
        if not closed() or task is None or task.cancelling():
            raise
        raise LaneClosedError(
            f"the connection to the coordinator at {address} was closed on this side during {method}"
        ) from error


# ---------------------------------------------------------------------------------------------------------- server


@dataclass
class Served:
    """A running server."""

    server: grpc.aio.Server
    address: str
    """Where it listens, with the port that it really has; give this one to `connect`."""
    health: health.aio.HealthServicer

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING first, then no new calls, then up to `grace_s` seconds for those under way."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def is_local(address: str) -> bool:
    """True for an address that only this machine can reach."""
    if address.startswith("unix-abstract:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def server_aio(
    listen: str, token: str, register: Callable[[grpc.aio.Server], None], *, insecure: bool = False
) -> Served:
    """Starts a server on the running event loop.

    Args:
        listen: address; port 0 takes a free one.
        token: what callers must show.
        register: adds the services.
        insecure: allows an address that other machines can reach, although there is no TLS yet.

    Raises InvalidArgumentError for an address that cannot be listened on, PortTakenError for one in use.
    """
    _check_address(listen)
    metadata(token)  # a token that callers could not send is refused here, not at the first call
    if not insecure and not is_local(listen) and _server_credentials() is None:
        raise InvalidArgumentError(
            f"{listen} can be reached from other machines, and without TLS token and data would cross the network in "
            "clear text: listen on 127.0.0.1, wait for TLS, or say --insecure on a network that you trust"
        )
    server = grpc.aio.server(interceptors=(_Guard(token),), options=_SERVER_OPTIONS)
    register(server)
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    await status.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    try:
        credentials = _server_credentials()
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise _why_not_bound(listen) from error
    await server.start()
    if listen.startswith("unix-abstract:"):
        return Served(server, listen, status)
    return Served(server, f"{listen.rpartition(':')[0]}:{port}", status)


def _why_not_bound(listen: str) -> PenstockError:
    """gRPC says only "failed to bind": ask the kernel once more for the reason."""
    if listen.startswith("unix-abstract:"):
        return PortTakenError(f"{listen} is in use by another process")
    host, _, port = listen.rpartition(":")
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return InvalidArgumentError(f"cannot listen on {listen}: {error}")
    return PortTakenError(f"{listen} is in use by another process: choose another port, or 0 for any free one")


class _Guard(grpc.aio.ServerInterceptor):
    """Token, protocol number and error translation, around every method but health."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def _refusal(self, sent: Mapping[str, Any]) -> PenstockError | None:
        shown = sent.get("authorization")
        if not isinstance(shown, str) or not hmac.compare_digest(shown.encode(), self._expected):
            what = "no token was sent" if shown is None else "the token is wrong"
            return AuthenticationError(f"{what}: both ends need the same PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE")
        protocol = sent.get(PROTOCOL_KEY)
        if protocol != str(PROTOCOL):
            theirs = f"protocol {protocol}" if protocol is not None else "no protocol number"
            return VersionSkewError(
                f"the caller (Penstock {sent.get(VERSION_KEY, 'of unknown version')}) speaks {theirs}, the coordinator "
                f"(Penstock {VERSION}) protocol {PROTOCOL}: install the same release on both ends"
            )
        return None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        if method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        refusal = self._refusal(dict(handler_call_details.invocation_metadata))
        if refusal is not None:
            # Stream to stream, whatever the method is: this kind reads nothing before it answers.
            return grpc.stream_stream_rpc_method_handler(_refusing(refusal))
        handler = await continuation(handler_call_details)
        return handler if handler is None else _translated(handler)


def _refusing(error: PenstockError) -> Callable[..., Awaitable[None]]:
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await _abort(context, error)

    return refuse


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    detail = detail_of(error)
    status = grpc.StatusCode[CATALOGUE[detail.name].status]
    first_line = detail.message.partition("\n")[0][:1000]  # the whole message is in the detail
    await context.abort(status, first_line, ((ERROR_KEY, detail.SerializeToString()),))


def _translated(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """`handler` with its errors put into status and trailing metadata."""
    codecs = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.response_streaming:
        behave_stream = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async with aclosing(behave_stream(request, context)) as parts:
                    async for part in parts:
                        yield part
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _abort(context, error)

        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(stream, **codecs)

    behave = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behave(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error)

    make_unary = (
        grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make_unary(unary, **codecs)


# -------------------------------------------------------------------------------------------------------- identity


def read_token(token: str | None = None, file: str | os.PathLike[str] | None = None) -> str:
    """The token: the argument, else the file, else PENSTOCK_TOKEN, else the file that PENSTOCK_TOKEN_FILE names.

    Raises AuthenticationError, naming the file, when it cannot be read or is empty: going on without a token would
    only move the error to a place that cannot explain it.
    """
    if token:
        return token
    if file is None:
        from_environment = os.environ.get("PENSTOCK_TOKEN", "")
        if from_environment:
            return from_environment
        file = os.environ.get("PENSTOCK_TOKEN_FILE") or None
    if file is None:
        raise AuthenticationError("no token: set PENSTOCK_TOKEN, or PENSTOCK_TOKEN_FILE to a file that holds it")
    try:
        read = Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise AuthenticationError(f"the token file {os.fspath(file)} cannot be read: {error}") from error
    if not read:
        raise AuthenticationError(f"the token file {os.fspath(file)} is empty")
    return read


def host_id() -> str:
    """Equal in two processes exactly when an abstract Unix socket of one can be reached from the other.

    That is the same boot of the same kernel and the same network namespace; hostnames say neither (two containers of
    one pod have one network and may have two names, two containers of one machine the other way round).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return f"{socket.gethostname()}:unknown"
    return f"{boot}:{network}"
