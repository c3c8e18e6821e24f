"""OpenTelemetry spans (records of single calls, with their duration) of calls to the coordinator, if enabled.

A process with PENSTOCK_OTEL or --otel calls `start` once. Without that call OpenTelemetry is not imported, and `traced`
returns channels unchanged. The standard OTEL_* variables decide where spans are sent, and how many are kept.

The context of a call is sent in its metadata, so a span of the coordinator is a child of its caller's span. Heartbeat
and WatchRun have no spans, because these long polls are repeated all the time and would hide all other spans. No span
contains metadata, because the token is in them. A span contains the run, box and slot of its request. Runners have no
spans, because they have no gRPC.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.version import VERSION
from penstock.proto.rpc.wire_errors import ErrorInterceptor

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["aio_client_interceptors", "aio_server_interceptors", "note", "start", "traced"]

UNTRACED = frozenset(("Heartbeat", "WatchRun", "Check"))
"""Methods without spans: long polls, and the health check."""
NOTED = ("run", "attempt", "box", "slot", "generation", "step", "worker")
"""Names of the fields of requests that a span contains."""
FLUSH_S = 2.0
"""Longest time in seconds for sending the remaining spans when the process ends. OpenTelemetry itself would try for
half a minute."""

_provider: TracerProvider | None = None


def start(service: str) -> None:
    """Trace the calls of this process, on channels and servers that are made from now on. `service`: the spans'
    `service.name`, unless OTEL_SERVICE_NAME is set.

    Raises InvalidArgumentError if OpenTelemetry is not installed.
    """
    global _provider
    if _provider is not None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation import grpc as _grpc  # noqa: F401
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidArgumentError(
            f"traces need OpenTelemetry, but its module {error.name} is not installed: pip install 'penstock[otel]'"
        ) from error
    about = {"service.name": service, "service.version": VERSION, "host.name": socket.gethostname()}
    # The resource in the environment has priority.
    exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=Resource(about).merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _provider = provider
    _flush_at_exit(provider, exporter)


def _flush_at_exit(provider: TracerProvider, exporter: SpanExporter) -> None:
    """Send the remaining spans when this process ends, within FLUSH_S.

    OpenTelemetry's flush and shutdown of the provider have no deadline, but both end when the exporter is shut down. A
    thread does that after FLUSH_S. The thread is started early, because no thread can be started when a process ends.
    """
    pid, ending = os.getpid(), threading.Event()

    def give_up() -> None:
        ending.wait()
        time.sleep(FLUSH_S)
        exporter.shutdown()

    def end() -> None:
        if os.getpid() == pid:  # a forked child does not have the thread
            ending.set()
            provider.shutdown()

    threading.Thread(target=give_up, name="penstock-tracing-end", daemon=True).start()
    atexit.register(end)


def _is_traced(details: Any) -> bool:
    """Return whether a call gets a span. `details`: what gRPC passes to an interceptor, in one of several forms."""
    method = getattr(details, "full_method", None) or details.method
    name = method.decode() if isinstance(method, bytes) else str(method)
    return name.rpartition("/")[2] not in UNTRACED


def _attributes(request: Any) -> dict[str, Any]:
    fields = getattr(type(request), "DESCRIPTOR", None)
    if fields is None:
        return {}  # a stream
    known = {name: getattr(request, name) for name in NOTED if name in fields.fields_by_name}
    if "job" in fields.fields_by_name and "ordinal" in fields.fields_by_name:
        known["run"] = f"{request.job}/{request.ordinal}"
    return {f"penstock.{name}": value for name, value in known.items() if isinstance(value, (str, int))}


def note(request: Any) -> None:
    """Add the fields of a request that NOTED names to the span of the call that is being answered."""
    if _provider is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(_attributes(request))


def _on_request(span: Any, request: Any) -> None:
    span.set_attributes(_attributes(request))


def _instrumentation() -> Any:
    """Return OpenTelemetry's module that traces gRPC, imported only now, and as Any because it is not typed."""
    from opentelemetry.instrumentation import grpc as theirs
    from opentelemetry.instrumentation.grpc import grpcext as _grpcext  # noqa: F401

    return theirs


def traced(channel: grpc.Channel) -> grpc.Channel:
    """Return a channel whose calls get spans, if this process traces calls; else return `channel`."""
    if _provider is None:
        return channel
    theirs = _instrumentation()
    intercepted: grpc.Channel = theirs.grpcext.intercept_channel(
        channel, theirs.client_interceptor(_provider, _is_traced, _on_request)
    )
    return intercepted


def aio_client_interceptors() -> list[grpc.aio.ClientInterceptor] | None:
    """Return the interceptors that trace the calls of an asyncio channel; None if this process does not trace calls."""
    if _provider is None:
        return None
    return [*_instrumentation().aio_client_interceptors(_provider, _is_traced, _on_request), ErrorInterceptor()]


def aio_server_interceptors() -> list[grpc.aio.ServerInterceptor] | None:
    """Return the interceptors that trace the calls to an asyncio server; None if this process does not trace calls."""
    if _provider is None:
        return None
    return [_instrumentation().aio_server_interceptor(_provider, _is_traced)]
