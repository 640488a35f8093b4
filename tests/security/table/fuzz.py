"""Fuzzers: what the OpenAPI document describes and what it excludes, and every message, whole and damaged."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import grpc
import schemathesis
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.security.drills.http import head
from tests.security.drills.target import Target
from tests.security.table.faces import TENANT, ask
from tests.security.table.others import served_methods
from tests.support.drawn_messages import messages
from tests.support.stack import metadata

Drawn = Callable[[Any], None]
_CALL_S: Final = 20.0
_STREAM_S: Final = 1.0
_FAILURES: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
# What these do to a worker, or to where requests are placed, is what they are for.
_EFFECTIVE: Final = ("DrainWorker", "DrainNode", "Connect", "Report")
_CHECKS: Final = [content_type_conformance, response_schema_conformance]


async def fuzz_http(target: Target, examples: int) -> tuple[int, list[str]]:
    """Send requests of each operation; return their number, and what no request may be answered."""
    address, key = target.gateways[0].http, target.keys[TENANT]
    document = json.loads(
        (await ask(address, head("/openapi.json", key, "connection: close", method="GET"))).text
    )
    return await asyncio.to_thread(_fuzz_http, document, f"http://{address}", key, examples)


def _fuzz_http(document: Any, url: str, key: str, examples: int) -> tuple[int, list[str]]:
    sent, found = 0, set[str]()
    schema = schemathesis.openapi.from_dict(document)
    headers = {"authorization": f"Bearer {key}"}

    def send(label: str, case: Any) -> None:
        nonlocal sent
        sent += 1
        response = case.call(base_url=url, headers=headers, timeout=_CALL_S)
        if response.status_code >= 500 and response.status_code not in (501, 503):
            found.add(f"{label}: {response.status_code} {response.text[:120]!r}")
            return
        try:
            case.validate_response(response, checks=_CHECKS)
        except FailureGroup as failures:
            found.update(f"{label}: {each.title}: {each.message[:160]!r}" for each in failures.exceptions)

    for result in schema.get_all_operations():
        if not isinstance(result, Ok):
            found.add(f"the document describes an operation that has no requests: {result}")
            continue
        operation = result.ok()
        if operation.path == "/v1/stream":
            continue  # the handshake of a WebSocket
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            _draw(operation.as_strategy(generation_mode=mode), examples, partial(send, operation.label))
    return sent, sorted(found)


async def fuzz_messages(target: Target, examples: int) -> tuple[int, list[str]]:
    """Send messages of each method that is served; return their number, and the failures."""
    sent, found = 0, set[str]()
    for method, address, key in served_methods(target):
        if method.name not in _EFFECTIVE:
            number, failures = await asyncio.to_thread(_fuzz_method, method, address, key, examples)
            sent += number
            found |= failures
    return sent, sorted(found)


def _fuzz_method(method: MethodDescriptor, address: str, key: str, examples: int) -> tuple[int, set[str]]:
    sent, found = 0, set[str]()
    path = f"/{method.containing_service.full_name}/{method.name}"
    streams = method.client_streaming or method.server_streaming
    with grpc.insecure_channel(address) as channel:

        def send(data: bytes) -> None:
            nonlocal sent
            sent += 1
            call: Any = channel.stream_stream(path) if method.client_streaming else channel.unary_stream(path)
            request = iter([data]) if method.client_streaming else data
            try:
                for _ in call(request, metadata=metadata(key), timeout=_STREAM_S if streams else _CALL_S):
                    pass
            except grpc.RpcError as error:
                code = error.code()
                if code in _FAILURES:
                    found.add(f"{path}: {code.name} {(error.details() or '')[:160]!r}")

        kind = message_factory.GetMessageClass(method.input_type)
        _draw(_wire(kind), max(3, examples // 4) if streams else examples, send)
    return sent, found


def _wire(kind: Any) -> st.SearchStrategy[bytes]:
    """Draw messages as they are sent: whole, cut short, with other bytes in the middle, and bytes alone."""
    whole = messages(kind).map(lambda each: each.SerializeToString())
    damaged = st.builds(
        lambda data, at, piece: (
            data[: at % (len(data) + 1)] + piece + data[at % (len(data) + 1) + len(piece) :]
        ),
        whole,
        st.integers(0, 1 << 16),
        st.binary(max_size=8),
    )
    cut = st.builds(lambda data, at: data[: at % (len(data) + 1)], whole, st.integers(0, 1 << 16))
    return st.one_of(whole, damaged, cut, st.binary(max_size=200))


def _draw(strategy: st.SearchStrategy[Any], examples: int, send: Drawn) -> None:
    """Call ``send`` with so many examples, the same in each run."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def test(drawn: Any) -> None:
        send(drawn)

    with contextlib.suppress(Unsatisfiable):  # an operation without parameters excludes no request
        test()
