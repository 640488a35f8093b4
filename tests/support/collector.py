"""An OTLP collector in the test's process: a real gRPC server that keeps the spans it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services


@dataclass(frozen=True, slots=True)
class SeenSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str]


class Collector(services.TraceServiceServicer):
    """``spans`` grows while the server runs."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.port = 0
        self._arrived = threading.Condition()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2))
        add: Any = services.add_TraceServiceServicer_to_server
        add(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()

    def Export(self, request: Any, context: Any) -> Any:
        with self._arrived:
            for resource in request.resource_spans:
                names = _attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self.spans += [_seen(names["service.name"], span) for span in scope.spans]
            self._arrived.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait_for(
        self, enough: Callable[[list[SeenSpan]], bool], trace_id: str, timeout_s: float = 60.0
    ) -> list[SeenSpan]:
        """Return the spans of a trace once they are enough."""

        def mine() -> list[SeenSpan]:
            return [span for span in self.spans if span.trace_id == trace_id]

        with self._arrived:
            assert self._arrived.wait_for(lambda: enough(mine()), timeout_s), [
                (span.service, span.name) for span in mine()
            ]
            return mine()


@contextmanager
def collector() -> Iterator[Collector]:
    found = Collector()
    found.start()
    try:
        yield found
    finally:
        found.stop()


def _attributes(pairs: Any) -> dict[str, str]:
    return {pair.key: str(getattr(pair.value, pair.value.WhichOneof("value"))) for pair in pairs}


def _seen(service: str, span: Any) -> SeenSpan:
    return SeenSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
    )
