"""The load generator of the batching benchmark against servers that answer, or do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from bench.batched.connections import Failed, HttpConnection, http_request
from bench.batched.load import Taken, Target, closed_loop, open_loop
from bench.batched.model import Rows
from bench.batched.systems import v2_target
from fairway.inference import v2_pb2

ROWS = Rows("input", "FP32", tuple(np.full(4096, value, np.float32) for value in range(3)))
ECHO_S = 0.01


class Echo:
    """Answers with the first input after ``ECHO_S``; ``error`` instead, where it is set."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.seen: set[bytes] = set()

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            self.seen.add(request.raw_input_contents[0])
            await asyncio.sleep(ECHO_S)
            answer = v2_pb2.ModelInferResponse(raw_output_contents=request.raw_input_contents)
            yield v2_pb2.ModelStreamInferResponse(error_message=self.error, infer_response=answer)


def handlers(echo: Echo) -> grpc.GenericRpcHandler:
    method = grpc.stream_stream_rpc_method_handler(
        echo.ModelStreamInfer,
        request_deserializer=v2_pb2.ModelInferRequest.FromString,
        response_serializer=v2_pb2.ModelStreamInferResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelStreamInfer": method}
    )


@asynccontextmanager
async def served(echo: Echo) -> AsyncIterator[Target]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handlers(echo),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield v2_target("echo", [port], "m", ROWS)
    finally:
        await server.stop(None)


async def test_a_closed_loop_over_grpc_streams_sends_every_message_whole() -> None:
    echo = Echo()
    async with served(echo) as target:
        taken = await closed_loop(target, connections=2, seconds=1.0, warm_s=0.1)
    # 16 KiB each: more than a frame, and more in all than the first window.
    assert len(taken.seconds) > 5
    assert echo.seen == {row.tobytes() for row in ROWS.values}


async def test_an_open_loop_counts_from_the_time_that_a_request_was_due() -> None:
    async with served(Echo()) as target:
        taken = await open_loop(target, [0.0] * 20, connections=1)
    assert len(taken.seconds) == 20
    assert taken.unanswered == 0
    assert taken.seconds == sorted(taken.seconds)  # each waits for the one before
    assert taken.seconds[-1] - taken.seconds[0] >= 19 * ECHO_S * 0.9


async def test_an_error_of_a_server_ends_the_run() -> None:
    async with served(Echo("QUEUE_FULL: no")) as target:
        with pytest.raises(Failed, match="QUEUE_FULL"):
            await closed_loop(target, connections=1, seconds=5.0)


@asynccontextmanager
async def http_server(answer: bytes) -> AsyncIterator[Target]:
    handlers: list[asyncio.Task[None] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"{}"):
                for part in (answer[:30], answer[30:]):
                    writer.write(part)
                    await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def connect(on_failure: Callable[[str], None]) -> HttpConnection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: HttpConnection(on_failure), "127.0.0.1", port))[1]

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield Target("http", connect, [http_request("/", b"{}")], lambda _: True)
    await asyncio.gather(*filter(None, handlers))


async def test_http_answers_in_parts_are_counted() -> None:
    async with http_server(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n[1,2,3]") as target:
        taken = await closed_loop(target, connections=2, seconds=1.0, warm_s=0.0)
    assert taken.seconds


async def test_an_http_error_ends_the_run() -> None:
    async with http_server(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n") as target:
        with pytest.raises(Failed, match="503"):
            await closed_loop(target, connections=1, seconds=5.0)


def test_what_has_no_answer_counts_as_infinite() -> None:
    taken = Taken("x", 1.0, [0.001] * 98, unanswered=2)
    assert taken.ms(0.5) == 1.0
    assert taken.ms(0.99) == float("inf")
