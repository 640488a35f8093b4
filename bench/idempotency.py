"""What an idempotency key costs: the same requests with a key of their own and without one, in one run.

``make bench-idempotency``. Both go to one installation with the null executor, in turn, five rounds:

- time to first token of requests that arrive at 50 per second, open loop; ``added_ttft_*`` is the
  difference of the quantiles;
- 64 concurrent ``Generate`` streams, and one ``Session`` with 64 generations, flat out: tokens per second,
  with a key over without, and what the gateway's processor time per token is more. The latter holds on a
  machine that others use too.

The last line is ``RESULT {json}``; medians over the rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvloop

from bench.overhead import (
    SESSION_TOKENS,
    STREAM_TOKENS,
    STREAMS,
    Target,
    first_token_s,
    quantile,
    session_rate,
    stream_rates,
    ttft,
)
from bench.results import print_result
from bench.stack import NullStack
from fairway.v1 import inference_pb2, inference_pb2_grpc

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class KeyedTarget(Target):
    """Each request has a key that no other has."""

    def generation(self, tokens: int) -> inference_pb2.Generation:
        found = Target.generation(self, tokens)
        found.idempotency_key = uuid.uuid4().hex
        return found


@dataclass(frozen=True, slots=True)
class Spent:
    """Of one flat-out run: tokens per second, and the gateway's processor time per token."""

    tokens_per_s: float
    cpu_us: float


async def flat_out(target: Target, metrics_url: str, *, session: bool) -> Spent:
    tokens = STREAMS * (SESSION_TOKENS if session else STREAM_TOKENS)
    before_s = await asyncio.to_thread(cpu_s, metrics_url)
    rate = await session_rate(target) if session else (await stream_rates(target))[0]
    return Spent(rate, (await asyncio.to_thread(cpu_s, metrics_url) - before_s) / tokens * 1e6)


def cpu_s(metrics_url: str) -> float:
    """Return the processor time that a process has used."""
    with urllib.request.urlopen(metrics_url, timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("fairway_process_cpu_seconds_total "):
                return float(line.split()[1])
    raise SystemExit(f"{metrics_url} does not report its processor time")


async def measure(plain: Target, keyed: Target, metrics_url: str) -> dict[str, list[float]]:
    """Run the rounds, in turn, and return the figures of each."""
    names = ("p50", "p99", "stream", "session", "stream_cpu_us", "session_cpu_us")
    figures: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(2):
        await asyncio.gather(*(first_token_s(target) for target in (plain, keyed) for _ in range(20)))
    for number in range(ROUNDS):
        without, with_key = await ttft(plain), await ttft(keyed)
        figures["p50"].append((quantile(with_key, 0.5) - quantile(without, 0.5)) * 1000)
        figures["p99"].append((quantile(with_key, 0.99) - quantile(without, 0.99)) * 1000)
        for name, session in (("stream", False), ("session", True)):
            bare = await flat_out(plain, metrics_url, session=session)
            ours = await flat_out(keyed, metrics_url, session=session)
            figures[name].append(ours.tokens_per_s / bare.tokens_per_s)
            figures[f"{name}_cpu_us"].append(ours.cpu_us - bare.cpu_us)
        latest = {name: round(values[-1], 3) for name, values in figures.items()}
        print(f"round {number + 1} of {ROUNDS}: {latest}", flush=True)
    return {
        "added_ttft_p50_ms": figures["p50"],
        "added_ttft_p99_ms": figures["p99"],
        "stream_ratio": figures["stream"],
        "session_ratio": figures["session"],
        "stream_added_cpu_us_per_token": figures["stream_cpu_us"],
        "session_added_cpu_us_per_token": figures["session_cpu_us"],
    }


async def run(stack: NullStack, metrics_url: str) -> dict[str, list[float]]:
    metadata = (("authorization", f"Bearer {stack.api_key}"),)
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return await measure(
            Target("without a key", stub, metadata, stack.model),
            KeyedTarget("with a key", stub, metadata, stack.model),
            metrics_url,
        )


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder,
        NullStack.started(Path(folder)) as stack,
    ):
        endpoints = json.loads((Path(folder) / "state" / "endpoints.json").read_text())
        figures = uvloop.run(run(stack, f"http://{endpoints['metrics']['gateway']}/metrics"))
    print_result(figures)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
