"""A refusal comes from a process that is alive; only silence begins with ``NO_ANSWER``."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from fairway.cli.fleet.probes import NO_ANSWER, grpc_serving
from services.rpc.probe import health_problem


class Refusing(grpc.GenericRpcHandler):
    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code

    def service(self, handler_call_details: Any) -> Any:
        async def refuse(requests: Any, context: Any) -> None:
            await context.abort(self.code, "no")

        return grpc.stream_unary_rpc_method_handler(refuse)


@pytest.mark.parametrize(
    ("code", "silent", "healthy"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False, True),
        (grpc.StatusCode.CANCELLED, False, True),
        (grpc.StatusCode.UNIMPLEMENTED, False, False),
        (grpc.StatusCode.INTERNAL, False, False),
        (grpc.StatusCode.UNAVAILABLE, True, False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, True, False),
    ],
)
async def test_refused_is_not_silent(code: grpc.StatusCode, silent: bool, healthy: bool) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Refusing(code),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    reason = await grpc_serving(address)()
    assert reason
    assert reason.startswith(NO_ANSWER) is silent
    assert (await asyncio.to_thread(health_problem, address) == "") is healthy
    await server.stop(0)


async def test_nobody_there_is_silent() -> None:
    assert (await grpc_serving("127.0.0.1:9")()).startswith(NO_ANSWER)
