"""gRPC channels and servers. Only this module opens them.

Keepalive (a server disconnects a client that pings too often), message limits, authentication and protocol number must
match between the two ends, and a mismatch gives no clear error. So the settings of both are together here."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2  # type: ignore[import-untyped]

from penstock.proto.errors import InvalidArgumentError, PenstockError, PortTakenError
from penstock.proto.rpc.addresses import grpc_target, refuse_strangers, refuse_unsafe, socket_path
from penstock.proto.rpc.auth_interceptor import AuthInterceptor
from penstock.proto.rpc.credentials.tokens import FromFile, Tokens
from penstock.proto.rpc.tls import Renewing, Tls
from penstock.proto.rpc.wire_errors import METADATA_MAX
from penstock.runtime.process.open_files import connections_max
from penstock.runtime.telemetry.counters import CallCounters

CHUNK = 512 * 1024
"""Bytes of a part of a large value, far below the limit of messages."""

REQUEST_MAX = 4 * 1024 * 1024
"""Largest request in bytes that the coordinator accepts: gRPC's default."""
REPLY_MAX = 32 * 1024 * 1024
"""Largest reply in bytes. That to a heartbeat has an assignment for each slot."""

_OF_CALL = "_schedule_rpc_coro"
"""Name of the coroutine in which gRPC for asyncio answers a call."""
CALLS_END_S = 1.0
"""Longest time in seconds in which the handlers of cancelled calls end."""

PENDING_MAX = 16_384
"""Largest number of waiting calls (20 KiB each); gRPC cancels more. 10,000 workers may register at once."""

RENEW_S = 2.0
"""Seconds between checks of the token file, for which a removed token stays valid."""

# A ping is sent 2 s after the coordinator's last byte, and the coordinator counts as gone if it does not answer in 2 s.
# So half-open TCP and SIGSTOP are detected within 4 s, and a coordinator that was started elsewhere is found while
# leases last. gRPC's own threads answer pings, also while Penstock's threads are busy. The last of the three options
# ends the connection; otherwise gRPC waits a minute for the answer. The coordinator detects silent peers by their
# leases, so its pings only free the connections of lost peers. They are rare, because a busy peer that loses its
# connection would have even more work. Over a Unix socket a client sends none: the kernel reports the end of a process
# at once, and each ping wakes the threads of gRPC in both processes.
_FIND_GONE = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
)
_FREE_GONE = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 30_000))
_COMMON = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC decompresses a message before it checks its size: 300 KiB can become 300 MiB, in a request and in a reply.
    # Neither end compresses, so decompression is off, and a compressed message is invalid.
    ("grpc.per_message_decompression", 0),
)

_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *_COMMON,
    ("grpc.max_send_message_length", REQUEST_MAX),
    ("grpc.max_receive_message_length", REPLY_MAX),
    ("grpc.max_metadata_size", METADATA_MAX),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_MAX),
    # A coordinator is inside the cluster, so a proxy for the Internet (http_proxy) is never used.
    ("grpc.enable_http_proxy", 0),
    # A restarted coordinator is found again within a second: callers retry, gRPC's own backoff goes up to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is also the timeout of a connection attempt. A coordinator to which thousands of daemons reconnect at once
    # takes seconds to accept, and a restarted attempt would add load. A longer timeout would delay the next look-up of
    # the name of a machine that is gone.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # gRPC resolves the coordinator's name again after a failed connection, at most at this interval. The default of 30
    # s is longer than every lease, so a coordinator at a new address would be found too late.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Each channel has a connection of its own, so that a closed client does not affect another.
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    *_FREE_GONE,
    # Without this the server disconnects clients that ping more often than every 5 minutes.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_send_message_length", REPLY_MAX),
    ("grpc.max_receive_message_length", REQUEST_MAX),
    # The soft and hard limits are equal: between them gRPC refuses at random. Callers send a token of at most 4 KiB and
    # two short values.
    ("grpc.max_metadata_size", METADATA_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_MAX),
    # Deadline of TLS and HTTP/2 on a new connection. With the default of two minutes silent peers would accumulate.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A connection without a call ends, so that silent peers cannot keep others out. Daemons and training jobs always
    # have a call under way; other callers reconnect by themselves.
    ("grpc.max_connection_idle_ms", 10_000),
    # By default gRPC cancels calls, without a reason, when more than 1,000 wait: at random up to 3,000, and then all.
    # With 1.74 so many seldom wait, because its poller reads no more; with 1.85 a state query to 1,000 workers lost
    # answers.
    ("grpc.server.max_pending_requests", PENDING_MAX),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
    # With the default, a second coordinator on the same port would silently take half of the connections.
    ("grpc.so_reuseport", 0),
)


# ---------------------------------------------------------------------------------------------------------- client


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    tls.for_client()
    return grpc.ssl_channel_credentials(tls.ca, tls.key or None, tls.cert or None)


def _options(address: str, tls: Tls | None) -> tuple[tuple[str, int | str], ...]:
    options = _CHANNEL_OPTIONS if socket_path(address) is not None else (*_CHANNEL_OPTIONS, *_FIND_GONE)
    if tls is None or not tls.name:
        return options
    return (*options, ("grpc.ssl_target_name_override", tls.expected("coordinator")))


def connect(address: str, tls: Tls | None = None) -> grpc.Channel:
    """Return a blocking channel, which connects at the first call. Raises InvalidArgumentError, UnsafeBindError if
    another user controls the Unix socket, TlsError if `tls` has no CA."""
    refuse_strangers(address)
    if tls is None:
        return grpc.insecure_channel(grpc_target(address), options=_options(address, tls))
    return grpc.secure_channel(grpc_target(address), _credentials(tls), options=_options(address, tls))


def connect_aio(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    refuse_strangers(address)
    if tls is None:
        return grpc.aio.insecure_channel(grpc_target(address), options=_options(address, tls))
    return grpc.aio.secure_channel(grpc_target(address), _credentials(tls), options=_options(address, tls))


# ---------------------------------------------------------------------------------------------------------- server


class Health:
    """Answers health checks. It needs no token, so a check's body is not read: gRPC would hold one of any size."""

    def __init__(self) -> None:
        self.serving = True

    async def check(self, *_: object) -> AsyncIterator[Any]:
        yield health_pb2.HealthCheckResponse(status="SERVING" if self.serving else "NOT_SERVING")

    @property
    def handlers(self) -> dict[str, Any]:
        """A stream is answered before its request is read, and is one message to callers of a unary call."""
        serialise = health_pb2.HealthCheckResponse.SerializeToString
        return {"Check": grpc.stream_stream_rpc_method_handler(self.check, response_serializer=serialise)}


@dataclass
class RunningServer:
    server: grpc.aio.Server
    address: str
    health: Health
    tasks: Sequence[asyncio.Task[None]] = ()
    files: Renewing | None = None

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, and wait up to `grace_s` seconds for calls under way."""
        for task in self.tasks:
            task.cancel()
        self.health.serving = False
        await self.server.stop(grace_s)
        # gRPC does not wait for the tasks of calls whose peers are gone, and logs a traceback for each that the end of
        # the event loop cancels.
        calls = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == _OF_CALL]
        if calls:
            await asyncio.wait(calls, timeout=CALLS_END_S)


async def server_aio(
    listen: str,
    tokens: str,
    register: Callable[[Any], None],
    *,
    tls: Tls | None = None,
    insecure: bool = False,
    calls: CallCounters | None = None,
    inner: str | None = None,
) -> RunningServer:
    """Start a server on the running event loop.

    Args:
        listen: address; port 0 takes a free one.
        tokens: tokens of callers, with their roles: see penstock.proto.rpc.credentials.tokens.
        register: called with the AuthInterceptor, to which it adds the services.
        tls: certificate of the server; if it holds a CA, callers must show a certificate too.
        insecure: allow an address that other machines can reach without TLS.
        inner: second address, "unix:/path" in a private folder, to measure how long this process's own calls wait.

    Raises InvalidArgumentError, AuthenticationError if there is no token, UnsafeBindError if the address needs TLS or
    another user controls it, PortTakenError, TlsError if the certificate cannot be used."""
    refuse_strangers(listen)
    refuse_unsafe(listen, encrypted=tls is not None, insecure=insecure)
    held = Tokens(tokens)
    interceptor = AuthInterceptor(held, calls if calls is not None else CallCounters(), tls)
    if _answers(listen):
        raise PortTakenError(f"{listen} is in use by another process: choose another path")
    limit = ("grpc.max_allowed_incoming_connections", connections_max())
    server = grpc.aio.server(handlers=(interceptor,), options=(*_SERVER_OPTIONS, limit))
    register(interceptor)
    status = Health()
    interceptor.add_registered_method_handlers(health.SERVICE_NAME, status.handlers)
    files: Renewing | None = None
    binding = listen
    try:
        if tls is None:
            port = server.add_insecure_port(grpc_target(listen))
        else:
            tls.for_server().check_own("coordinator")
            files = Renewing(tls, "coordinator")
            port = server.add_secure_port(grpc_target(listen), _server_credentials(files))
        if inner is not None:
            refuse_strangers(inner)
            binding = inner
            server.add_insecure_port(grpc_target(inner))
    except RuntimeError as error:
        raise _why_not_bound(binding) from error
    await server.start()
    tasks = [asyncio.create_task(_renew(held))] if isinstance(tokens, FromFile) else []
    if socket_path(listen) is not None:  # only this user can connect to it
        return RunningServer(server, listen, status, tasks, files)
    return RunningServer(server, f"{listen.rpartition(':')[0]}:{port}", status, tasks, files)


async def _renew(tokens: Tokens) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        tokens.renew()


def _server_credentials(files: Renewing) -> grpc.ServerCredentials:
    """gRPC checks the certificate files for changes before each handshake."""

    def made() -> Any:
        tls = files.tls
        return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], tls.ca or None)

    return grpc.dynamic_ssl_server_credentials(
        made(),
        lambda: made() if files.renew() else None,  # type: ignore[arg-type,return-value]  # None: unchanged
        require_client_authentication=bool(files.tls.ca),
    )


def _answers(listen: str) -> bool:
    """True if a process already listens on a Unix socket, which gRPC would silently replace."""
    path = socket_path(listen)
    if path is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _why_not_bound(listen: str) -> PenstockError:
    """Error for an address at which gRPC could not listen. gRPC gives no reason, so try once more."""
    if (path := socket_path(listen)) is not None:
        return InvalidArgumentError(f"cannot listen on {path}: it must have at most 107 bytes, and its folder exist")
    host, _, port = listen.rpartition(":")
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return InvalidArgumentError(
                f"cannot listen on {listen}: {error}. Name a port of this machine for this user"
            )
    return PortTakenError(f"{listen} is in use by another process: choose another port, or 0 for any free one")
