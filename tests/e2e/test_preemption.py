"""A node that ends: streams on it continue on another worker with the same tokens."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from fairway.client import AdminClient
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.worker.agent.agent import HAND_OVER_S
from tests.support.stack import Stack, metadata
from tests.support.updating import PROMPTS, TIMEOUT_S, admin_of

TOKENS = 800
STREAMS = 6
TRIES = 3
NOTICE_S = HAND_OVER_S + 0.5


@pytest.mark.timeout(300)
async def test_streams_move_before_a_node_ends(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.endpoints["grpc"]) as channel, admin_of(stack) as admin:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        undisturbed = [(await _stream(stack, stub, number))[0] for number in range(STREAMS)]
        found: list[list[tuple[str, int]]] = []
        left, tries = True, 0
        while left and tries < TRIES:  # a machine that stands still is late with one
            found, left = await _at_the_end_of_a_node(stack, stub, admin)
            assert [{text for text, _ in streams} for streams in found] == [{text} for text in undisturbed]
            tries += 1
    assert not left, "it holds a version at its end"
    assert sum(resumes for streams in found for _, resumes in streams), "no stream moved"


async def _at_the_end_of_a_node(
    stack: Stack, stub: inference_pb2_grpc.InferenceServiceAsyncStub, admin: AdminClient
) -> tuple[list[list[tuple[str, int]]], bool]:
    """Return the streams that ran meanwhile, by prompt, and whether the node held a version at its end."""
    try:
        async with asyncio.TaskGroup() as group:
            # Streams run already, as the scheduler gives a node that ends no new ones once it knows.
            begun = [asyncio.Event() for _ in range(STREAMS)]
            ended = asyncio.Event()
            streams = [
                group.create_task(_until(ended, stack, stub, number, begun[number]))
                for number in range(STREAMS)
            ]
            await asyncio.gather(*(one.wait() for one in begun))
            node = await admin.nodes.drain("worker-0", ends_in_s=NOTICE_S)
            assert node.HasField("end_time")
            await asyncio.sleep(NOTICE_S)
            ended.set()
            left = await admin.nodes.get("worker-0")
        return [task.result() for task in streams], bool(left.versions)
    finally:
        await admin.nodes.uncordon("worker-0")
        await admin.deployments.wait_ready(stack.model, timeout_s=TIMEOUT_S)


async def _until(
    ended: asyncio.Event,
    stack: Stack,
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    number: int,
    begun: asyncio.Event,
) -> list[tuple[str, int]]:
    found = []
    while not ended.is_set():
        found.append(await _stream(stack, stub, number, begun))
    return found


async def _stream(
    stack: Stack,
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    number: int,
    begun: asyncio.Event | None = None,
) -> tuple[str, int]:
    """Return the text of one stream, and how often it was resumed. ``begun`` is set by its first chunk."""
    generation = pb.Generation(
        model=stack.model, prompt=PROMPTS[number], max_output_tokens=TOKENS, ignore_eos=True
    )
    generation.sampling.temperature = 0.0
    text, resumes = "", 0
    request = pb.GenerateRequest(generation=generation)
    async for event in stub.Generate(request, metadata=metadata(stack.api_key), timeout=TIMEOUT_S):
        if event.HasField("chunk"):
            text += event.chunk.text
            if begun is not None:
                begun.set()
        elif event.HasField("finished"):
            resumes = event.finished.resumes
    return text, resumes
