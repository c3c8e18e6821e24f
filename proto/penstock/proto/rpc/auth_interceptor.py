"""Auth interceptor before the coordinator's handlers: it checks each call's token, role and protocol number.

The metadata of a call have the keys "authorization" ("Bearer TOKEN") and "penstock-protocol" (a number). Both are
checked before the body is read, so a call without a token costs only its headers. Calls that only read
(roles.READ_ONLY) need no protocol number, and health checks no token, because Kubernetes' probes have none.

The clients of calls.py add the metadata themselves: on asyncio a client interceptor would cost a task for each call,
and hide cancellation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health  # type: ignore[import-untyped]

from penstock.proto.errors import (
    AuthenticationError,
    NotPermittedError,
    PenstockError,
    VersionSkewError,
)
from penstock.proto.rpc.bounds.message_bounds import LargeRequests, parsed_parts, parsed_request
from penstock.proto.rpc.credentials.roles import METHODS, READ_ONLY
from penstock.proto.rpc.credentials.tokens import Caller, Tokens
from penstock.proto.rpc.tls import Tls
from penstock.proto.rpc.version import PROTOCOL, PROTOCOL_KEY, VERSION, VERSION_KEY
from penstock.proto.rpc.wire_errors import abort, status_of
from penstock.runtime.telemetry.counters import CallCounters

SERVICE = "penstock.proto.v1.Coordinator"
_OURS = f"/{SERVICE}/"
_HEALTH = f"/{health.SERVICE_NAME}/Check"
"""Method of the health check, which needs no token. Watch is refused: any caller could leave that stream open."""
_Context = grpc.aio.ServicerContext[Any, Any]
_SHOWN_NAMES = "peer_dns"
"""Property of a call with the DNS names of its certificate, and not its other ones, such as a URI or an e-mail."""
_PROOF = "Penstock-Proof"
"""Scheme of callers up to 0.1, which showed no token but a proof of it."""
_SAME = "install the same release on both ends"
MAX_SHOWN = 200


class AuthInterceptor(grpc.GenericRpcHandler):
    """The server's only handler: it checks the token, role and protocol number of each call, and translates errors.

    Services are added to it as to a server. gRPC's own interceptors would take a task and several awaits for each call:
    40 us, a third of gRPC's own time. `tls` names what callers' certificates must have."""

    def __init__(self, tokens: Tokens, calls: CallCounters, tls: Tls | None = None) -> None:
        self._tokens = tokens
        self._calls = calls
        self._tls = tls if tls is not None and tls.ca and tls.name else None
        self._large = LargeRequests()
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def _caller(self, sent: Mapping[str, Any]) -> Caller | None:
        shown = sent.get("authorization")
        return self._tokens.caller(shown) if isinstance(shown, str) else None

    def _refusal(self, method: str, sent: Mapping[str, Any]) -> PenstockError | None:
        caller = self._caller(sent)
        if caller is None:
            if str(sent.get("authorization")).startswith(_PROOF):
                return VersionSkewError(f"the caller proves its token, as older releases do, and must send it: {_SAME}")
            said = "the token is wrong" if "authorization" in sent else "no token was sent"
            return AuthenticationError(f"{said}: set the same PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE at both ends")
        theirs, ours = _short(sent.get(VERSION_KEY, "of unknown version")), f"the coordinator (Penstock {VERSION})"
        if method not in METHODS or _OURS + method not in self._handlers:
            call = f"the call {_short(method)}, which Penstock {theirs} makes"
            return VersionSkewError(f"{ours} does not know {call}: {_SAME}")
        protocol = sent.get(PROTOCOL_KEY)
        if protocol != str(PROTOCOL) and method not in READ_ONLY:
            used = f"protocol {_short(protocol)}" if protocol is not None else "no protocol number"
            return VersionSkewError(f"the caller (Penstock {theirs}) uses {used}, {ours} uses {PROTOCOL}: {_SAME}")
        if not caller.roles & METHODS[method]:
            have, need = " or ".join(sorted(caller.roles)), " or ".join(sorted(METHODS[method]))
            return NotPermittedError(f"{method} needs a token of the role {need} (docs/security.md), got one of {have}")
        return None

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """A generated `add_..._to_server` passes the same methods again to add_registered_method_handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            on_call = partial(self._accept, name)
            self._handlers[f"/{service}/{name}"] = _translated(name, handler, self._calls, on_call, self._large)

    def _accept(self, name: str, context: _Context) -> None:
        """Note the caller for `credential`. Raises NotPermittedError for another role's certificate: gRPC does not
        report it earlier."""
        caller = self._caller(dict(context.invocation_metadata() or ()))
        _answered.set(caller)
        if caller is not None and self._tls is not None and name in METHODS:
            self._check_certificate(self._tls, name, caller, context)

    def _check_certificate(self, tls: Tls, name: str, caller: Caller, context: _Context) -> None:
        shown = [one.decode(errors="replace") for one in context.auth_context().get(_SHOWN_NAMES, ())]
        roles = caller.roles & METHODS[name]
        if not tls.roles_named(shown, roles):
            wanted = " or ".join(sorted(map(tls.expected, roles)))
            got = _short(", ".join(shown))
            raise NotPermittedError(f"{name} needs a certificate for {wanted} (docs/security.md), got one for {got}")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return a call's handler, or one that refuses it. None for an unknown service, for gRPC to refuse."""
        method = handler_call_details.method
        called = method.removeprefix(_OURS)
        if method.startswith(_OURS):
            sent = dict(handler_call_details.invocation_metadata)
            refusal = self._refusal(called, sent)
            if refusal is not None:
                if called in METHODS:  # a caller could send any number of other names
                    self._calls.add(called, status_of(refusal), 0.0)
                return _refusing(refusal)
        elif method != _HEALTH:
            return None
        return self._handlers.get(method)


_answered: ContextVar[Caller | None] = ContextVar("penstock-caller", default=None)


def jobs_share_token() -> bool:
    """True if only one token is accepted for training jobs, so that limits for tokens cannot tell jobs apart."""
    caller = _answered.get()
    return caller is None or caller.jobs_share_token


def credential() -> str:
    """Name or digest of the token of the call that is being answered; "" outside a call."""
    caller = _answered.get()
    return "" if caller is None else caller.credential


def _short(said: object) -> str:
    return ascii(str(said)[:MAX_SHOWN])[1:-1]


def _refusing(error: PenstockError) -> grpc.RpcMethodHandler[Any, Any]:
    """Handler that refuses a call. It is of the kind stream to stream, which can answer before the request is read."""

    async def refuse(_: Any, context: _Context) -> AsyncIterator[None]:
        await abort(context, error)
        yield  # never reached: it makes this function an async generator

    return grpc.stream_stream_rpc_method_handler(refuse)


def _serialised(serialise: Callable[[Any], bytes], said: Any) -> bytes:
    """A reply that is bytes already is returned unchanged: its handler has serialised one reply for many callers."""
    return said if isinstance(said, bytes) else serialise(said)


@asynccontextmanager
async def _answering(calls: CallCounters, method: str, context: _Context) -> AsyncIterator[None]:
    """Send the errors of a handler, and count a call with its duration when it has ended. One without an answer or a
    refusal counts as cancelled."""
    began, status = time.perf_counter(), "OK"
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        status = status_of(error)
        await abort(context, error)
    except BaseException:
        status = "CANCELLED"
        raise
    finally:
        calls.add(method, status, time.perf_counter() - began)


def _translated(
    name: str, handler: Any, calls: CallCounters, on_call: Callable[[_Context], None], large: LargeRequests
) -> grpc.RpcMethodHandler[Any, Any]:
    """Convert the errors of a handler to gRPC status and trailing metadata. `on_call`: called before each call."""
    parse = handler.request_deserializer

    def read(request: Any, count: Callable[[int], None]) -> Any:
        if handler.request_streaming:
            return parsed_parts(name, parse, request, count)
        count(len(request))
        return parsed_request(name, parse, request)

    # Requests are parsed here, and not by gRPC's deserializer: an error there would be UNKNOWN to the caller and a
    # traceback in the log, and for a part of a stream None.
    sent, answered = (
        "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
    )
    behave = getattr(handler, f"{sent}_{answered}")

    async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
        async with _answering(calls, name, context):
            on_call(context)
            with large.answering(credential()) as count:
                async with aclosing(behave(read(request, count), context)) as parts:
                    async for part in parts:
                        yield part

    async def unary(request: Any, context: _Context) -> Any:
        async with _answering(calls, name, context):
            on_call(context)
            with large.answering(credential()) as count:
                return await behave(read(request, count), context)

    make = getattr(grpc, f"{sent}_{answered}_rpc_method_handler")
    serialise = partial(_serialised, handler.response_serializer)
    made: grpc.RpcMethodHandler[Any, Any] = make(
        stream if handler.response_streaming else unary, request_deserializer=None, response_serializer=serialise
    )
    return made
