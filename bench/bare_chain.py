"""The baseline: client, relay and server over bare grpc.aio, with the same messages and nothing else.

``python -m bench.bare_chain server PORT`` and ``relay PORT SERVER_PORT`` are two processes; the client is
the benchmark. A request's ``max_output_tokens`` is how many tokens the server streams without pauses, one
message each, as a stream of Generate does.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
import uvloop

from fairway.v1 import inference_pb2, inference_pb2_grpc


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


async def serve(role: str, port: int, upstream: int) -> None:
    """Serve until killed."""
    server = grpc.aio.server()
    upstream_address = f"127.0.0.1:{upstream}"
    servicer: Any = (
        Server()  # type: ignore[abstract]
        if role == "server"
        else Relay(grpc.aio.insecure_channel(upstream_address))  # type: ignore[abstract]
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    role, port = sys.argv[1], int(sys.argv[2])
    uvloop.run(serve(role, port, int(sys.argv[3]) if role == "relay" else 0))


if __name__ == "__main__":
    main()
