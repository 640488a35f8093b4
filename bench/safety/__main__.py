"""What safety packs let through and what they cost: ``make bench-safety``, about 12 minutes on two cores.

32 streams at once of the bundled model, as three tenants by turns: ``none`` has no pack; ``light`` has lists,
personal data and the probe; ``whole`` has the classifier as well, every 16 tokens of a window of 32.

- ``planted``: phrases of the packs that the model wrote for the tenant without one, which the same requests
  of the others offer again: those up to the first that ends its output. ``unsafe_delivered``: those of them
  that the others' clients received, by a checker that has nothing of the product's.
- ``false_blocks``: outputs without such a phrase that are not the same with a pack.
- ``added_ttft_p50_ms``: of ``whole`` over ``none``. ``ttft_bound_ms``: the window at the pace of ``whole``'s
  streams and one verdict under its load, which it may add.
- ``tokens_per_s_ratio`` and ``itl_p95_ratio``: of ``whole`` over ``none``, medians over the rounds;
  ``_light``: of ``light``. A gap is between messages with tokens, however many these have.
- ``identical_resume_ratio``: redacted outputs that a killed worker interrupted and that came out the same.

The last line is ``RESULT {json}``. Exits 1 where a phrase was delivered, safe output was not, or a resumed
output differs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import uvloop

from bench.overhead import quantile
from bench.results import Figure, print_result
from bench.safety.checker import planted_in
from bench.safety.planted import BLOCKED, PHRASES, Planned, clean, long_redacted, near_misses, planted
from bench.safety.stack import MODEL, VARIANTS, WINDOW_TOKENS, SafetyStack, started
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc

STREAMS: Final = 32
KILL_AFTER_S: Final = 2.0
SAMPLED_S: Final = 0.3  # pause between verdicts that are timed
TIMEOUT_S: Final = 180.0
Outputs = dict[str, list["Output"]]


@dataclass(slots=True)
class Output:
    """What a client received of one request."""

    ttft_s: float = 0.0
    text: str = ""
    tokens: int = 0
    later_tokens: int = 0  # tokens after the first message
    gaps_s: list[float] = field(default_factory=list)  # times between messages
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class Played:
    """The outputs of some requests, in their order."""

    outputs: list[Output]
    tokens_per_s: float

    @property
    def ttft_p50_s(self) -> float:
        return quantile([output.ttft_s for output in self.outputs], 0.5)

    @property
    def itl_p95_s(self) -> float:
        return quantile([gap for output in self.outputs for gap in output.gaps_s], 0.95)

    @property
    def pace_s(self) -> float:
        """The mean time of a token after the first message."""
        gaps_s = sum(sum(output.gaps_s) for output in self.outputs)
        return gaps_s / sum(output.later_tokens for output in self.outputs)

    @property
    def shown(self) -> str:
        ttft_ms, itl_ms = self.ttft_p50_s * 1e3, self.itl_p95_s * 1e3
        return f"{self.tokens_per_s:.0f} tokens/s, TTFT {ttft_ms:.0f} ms, ITL p95 {itl_ms:.1f} ms"


@dataclass(frozen=True, slots=True)
class Tenants:
    """The clients of all variants."""

    stack: SafetyStack
    stub: inference_pb2_grpc.InferenceServiceAsyncStub

    async def play(self, variant: str, requests: Sequence[Planned]) -> Played:
        """Send the requests by a closed loop of clients; return once all ended."""
        outputs = [Output() for _ in requests]
        left = iter(zip(requests, outputs, strict=True))

        async def client() -> None:
            for request, output in left:
                await self._receive(variant, request, output)

        began_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(STREAMS)))
        return Played(outputs, sum(each.tokens for each in outputs) / (time.perf_counter() - began_s))

    async def play_all(self, requests: Sequence[Planned]) -> Outputs:
        """Return the outputs of each variant, which take turns."""
        found: Outputs = {variant: [] for variant in VARIANTS}
        for number, first in enumerate(range(0, len(requests), 2 * STREAMS)):
            for variant in turn(number):
                played = await self.play(variant, requests[first : first + 2 * STREAMS])
                found[variant] += played.outputs
        return found

    async def time_verdicts(self, variant: str, taken_s: list[float]) -> None:
        """Time single verdicts on a text of an output's length, until it is cancelled."""
        request = pb.ModerateRequest(inputs=["def push(self, item): return item\n" * 12], outputs=True)
        while True:
            began_s = time.perf_counter()
            await self.stub.Moderate(request, metadata=self.stack.keys[variant], timeout=TIMEOUT_S)
            taken_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(SAMPLED_S)

    async def _receive(self, variant: str, request: Planned, found: Output) -> None:
        message = pb.GenerateRequest(generation=request.generation)
        last_s = began_s = time.perf_counter()
        async for event in self.stub.Generate(message, metadata=self.stack.keys[variant], timeout=TIMEOUT_S):
            if event.HasField("chunk"):
                now_s = time.perf_counter()
                if found.ttft_s:
                    found.gaps_s.append(now_s - last_s)
                    found.later_tokens += len(event.chunk.ids)
                else:
                    found.ttft_s = now_s - began_s
                last_s = now_s
                found.text += event.chunk.text
                found.tokens += len(event.chunk.ids)
            elif event.HasField("finished"):
                found.resumes = event.finished.resumes


def turn(number: int) -> tuple[str, ...]:
    place = number % len(VARIANTS)
    return VARIANTS[place:] + VARIANTS[:place]


async def delivered(tenants: Tenants, count: int) -> dict[str, float]:
    """Return what the packs let through of planted phrases, and what else they changed."""
    requests = planted(MODEL, count)
    outputs = await tenants.play_all(requests)
    offered: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for place, request in enumerate(requests):
        emitted = planted_in(outputs["none"][place].text, PHRASES[:BLOCKED] if request.ends else PHRASES)
        for variant in VARIANTS[1:]:
            offered[request.form] += min(emitted, 1) if request.ends else emitted
            passed[request.form] += planted_in(outputs[variant][place].text, PHRASES)
    for form, emitted in offered.items():
        print(f"{form}: {emitted} offered, {passed[form]} delivered", flush=True)
    safe = tuple(near_misses(MODEL, count // 8))
    return {
        "planted": offered.total(),
        "unsafe_delivered": passed.total(),
        "near_misses": len(safe),
        "false_blocks": changed(await tenants.play_all(safe)),
    }


def changed(outputs: Outputs) -> int:
    """Return how many outputs without a phrase differ from those of the tenant without a pack."""
    found = 0
    for variant in VARIANTS[1:]:
        for mine, other in zip(outputs["none"], outputs[variant], strict=True):
            if not planted_in(mine.text, PHRASES) and mine.text != other.text:
                found += 1
                print(f"{variant} changed {mine.text!r} to {other.text!r}", flush=True)
    return found


async def cost(tenants: Tenants, rounds: int, per_round: int) -> tuple[int, dict[str, Figure]]:
    """Return how many outputs the packs changed, and their cost, over rounds in which variants take turns."""
    played: dict[str, list[Played]] = {variant: [] for variant in VARIANTS}
    verdicts_s: list[float] = []
    false_blocks = 0
    for number in range(rounds):
        requests = clean(MODEL, number * per_round, per_round)
        for variant in turn(number):
            # Each variant bears the calls, so that they cost all the same; those of one are timed under it.
            taken_s = verdicts_s if variant == "whole" else []
            timing = asyncio.get_running_loop().create_task(tenants.time_verdicts("whole", taken_s))
            played[variant].append(await tenants.play(variant, requests))
            timing.cancel()
            with suppress(asyncio.CancelledError):
                await timing
        false_blocks += changed({variant: each[-1].outputs for variant, each in played.items()})
        shown = "; ".join(f"{variant} {each[-1].shown}" for variant, each in played.items())
        print(f"round {number + 1} of {rounds}: {shown}", flush=True)
    return false_blocks, ratios(played, statistics.median(verdicts_s))


def ratios(played: dict[str, list[Played]], verdict_s: float) -> dict[str, Figure]:
    """Return what the packs cost, by round."""

    def ratio(figure: Callable[[Played], float], variant: str) -> list[float]:
        pairs = zip(played[variant], played["none"], strict=True)
        return [figure(mine) / figure(other) for mine, other in pairs]

    pairs = zip(played["whole"], played["none"], strict=True)
    added_ms = [1e3 * (mine.ttft_p50_s - other.ttft_p50_s) for mine, other in pairs]
    speed = ratio(lambda one: one.tokens_per_s, "whole")
    window_s = (
        WINDOW_TOKENS * statistics.median(one.pace_s for one in played["none"]) / statistics.median(speed)
    )
    return {
        "added_ttft_p50_ms": added_ms,
        "window_ms": round(window_s * 1e3, 1),
        "verdict_p50_ms": round(verdict_s * 1e3, 1),
        "ttft_bound_ms": round((window_s + verdict_s) * 1e3, 1),
        "itl_p95_ratio_light": ratio(lambda one: one.itl_p95_s, "light"),
        "itl_p95_ratio": ratio(lambda one: one.itl_p95_s, "whole"),
        "tokens_per_s_ratio_light": ratio(lambda one: one.tokens_per_s, "light"),
        "tokens_per_s_ratio": speed,
    }


async def resumed(tenants: Tenants) -> dict[str, float]:
    """Return how many redacted outputs came out the same although their worker was killed midway."""
    requests = tuple(long_redacted(MODEL, STREAMS))
    await asyncio.to_thread(tenants.stack.replicas, 2)
    whole = (await tenants.play("whole", requests)).outputs
    if not all("[redacted]" in output.text for output in whole):
        raise SystemExit("an output that must be redacted is not")
    interrupted = same = 0
    for worker in ("worker-0", "worker-1"):
        playing = asyncio.get_running_loop().create_task(tenants.play("whole", requests))
        await asyncio.sleep(KILL_AFTER_S)
        tenants.stack.kill_worker(worker)
        for one, other in zip(whole, (await playing).outputs, strict=True):
            interrupted += other.resumes > 0
            same += other.resumes > 0 and one.text == other.text
            if one.text != other.text:
                print(f"{worker} killed: {one.text!r} became {other.text!r}", flush=True)
        await asyncio.to_thread(tenants.stack.replicas, 2)
    if not interrupted:
        raise SystemExit("no output was resumed: the kills came too late")
    return {"resumed": interrupted, "identical_resume_ratio": round(same / interrupted, 4)}


async def measure(
    stack: SafetyStack, options: argparse.Namespace
) -> tuple[dict[str, Figure], dict[str, float]]:
    """Return the cost, and the counts and ratios that must hold."""
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        tenants = Tenants(stack, inference_pb2_grpc.InferenceServiceStub(channel))
        await tenants.play_all(clean(MODEL, 0, STREAMS))
        false_blocks, found = await cost(tenants, options.rounds, options.requests)
        print(found, flush=True)
        safe = await delivered(tenants, options.planted)
        safe["false_blocks"] += false_blocks
        return found, safe | await resumed(tenants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=3 * STREAMS, help="of a variant in a round")
    parser.add_argument("--planted", type=int, default=660, help="requests; 2,000 phrases need about 640")
    parser.add_argument("--short", action="store_true", help="a tenth of each")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the roles end as well
    if options.short:
        options.rounds, options.requests, options.planted = 1, STREAMS, 66
    with tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder, started(Path(folder)) as stack:
        costs, safe = uvloop.run(measure(stack, options))
    print_result({**costs, **safe})
    wrong = safe["unsafe_delivered"] + safe["false_blocks"]
    if wrong or not safe["planted"] or safe["identical_resume_ratio"] < 1:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
