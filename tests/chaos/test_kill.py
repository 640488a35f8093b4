"""Kill -9 under 32 streams, with a second replica there: nothing is lost, doubled or left behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import pytest

from fairway.cli.state import StateDir
from fairway.v1 import inference_pb2 as pb
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import FairwayError
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from tests.support.stack import Stack, at_rest, kill, metadata
from tests.support.waiting import until

STREAMS = 32
TOKENS = 400
NEAR_TIE = 1e-3


@dataclass
class Outcome:
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: pb.Finished | None = None
    error: FairwayError | None = None


def is_greedy(number: int) -> bool:
    """Odd streams are greedy, even ones sampled."""
    return number % 2 == 1


def stream_generation(stack: Stack, number: int, tokens: int) -> pb.Generation:
    generation = pb.Generation(
        model=stack.model,
        prompt=f"class Queue{number}:\n    def push_{number}(self, item):\n",
        max_output_tokens=tokens,
        ignore_eos=True,
    )
    generation.sampling.seed = number
    generation.sampling.temperature = 0.0 if is_greedy(number) else 0.7
    return generation


async def stream(
    stack: Stack, stub: object, number: int, tokens: int, seen: Callable[[int], None]
) -> Outcome:
    outcome = Outcome()
    generation = stream_generation(stack, number, tokens)
    call = stub.Generate(  # type: ignore[attr-defined]
        pb.GenerateRequest(generation=generation), metadata=metadata(stack.api_key), timeout=180
    )
    try:
        async for event in call:
            assert outcome.finished is None, "an event after the terminal one"
            if event.HasField("chunk"):
                assert event.chunk.offset == len(outcome.ids), "tokens repeated or lost"
                outcome.ids += event.chunk.ids
                outcome.text += event.chunk.text
                seen(number)
            elif event.HasField("finished"):
                outcome.finished = event.finished
    except grpc.aio.AioRpcError as error:
        outcome.error = from_rpc_error(error)
    return outcome


async def run_streams(stack: Stack, disturb: Callable[[], Awaitable[None]] | None) -> list[Outcome]:
    """Run all streams; disturb once every one of them has tokens and none is near its end."""
    started: set[int] = set()
    async with stack.inference() as stub:
        tasks = [
            asyncio.create_task(stream(stack, stub, number, TOKENS, started.add)) for number in range(STREAMS)
        ]
        if disturb is not None:
            await until(lambda: len(started) >= STREAMS, timeout_s=60)
            await disturb()
        return list(await asyncio.gather(*tasks))


async def kill_busiest(stack: Stack, victim: str, struck: list[tuple[str, int]]) -> None:
    """Kill the busiest worker or its engine; append the worker, and the process id of its engine."""
    state = await stack.workers()
    busiest = max(state, key=lambda name: state[name].versions[0].running)
    engine_pid = state[busiest].versions[0].engine_pid
    kill(engine_pid if victim == "engine" else stack.worker_pid(busiest))
    struck.append((busiest, engine_pid))


async def margin_where_they_part(stack: Stack, number: int, left: list[int], right: list[int]) -> float:
    """Return how far apart, in log probability, two outputs' tokens are where they first differ.

    A continuation in another batch may fall the other way where two candidates are as good as equal.
    """
    at = next(place for place, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
    request = stream_generation(stack, number, at + 1)
    request.logprobs = 20
    async with stack.inference() as stub:
        answer = await stub.Complete(
            pb.CompleteRequest(generation=request), metadata=metadata(stack.api_key), timeout=60
        )
    place = answer.choices[0].logprobs[at]
    found = dict(zip(place.top_ids, place.top_logprobs, strict=True))
    return abs(found.get(left[at], -math.inf) - found.get(right[at], math.inf))


async def slots(stack: Stack) -> int:
    limiter = RedisLimiter(StateDir.at(stack.state).redis_url, SystemClock(), timeout_s=2.0)
    try:
        return await limiter.concurrency("default")
    finally:
        await limiter.close()


@pytest.mark.parametrize("victim", ["engine", "worker"])
async def test_a_kill_under_32_streams(stack: Stack, victim: str) -> None:
    await stack.wait_workers(at_rest, 60)
    undisturbed = await run_streams(stack, None)
    assert all(outcome.finished and len(outcome.ids) == TOKENS for outcome in undisturbed)
    await stack.wait_workers(at_rest, 10)

    struck: list[tuple[str, int]] = []
    outcomes = await run_streams(stack, partial(kill_busiest, stack, victim, struck))
    ((busiest, engine_pid),) = struck

    for outcome in outcomes:
        assert (outcome.finished is None) != (outcome.error is None), "not exactly one terminal event"
        if outcome.error is not None:
            assert outcome.error.reason in ("STREAM_BROKEN", "NO_WORKER_AVAILABLE", "QUEUE_TIMEOUT")
    complete = [number for number, outcome in enumerate(outcomes) if outcome.finished]
    resumed = [number for number in complete if outcomes[number].finished.resumes]  # type: ignore[union-attr]
    same = [number for number in complete if outcomes[number].ids == undisturbed[number].ids]
    print(f"{victim}: {len(complete)} complete, {len(resumed)} resumed, {len(same)} identical")
    assert resumed, "nothing ran on the victim: the kill tested nothing"
    assert len(complete) == STREAMS
    other = sorted(set(complete) - set(same))
    for number in (number for number in other if is_greedy(number)):
        margin = await margin_where_they_part(stack, number, undisturbed[number].ids, outcomes[number].ids)
        print(f"stream {number} parts from the undisturbed one at a margin of {margin:g}")
        assert margin < NEAR_TIE
    # A draw that lies on the boundary between two tokens may fall to either.
    assert len([number for number in other if not is_greedy(number)]) <= 1
    for number in same:
        assert outcomes[number].text == undisturbed[number].text

    after = await stack.wait_workers(at_rest, 60)
    assert after[busiest].versions[0].engine_pid != engine_pid
    assert await slots(stack) == 0
    assert (await run_streams(stack, None))[0].finished is not None


async def test_the_only_replica_comes_back_and_goes_on(tmp_path: Path, installations: None) -> None:
    with Stack.started(tmp_path / "state", workers=1, replicas=1) as lone:
        await lone.wait_workers(lambda state: at_rest(state, 1), 60)
        for victim in ("engine", "worker"):
            outcomes = await run_streams(lone, partial(kill_busiest, lone, victim, []))
            assert [outcome.error for outcome in outcomes if outcome.error] == []
            assert all(len(outcome.ids) == TOKENS for outcome in outcomes)
            await lone.wait_workers(lambda state: at_rest(state, 1), 60)
