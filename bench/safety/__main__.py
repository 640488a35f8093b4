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
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import grpc
import uvloop

from bench.overhead import quantile
from bench.safety.checker import planted_in
from bench.safety.planted import BLOCKED, PHRASES, Planned, clean, long_redacted, near_misses, planted
from bench.safety.stack import MODEL, VARIANTS, WINDOW_TOKENS, Metadata, SafetyStack, started
from fairway.v1 import common_pb2, inference_pb2_grpc
from fairway.v1 import inference_pb2 as pb

STREAMS: Final = 32
KILL_AFTER_S: Final = 2.0
SAMPLED_S: Final = 0.3  # between verdicts that are timed
TIMEOUT_S: Final = 180.0
Stub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"  # it exists only for the type checker


@dataclass(slots=True)
class Output:
    """What a client received of one request. ``ids``: redacted ones included."""

    ttft_s: float = 0.0
    text: str = ""
    first_tokens: int = 0  # those of the first message
    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    resumes: int = 0
    reason: int = 0

    def phrases(self, *, ends: bool) -> int:
        """Return how many phrases a pack must find: only the first of those that end the output."""
        return planted_in(self.text, PHRASES[:BLOCKED] if ends else PHRASES)


@dataclass(frozen=True, slots=True)
class Played:
    """The outputs of some requests, in their order."""

    outputs: list[Output]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(output.tokens for output in self.outputs) / self.wall_s

    @property
    def ttft_p50_s(self) -> float:
        return quantile([output.ttft_s for output in self.outputs], 0.5)

    @property
    def itl_s(self) -> float:
        """The mean time of a token after the first."""
        tokens = sum(output.tokens - output.first_tokens for output in self.outputs)
        return sum(self.gaps_s) / tokens

    @property
    def gaps_s(self) -> list[float]:
        return [gap for output in self.outputs for gap in output.gaps_s]


async def receive(stub: Stub, key: Metadata, request: Planned) -> Output:
    found, began_s = Output(), time.perf_counter()
    last_s = 0.0
    call = stub.Generate(pb.GenerateRequest(generation=request.generation), metadata=key, timeout=TIMEOUT_S)
    async for event in call:
        if event.HasField("chunk"):
            now_s = time.perf_counter()
            if last_s:
                found.gaps_s.append(now_s - last_s)
            else:
                found.ttft_s, found.first_tokens = now_s - began_s, len(event.chunk.ids)
            last_s = now_s
            found.text += event.chunk.text
            found.tokens += len(event.chunk.ids)
        elif event.HasField("finished"):
            found.resumes = event.finished.resumes
            found.reason = event.finished.choices[0].finish_reason
    return found


async def play(stub: Stub, key: Metadata, requests: Sequence[Planned], at_once: int = STREAMS) -> Played:
    """Send the requests by a closed loop of clients; return once all ended."""
    outputs = [Output()] * len(requests)
    numbers = iter(range(len(requests)))

    async def client() -> None:
        for number in numbers:
            outputs[number] = await receive(stub, key, requests[number])

    began_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return Played(outputs, time.perf_counter() - began_s)


async def by_variant(stub: Stub, stack: SafetyStack, requests: Sequence[Planned]) -> dict[str, list[Output]]:
    """Return the outputs of each variant, which take turns at the requests."""
    found: dict[str, list[Output]] = {variant: [] for variant in VARIANTS}
    size = 2 * STREAMS
    for number, first in enumerate(range(0, len(requests), size)):
        for variant in _turn(number):
            played = await play(stub, stack.keys[variant], requests[first : first + size])
            found[variant] += played.outputs
    return found


def _turn(number: int) -> tuple[str, ...]:
    place = number % len(VARIANTS)
    return VARIANTS[place:] + VARIANTS[:place]


async def delivered(stub: Stub, stack: SafetyStack, count: int) -> dict[str, float]:
    """Return what the packs let through of planted phrases, and what else they changed."""
    requests = planted(MODEL, count)
    outputs = await by_variant(stub, stack, requests)
    offered, by_form = 0, dict[str, list[int]]()
    for place, request in enumerate(requests):
        emitted = outputs["none"][place].phrases(ends=request.ends)
        emitted = min(emitted, 1) if request.ends else emitted
        if request.ends and emitted and outputs["none"][place].reason == common_pb2.FINISH_REASON_FILTERED:
            raise SystemExit("a request without a pack was filtered")
        row = by_form.setdefault(request.form, [0, 0])
        for variant in VARIANTS[1:]:
            offered += emitted
            row[0] += emitted
            row[1] += planted_in(outputs[variant][place].text, PHRASES)
    for form, (emitted, passed) in by_form.items():
        print(f"{form}: {emitted} offered, {passed} delivered", flush=True)
    found = await by_variant(stub, stack, tuple(near_misses(MODEL, count // 4)))
    return {
        "planted": offered,
        "unsafe_delivered": sum(row[1] for row in by_form.values()),
        "near_misses": len(found["none"]),
        "false_blocks": _changed(found),
    }


def _changed(outputs: dict[str, list[Output]]) -> int:
    """Return how many outputs without a phrase differ from those of the tenant without a pack."""
    found = 0
    for variant in VARIANTS[1:]:
        for mine, other in zip(outputs["none"], outputs[variant], strict=True):
            if not planted_in(mine.text, PHRASES) and mine.text != other.text:
                found += 1
                print(f"{variant} changed {mine.text!r} to {other.text!r}", flush=True)
    return found


async def cost(stub: Stub, stack: SafetyStack, rounds: int, per_round: int) -> dict[str, float]:
    """Return what the packs cost, over rounds in which the variants take turns."""
    played: dict[str, list[Played]] = {variant: [] for variant in VARIANTS}
    verdicts_s: list[float] = []
    changed = 0
    for number in range(rounds):
        requests = clean(MODEL, number * per_round, per_round)
        for variant in _turn(number):
            async with timed_verdicts(stub, stack.keys[variant], verdicts_s if variant == "whole" else None):
                played[variant].append(await play(stub, stack.keys[variant], requests))
        changed += _changed({variant: played[variant][-1].outputs for variant in VARIANTS})
        shown = ", ".join(
            f"{variant} {each[-1].tokens_per_s:.0f} tokens/s, TTFT {each[-1].ttft_p50_s * 1e3:.0f} ms, "
            f"ITL p95 {quantile(each[-1].gaps_s, 0.95) * 1e3:.1f} ms"
            for variant, each in played.items()
        )
        print(f"round {number + 1} of {rounds}: {shown}", flush=True)
    return {"false_blocks": changed, **_ratios(played, statistics.median(verdicts_s))}


def _ratios(played: dict[str, list[Played]], verdict_s: float) -> dict[str, float]:
    def median(figure: Callable[[Played], float], variant: str) -> float:
        pairs = zip(played[variant], played["none"], strict=True)
        return statistics.median(figure(mine) / figure(other) for mine, other in pairs)

    def itl_p95_s(one: Played) -> float:
        return quantile(one.gaps_s, 0.95)

    added_s = [
        mine.ttft_p50_s - other.ttft_p50_s
        for mine, other in zip(played["whole"], played["none"], strict=True)
    ]
    ratio = median(lambda one: one.tokens_per_s, "whole")
    window_s = WINDOW_TOKENS * statistics.median(one.itl_s for one in played["none"]) / ratio
    return {
        "added_ttft_p50_ms": round(statistics.median(added_s) * 1e3, 1),
        "window_ms": round(window_s * 1e3, 1),
        "verdict_p50_ms": round(verdict_s * 1e3, 1),
        "ttft_bound_ms": round((window_s + verdict_s) * 1e3, 1),
        "itl_p95_ratio_light": round(median(itl_p95_s, "light"), 3),
        "itl_p95_ratio": round(median(itl_p95_s, "whole"), 3),
        "tokens_per_s_ratio_light": round(median(lambda one: one.tokens_per_s, "light"), 3),
        "tokens_per_s_ratio": round(ratio, 3),
    }


@asynccontextmanager
async def timed_verdicts(stub: Stub, key: Metadata, taken_s: list[float] | None) -> AsyncIterator[None]:
    """Time single verdicts on a text of an output's length while the block runs, into ``taken_s``."""

    async def sample(into_s: list[float]) -> None:
        request = pb.ModerateRequest(inputs=["def push(self, item): return item\n" * 12], outputs=True)
        while True:
            began_s = time.perf_counter()
            await stub.Moderate(request, metadata=key, timeout=TIMEOUT_S)
            into_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(SAMPLED_S)

    task = None if taken_s is None else asyncio.get_running_loop().create_task(sample(taken_s))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def resumed(stub: Stub, stack: SafetyStack, count: int, kills: Sequence[str]) -> dict[str, float]:
    """Return how many redacted outputs came out the same although their worker was killed midway."""
    requests = tuple(long_redacted(MODEL, count))
    key = stack.keys["whole"]
    whole = await play(stub, key, requests)
    if not all(output.text.count("[redacted]") for output in whole.outputs):
        raise SystemExit("an output that must be redacted is not")
    interrupted = same = 0
    for worker in kills:
        await asyncio.to_thread(stack.replicas, 2)
        playing = asyncio.get_running_loop().create_task(play(stub, key, requests))
        await asyncio.sleep(KILL_AFTER_S)
        stack.kill_worker(worker)
        again = await playing
        pairs = [each for each in zip(whole.outputs, again.outputs, strict=True) if each[1].resumes]
        interrupted += len(pairs)
        for one, other in pairs:
            same += one.text == other.text
            if one.text != other.text:
                print(f"{worker} killed: {one.text!r} became {other.text!r}, {other.reason}", flush=True)
        print(f"{worker} killed: {len(pairs)} of {count} resumed", flush=True)
    if not interrupted:
        raise SystemExit("no output was resumed: the kills came too late")
    return {"resumed": interrupted, "identical_resume_ratio": round(same / interrupted, 4)}


async def measure(stack: SafetyStack, options: argparse.Namespace) -> dict[str, float]:
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for variant in VARIANTS:
            await play(stub, stack.keys[variant], clean(MODEL, 0, STREAMS))
        found = await cost(stub, stack, options.rounds, options.requests)
        print(found, flush=True)
        safe = await delivered(stub, stack, options.planted)
        safe["false_blocks"] += found["false_blocks"]
        print(safe, flush=True)
        await asyncio.to_thread(stack.replicas, 2)
        return {**found, **safe, **await resumed(stub, stack, STREAMS, ("worker-0", "worker-1"))}


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
        figures = uvloop.run(measure(stack, options))
    print("RESULT", json.dumps(figures))
    if figures["unsafe_delivered"] or figures["false_blocks"] or figures["identical_resume_ratio"] < 1:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
