"""The installation that the benchmarks measure starts, and streams what they count."""

from __future__ import annotations

from pathlib import Path

import grpc

from bench.stack import NullStack
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from tests.support.stack import metadata


async def test_the_null_executor_streams_as_many_tokens_as_were_requested(
    tmp_path: Path, installations: None
) -> None:
    with NullStack.started(tmp_path) as stack:
        generation = pb.Generation(model=stack.model, prompt="x", max_output_tokens=50, ignore_eos=True)
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = pb.GenerateRequest(generation=generation)
            call = stub.Generate(request, metadata=metadata(stack.api_key), timeout=60)
            events = [event async for event in call]
    assert sum(len(event.chunk.ids) for event in events) == events[-1].finished.usage.output_tokens == 50
