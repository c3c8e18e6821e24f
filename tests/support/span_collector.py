"""A collector of OpenTelemetry spans in the test's process, which speaks the real protocol: OTLP over gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """Span as the collector received it."""

    service: str
    name: str
    kind: int
    trace: bytes
    span: bytes
    parent: bytes
    attributes: dict[str, Any]
    whole: str
    """All of it, as text."""


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens from the moment it is made until `close`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._came = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """Listen no more."""
        self._server.stop(None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        spans = [
            Span(
                _values(group.resource.attributes).get("service.name", ""),
                span.name.rpartition("/")[2],
                span.kind,
                span.trace_id,
                span.span_id,
                span.parent_span_id,
                _values(span.attributes),
                f"{group.resource} {span}",
            )
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._came:
            self.spans += spans
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, enough: Callable[[list[Span]], bool], deadline_s: float) -> list[Span]:
        """All spans, once there are enough."""
        until = time.monotonic() + deadline_s
        with self._came:
            while not enough(self.spans):
                left = until - time.monotonic()
                assert left > 0, f"only {sorted({(span.service, span.name) for span in self.spans})} came"
                self._came.wait(left)
            return list(self.spans)


def _values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
