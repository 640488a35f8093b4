"""The baseline: client, relay and server over bare grpc.aio, with the same messages and nothing else.

``python -m bench.bare_chain server PORT`` and ``relay PORT SERVER_PORT`` are two processes; the client is
the benchmark. A request's ``max_output_tokens`` is how many tokens the server streams without pauses, one
message each, as a stream of Generate does. Rows come by the public inference protocol, one stream per
client; the relay sends those of one turn of its loop in one message, and the server computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop

from bench.stack import free_port, wait_for_port
from fairway.inference import v2_pb2, v2_pb2_grpc
from fairway.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

_OUTPUT_BYTES = 40  # of a row's answer


class Server(inference_pb2_grpc.InferenceServiceServicer):
    async def Generate(  # type: ignore[override]  # the stubs have generators only
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> None:
        for offset in range(request.generation.max_output_tokens):
            chunk = inference_pb2.TokenChunk(offset=offset, ids=(offset,), text="word ")
            await context.write(inference_pb2.GenerateResponse(chunk=chunk))
        await context.write(inference_pb2.GenerateResponse(finished=inference_pb2.Finished()))


class Relay(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def Generate(  # type: ignore[override]  # the stubs have generators only
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> None:
        async for event in self._stub.Generate(request):
            await context.write(event)


class RowServer(worker_pb2_grpc.WorkerServiceServicer):
    async def Execute(  # type: ignore[override]  # the stubs have generators only
        self, requests: AsyncIterator[worker_pb2.ExecuteRequest], context: Any
    ) -> None:
        output = common_pb2.Tensor(name="output", datatype="FP32", shape=(10,), data=bytes(_OUTPUT_BYTES))
        async for request in requests:
            ended = [worker_pb2.RowFinished(handle=row.handle, outputs=[output]) for row in request.rows]
            await context.write(worker_pb2.ExecuteResponse(rows=ended))


class RowRelay(v2_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._unsent: list[worker_pb2.StartRow] = []
        self._new = asyncio.Event()
        self._answers: dict[int, asyncio.Future[worker_pb2.RowFinished]] = {}
        self._last = 0
        call = worker_pb2_grpc.WorkerServiceStub(channel).Execute(wait_for_ready=True)
        self._tasks = [asyncio.ensure_future(self._send(call)), asyncio.ensure_future(self._receive(call))]

    async def ModelStreamInfer(  # type: ignore[override]  # the stubs have generators only
        self, requests: AsyncIterator[v2_pb2.ModelInferRequest], context: Any
    ) -> None:
        async for request in requests:
            (found,), (data,) = request.inputs, request.raw_input_contents
            row = common_pb2.Tensor(
                name=found.name, datatype=found.datatype, shape=found.shape[1:], data=data
            )
            (output,) = (await self._run(row)).outputs
            answer = v2_pb2.ModelInferResponse(
                model_name=request.model_name,
                outputs=[
                    v2_pb2.ModelInferResponse.InferOutputTensor(
                        name=output.name, datatype=output.datatype, shape=(1, *output.shape)
                    )
                ],
                raw_output_contents=[output.data],
            )
            await context.write(v2_pb2.ModelStreamInferResponse(infer_response=answer))

    async def _run(self, row: common_pb2.Tensor) -> worker_pb2.RowFinished:
        self._last += 1
        self._unsent.append(worker_pb2.StartRow(handle=self._last, inputs=[row]))
        self._new.set()
        answer = self._answers[self._last] = asyncio.get_running_loop().create_future()
        ended: worker_pb2.RowFinished = await answer
        return ended

    async def _send(self, call: Any) -> None:
        while await self._new.wait():
            self._new.clear()
            rows, self._unsent = self._unsent, []
            await call.write(worker_pb2.ExecuteRequest(rows=rows))

    async def _receive(self, call: Any) -> None:
        async for message in call:
            for row in message.rows:
                answer = self._answers.pop(row.handle)
                if not answer.done():  # its client has left
                    answer.set_result(row)


@dataclass(frozen=True, slots=True)
class BareChain:
    """The two processes. ``port``: of the relay."""

    port: int
    pids: tuple[int, ...]

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[BareChain]:
        """Run them. Raises SystemExit."""
        server_port, relay_port = free_port(), free_port()
        command = [sys.executable, "-m", "bench.bare_chain"]
        processes = [
            subprocess.Popen([*command, "server", str(server_port)]),
            subprocess.Popen([*command, "relay", str(relay_port), str(server_port)]),
        ]
        try:
            wait_for_port(server_port)
            wait_for_port(relay_port)
            yield cls(relay_port, tuple(process.pid for process in processes))
        finally:
            for process in processes:
                process.kill()
                process.wait()


async def serve(role: str, port: int, upstream: int) -> None:
    """Serve until killed."""
    server = grpc.aio.server()
    tokens: Any
    if role == "server":
        tokens = Server()  # type: ignore[abstract]
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(RowServer(), server)  # type: ignore[abstract]
    else:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{upstream}")
        tokens = Relay(channel)  # type: ignore[abstract]
        v2_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(RowRelay(channel), server)  # type: ignore[abstract]
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(tokens, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    role, port = sys.argv[1], int(sys.argv[2])
    uvloop.run(serve(role, port, int(sys.argv[3]) if role == "relay" else 0))


if __name__ == "__main__":
    main()
