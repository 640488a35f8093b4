"""What an idempotency key costs: the same requests with a key of their own and without one, in one run.

``make bench-idempotency``. Both go to one installation with the null executor, in turn, five rounds:

- time to first token of requests that arrive at 50 per second, open loop; ``added_ttft_*`` is the
  difference of the quantiles;
- tokens per second of 64 concurrent ``Generate`` streams, and of one ``Session`` with 64 generations, flat
  out; the ratios are with a key over without.

The last line is ``RESULT {json}``; medians over the rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvloop

from bench.overhead import Target, first_token_s, quantile, session_rate, stream_rates, ttft
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


async def measure(plain: Target, keyed: Target) -> dict[str, float]:
    """Run the rounds, in turn, and return the figures of the RESULT line."""
    figures: dict[str, list[float]] = {name: [] for name in ("p50", "p99", "stream", "session")}
    for _ in range(2):
        await asyncio.gather(*(first_token_s(target) for target in (plain, keyed) for _ in range(20)))
    for number in range(ROUNDS):
        without, with_key = await ttft(plain), await ttft(keyed)
        figures["p50"].append((quantile(with_key, 0.5) - quantile(without, 0.5)) * 1000)
        figures["p99"].append((quantile(with_key, 0.99) - quantile(without, 0.99)) * 1000)
        bare, _ = await stream_rates(plain)
        ours, _ = await stream_rates(keyed)
        figures["stream"].append(ours / bare)
        figures["session"].append(await session_rate(keyed) / await session_rate(plain))
        latest = {name: round(values[-1], 3) for name, values in figures.items()}
        print(f"round {number + 1} of {ROUNDS}: {latest}", flush=True)
    return {
        "added_ttft_p50_ms": round(statistics.median(figures["p50"]), 2),
        "added_ttft_p99_ms": round(statistics.median(figures["p99"]), 2),
        "stream_ratio": round(statistics.median(figures["stream"]), 3),
        "session_ratio": round(statistics.median(figures["session"]), 3),
    }


async def run(stack: NullStack) -> dict[str, float]:
    metadata = (("authorization", f"Bearer {stack.api_key}"),)
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return await measure(
            Target("without a key", stub, metadata, stack.model),
            KeyedTarget("with a key", stub, metadata, stack.model),
        )


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder,
        NullStack.started(Path(folder)) as stack,
    ):
        figures = uvloop.run(run(stack))
    print("RESULT", json.dumps(figures))


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
