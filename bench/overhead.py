"""What the platform costs: Fairway with the null executor against a bare grpc.aio chain, in one run.

``make bench-overhead``. Both sides get the same traffic from this process, in turn, three rounds:

- time to first token of requests that arrive at 50 per second, open loop; ``added_ttft_*`` is the
  difference of the quantiles;
- tokens per second of 64 concurrent ``Generate`` streams, flat out; ``stream_ratio`` is Fairway's over
  the chain's. The chain sends a message per token; Fairway merges what waits while a reader lags, so
  ``stream_message_ratio`` (messages per second over the chain's) and ``stream_tokens_per_message`` show
  how much of the ratio is merging;
- tokens per second of one ``Session`` with 64 generations, flat out.

The last line is ``RESULT {json}``; medians over the rounds.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvloop

from bench.bare_chain import BareChain
from bench.results import print_result
from bench.stack import NullStack
from fairway.v1 import inference_pb2, inference_pb2_grpc

ROUNDS = 3
RATE_PER_S = 50.0
TTFT_REQUESTS = 250
TTFT_TOKENS = 16
STREAMS = 64
STREAM_TOKENS = 400
SESSION_TOKENS = 2000
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers InferenceService."""

    name: str
    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    metadata: Metadata
    model: str

    def request(self, tokens: int) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(generation=self.generation(tokens))

    def generation(self, tokens: int) -> inference_pb2.Generation:
        return inference_pb2.Generation(
            model=self.model,
            prompt="def add(left, right):\n    return left + right\n",
            max_output_tokens=tokens,
            ignore_eos=True,
        )


async def first_token_s(target: Target) -> float:
    """Return the time to the first token of one request that is read to its end."""
    started = time.perf_counter()
    first = 0.0
    async for event in target.stub.Generate(target.request(TTFT_TOKENS), metadata=target.metadata):
        if not first and event.HasField("chunk"):
            first = time.perf_counter() - started
    return first


async def ttft(target: Target) -> list[float]:
    """Return the times to first token of an open-loop arrival of requests, seconds."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    tasks = []
    for number in range(TTFT_REQUESTS):
        await asyncio.sleep(max(0.0, start + number / RATE_PER_S - loop.time()))
        tasks.append(loop.create_task(first_token_s(target)))
    return list(await asyncio.gather(*tasks))


async def stream_rates(target: Target) -> tuple[float, float]:
    """Return tokens/s and messages/s over concurrent Generate streams."""

    async def one() -> tuple[int, int]:
        tokens = messages = 0
        async for event in target.stub.Generate(target.request(STREAM_TOKENS), metadata=target.metadata):
            tokens += len(event.chunk.ids)
            messages += 1
        return tokens, messages

    started = time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(STREAMS)))
    wall_s = time.perf_counter() - started
    total = sum(tokens for tokens, _ in counts)
    if total != STREAMS * STREAM_TOKENS:
        raise SystemExit(f"{target.name}: {total} tokens received, {STREAMS * STREAM_TOKENS} expected")
    return total / wall_s, sum(messages for _, messages in counts) / wall_s


async def session_rate(target: Target) -> float:
    """Return tokens/s over one Session with many generations."""
    call = target.stub.Session(metadata=target.metadata)
    started = time.perf_counter()
    for stream_id in range(STREAMS):
        start = inference_pb2.SessionStart(stream_id=stream_id, generation=target.generation(SESSION_TOKENS))
        await call.write(inference_pb2.SessionRequest(start=start))
    await call.done_writing()
    tokens = ended = 0
    async for message in call:
        tokens += len(message.tokens.ids)
        for finished in message.finished:
            ended += 1
            if finished.HasField("error"):
                raise SystemExit(f"a generation failed: {finished.error.reason} {finished.error.message}")
    if (tokens, ended) != (STREAMS * SESSION_TOKENS, STREAMS):
        raise SystemExit(f"{tokens} tokens received in {ended} generations, not all that were expected")
    return tokens / (time.perf_counter() - started)


def quantile(values: list[float], ratio: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * ratio))]


async def measure(chain: Target, fairway: Target) -> dict[str, list[float]]:
    """Run the rounds, in turn, and return the figures of each."""
    names = ("p50", "p99", "session", "stream", "chain", "messages", "chain_messages")
    figures: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(2):
        await asyncio.gather(*(first_token_s(target) for target in (chain, fairway) for _ in range(20)))
    for number in range(ROUNDS):
        bare, ours = await ttft(chain), await ttft(fairway)
        figures["p50"].append((quantile(ours, 0.5) - quantile(bare, 0.5)) * 1000)
        figures["p99"].append((quantile(ours, 0.99) - quantile(bare, 0.99)) * 1000)
        for rate, messages, target in (("chain", "chain_messages", chain), ("stream", "messages", fairway)):
            tokens_per_s, messages_per_s = await stream_rates(target)
            figures[rate].append(tokens_per_s)
            figures[messages].append(messages_per_s)
        figures["session"].append(await session_rate(fairway))
        latest = {name: round(values[-1], 2) for name, values in figures.items()}
        print(f"round {number + 1} of {ROUNDS}: {latest}", flush=True)

    def ratio(ours: str, bare: str) -> list[float]:
        return [one / other for one, other in zip(figures[ours], figures[bare], strict=True)]

    return {
        "added_ttft_p50_ms": figures["p50"],
        "added_ttft_p99_ms": figures["p99"],
        "session_tokens_per_s": figures["session"],
        "stream_ratio": ratio("stream", "chain"),
        "stream_message_ratio": ratio("messages", "chain_messages"),
        "stream_tokens_per_message": ratio("stream", "messages"),
    }


async def run(chain_port: int, stack: NullStack) -> dict[str, list[float]]:
    make: Callable[[str], grpc.aio.Channel] = grpc.aio.insecure_channel
    async with make(f"127.0.0.1:{chain_port}") as bare, make(stack.grpc) as ours:
        chain = Target("chain", inference_pb2_grpc.InferenceServiceStub(bare), (), "none")
        metadata = (("authorization", f"Bearer {stack.api_key}"),)
        fairway = Target("fairway", inference_pb2_grpc.InferenceServiceStub(ours), metadata, stack.model)
        return await measure(chain, fairway)


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder,
        BareChain.started() as chain,
        NullStack.started(Path(folder)) as stack,
    ):
        figures = uvloop.run(run(chain.port, stack))
    print_result(figures)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
