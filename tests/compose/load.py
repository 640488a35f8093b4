"""Streams through the published port of a gateway, and what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from fairway.client import tls_credentials
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from tests.compose.fleet import Fleet

MODEL = "fairway-tiny"
STREAMS = 8
TOKENS = 900  # some seconds; the model's context is 1,024


@dataclass
class Outcome:
    ids: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None
    error: grpc.StatusCode | None = None

    @property
    def complete(self) -> bool:
        return self.finished is not None and len(self.ids) == self.finished.usage.output_tokens


def metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def request(number: int, tokens: int = TOKENS) -> pb.GenerateRequest:
    generation = pb.Generation(
        model=MODEL,
        prompt=f"class Queue{number}:\n    def push_{number}(self, item):\n",
        max_output_tokens=tokens,
        ignore_eos=True,
    )
    generation.sampling.temperature = 0
    return pb.GenerateRequest(generation=generation)


async def stream(
    fleet: Fleet,
    number: int,
    *,
    tokens: int = TOKENS,
    gateway: int = 0,
    seen: Callable[[int], None] | None = None,
) -> Outcome:
    """Return what one stream came to; it ends by itself or by its deadline."""
    outcome = Outcome()
    credentials = tls_credentials(fleet.authorities.parent)
    async with grpc.aio.secure_channel(fleet.grpc(gateway), credentials) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request(number, tokens), metadata=metadata(fleet.secret("api_key")), timeout=240)
        try:
            async for event in call:
                assert outcome.finished is None, "an event after the terminal one"
                if event.HasField("chunk"):
                    assert event.chunk.offset == len(outcome.ids), "tokens repeated or lost"
                    outcome.ids += event.chunk.ids
                    if seen is not None:
                        seen(number)
                elif event.HasField("finished"):
                    outcome.finished = event.finished
        except grpc.aio.AioRpcError as error:
            outcome.error = error.code()
    return outcome


async def streams(
    fleet: Fleet, disturb: Callable[[], object] | None = None, *, followed: bool = False
) -> list[Outcome]:
    """Run all streams at once; disturb when each has its first tokens, in a thread.

    A command to the Docker engine may take longer than a stream. Where they are ``followed`` one that ends
    undisturbed before the command does has another like it behind it.
    """
    started: set[int] = set()
    done = asyncio.Event()

    async def one(number: int) -> Outcome:
        while True:
            outcome = await stream(fleet, number, seen=started.add)
            resumed = outcome.finished is not None and outcome.finished.resumes > 0
            if not followed or done.is_set() or resumed or not outcome.complete:
                return outcome

    tasks = [asyncio.create_task(one(number)) for number in range(STREAMS)]
    if disturb is not None:
        async with asyncio.timeout(120):
            while len(started) < STREAMS:
                await asyncio.sleep(0.01)
        assert not all(task.done() for task in tasks), "the streams ended before they could be disturbed"
        await asyncio.to_thread(disturb)
    done.set()
    return list(await asyncio.gather(*tasks))


async def served(fleet: Fleet, gateway: int = 0, timeout_s: float = 120.0) -> Outcome:
    """Return a complete stream of a new request. Raises AssertionError when none comes within the time."""
    loop = asyncio.get_running_loop()
    deadline, last = loop.time() + timeout_s, None
    while loop.time() < deadline:
        last = await stream(fleet, 0, tokens=8, gateway=gateway)
        if last.complete:
            return last
        await asyncio.sleep(0.25)
    raise AssertionError(f"nothing is served after {timeout_s:g} s: {last}")
