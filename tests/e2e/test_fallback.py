"""While no scheduler answers, requests go on; the one that answers again finds nothing lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from tests.support.command_line import CommandLine
from tests.support.stack import Stack, at_rest, metadata

PATIENCE_S = 60.0


@contextlib.contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """Stop the processes and let them go on afterwards."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def generate(stack: Stack, *, tokens: int = 8) -> tuple[str, list[int]]:
    """Return the id of a request and its tokens."""
    generation = pb.Generation(
        model=stack.model,
        prompt="The tide",
        max_output_tokens=tokens,
        min_output_tokens=tokens,
        sampling=common_pb2.Sampling(temperature=0, seed=1),
    )
    ids: list[int] = []
    request_id = ""
    async with stack.inference() as stub, asyncio.timeout(PATIENCE_S):
        async for event in stub.Generate(
            pb.GenerateRequest(generation=generation), metadata=metadata(stack.api_key)
        ):
            match event.WhichOneof("event"):
                case "accepted":
                    request_id = event.accepted.request_id
                case "chunk":
                    ids += event.chunk.ids
    return request_id, ids


async def counted(stack: Stack, process: str, name: str) -> float:
    """Return the sum of a metric of one process over its labels."""
    address = stack.endpoints["metrics"][process]

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    lines = [line for line in (await asyncio.to_thread(read)).splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def alone(stack: Stack) -> tuple[float, float]:
    """Return how many placements the gateway made itself, and how many the workers took."""
    placed = await counted(stack, "gateway", "fairway_gateway_fallback_placements_total")
    name = "fairway_worker_fallback_starts_total"
    return placed, sum([await counted(stack, worker, name) for worker in ("worker-0", "worker-1")])


@pytest.mark.timeout(300)
async def test_requests_go_on_without_a_scheduler(stack: Stack) -> None:
    cli = CommandLine(stack.state)
    _, undisturbed = await generate(stack)
    before = await alone(stack)
    with frozen(stack.pids("services scheduler")):
        several = await asyncio.gather(*(generate(stack) for _ in range(6)))
        placed, taken = await alone(stack)
    assert [ids for _, ids in several] == [undisturbed] * 6, "a token was lost or doubled"
    assert taken - before[1] == 6
    assert placed - before[0] >= 6, "a refusal is placed again"
    await stack.wait_workers(at_rest, PATIENCE_S)

    def reported() -> set[str]:
        return {row[0] for row in cli("workers").rows}

    async def led() -> bool:
        """Whether the scheduler, not a gateway, placed another request."""
        request_id, ids = await generate(stack)
        assert ids == undisturbed
        try:
            return (await asyncio.to_thread(cli, "explain", request_id)).rows[0][0] == "GRANTED"
        except AssertionError:  # nobody leads, or has a record of it
            return False

    async with asyncio.timeout(PATIENCE_S):
        while not await led():
            _, taken = await alone(stack)
    async with asyncio.timeout(PATIENCE_S):
        while len(await asyncio.to_thread(reported)) < 2:
            await asyncio.sleep(0.1)
    for request_id, _ in several:
        explained = await asyncio.to_thread(cli, "explain", request_id)
        assert "PLACED_ALONE" in [cell for row in explained.rows for cell in row], (
            "it ended before the leader came"
        )
    assert (await alone(stack))[1] == taken, "a leader is there again"
