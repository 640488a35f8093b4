"""A node that ends: streams on it continue on another worker with the same tokens."""

from __future__ import annotations

import asyncio

import grpc

from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from tests.support.stack import Stack, metadata
from tests.support.updating import PROMPTS, TIMEOUT_S, admin_of

TOKENS = 400
STREAMS = 6
NOTICE_S = 7.0


async def test_streams_move_before_a_node_ends(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.endpoints["grpc"]) as channel, admin_of(stack) as admin:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        undisturbed = [(await _stream(stack, stub, number))[0] for number in range(STREAMS)]
        try:
            async with asyncio.TaskGroup() as group:
                node = await admin.nodes.drain("worker-0", ends_in_s=NOTICE_S)
                assert node.HasField("end_time")
                ends = asyncio.get_running_loop().time() + NOTICE_S
                # Streams begin until the node ends: some are on it when it hands over.
                streams = [group.create_task(_until(ends, stack, stub, number)) for number in range(STREAMS)]
                await asyncio.sleep(NOTICE_S)
                left = await admin.nodes.get("worker-0")
            assert not left.versions, "it holds a version at its end"
        finally:
            await admin.nodes.uncordon("worker-0")
            await admin.deployments.wait_ready(stack.model, timeout_s=TIMEOUT_S)
    assert [{text for text, _ in task.result()} for task in streams] == [{text} for text in undisturbed]
    assert sum(resumes for task in streams for _, resumes in task.result()), "no stream moved"


async def _until(
    ends_s: float, stack: Stack, stub: inference_pb2_grpc.InferenceServiceAsyncStub, number: int
) -> list[tuple[str, int]]:
    found = []
    while asyncio.get_running_loop().time() < ends_s:
        found.append(await _stream(stack, stub, number))
    return found


async def _stream(
    stack: Stack, stub: inference_pb2_grpc.InferenceServiceAsyncStub, number: int
) -> tuple[str, int]:
    """Return the text of one stream, and how often it was resumed."""
    generation = pb.Generation(
        model=stack.model, prompt=PROMPTS[number], max_output_tokens=TOKENS, ignore_eos=True
    )
    generation.sampling.temperature = 0.0
    text, resumes = "", 0
    request = pb.GenerateRequest(generation=generation)
    async for event in stub.Generate(request, metadata=metadata(stack.api_key), timeout=TIMEOUT_S):
        if event.HasField("chunk"):
            text += event.chunk.text
        elif event.HasField("finished"):
            resumes = event.finished.resumes
    return text, resumes
