"""Measurements of our engine: its mechanisms, each against the engine without it, and where its time goes."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import msgspec

from bench.engines.load import Request, output_tokens, random_ids, workload
from bench.engines.own import THROUGHPUT, OwnEngine, Stream
from bench.engines.rounds import compare
from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine.core import Engine
from services.worker.engine.load.loading import load
from services.worker.engine_protocol import EngineConfig, Submit

SMALL_BATCH: Final = 8  # of static batching, and the most that run at once beside it
SHOWN: Final = 16  # functions of a profile
RECOMPUTED: Final = Request(random_ids(Random(1), 64), 64)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds. TTFT from the submission of a request, ITL over all gaps between its tokens."""

    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float

    def line(self) -> str:
        return (
            f"{self.tokens_per_s:.1f} output tokens/s, TTFT p50 {1e3 * self.ttft_p50_s:.0f} ms, "
            f"p99 {1e3 * self.ttft_p99_s:.0f} ms, ITL p50 {1e3 * self.itl_p50_s:.1f} ms, "
            f"p99 {1e3 * self.itl_p99_s:.1f} ms"
        )


def latencies(streams: Sequence[Stream]) -> Latencies:
    """Return the figures of streams that were submitted together."""
    ended_s = max(stream.received_s[-1] for stream in streams)
    ttfts = [stream.ttft_s for stream in streams]
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    return Latencies(
        tokens_per_s=sum(len(stream.tokens) for stream in streams) / (ended_s - streams[0].submitted_s),
        ttft_p50_s=median(ttfts),
        ttft_p99_s=quantile(ttfts, 0.99),
        itl_p50_s=median(gaps),
        itl_p99_s=quantile(gaps, 0.99),
    )


def quantile(values: Sequence[float], ratio: float) -> float:
    """Return the value below which ``ratio`` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * ratio))]


def continuous_over_static(checkpoint: Path, requests: Sequence[Request], *, rounds: int) -> float:
    """Return tokens/s of continuous over those of static batching, at most ``SMALL_BATCH`` at once in both.

    Static: the next batch starts when the last of the present one has ended. Places of those that ended
    before it stay empty; a batch that pads them computes more.
    """
    config = msgspec.structs.replace(THROUGHPUT, max_sequences=SMALL_BATCH)
    ratios = []
    with OwnEngine.started(checkpoint, config) as engine:
        for _ in range(rounds):
            continuous = engine.run(requests).tokens_per_s
            parts = [engine.run(batch) for batch in batches(requests, SMALL_BATCH)]
            ratios.append(continuous * sum(part.wall_s for part in parts) / output_tokens(requests))
    return median(ratios)


def batches(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def exact_over_free(checkpoint: Path, *, rounds: int) -> float:
    """Return tokens/s of mode "exact", where company changes nothing, over those of "free", in bfloat16.

    In float32 the two run the same code on a CPU.
    """
    exact = msgspec.structs.replace(THROUGHPUT, dtype="bfloat16", mode="exact")
    free = msgspec.structs.replace(exact, mode="free")
    with OwnEngine.started(checkpoint, exact) as engine, OwnEngine.started(checkpoint, free) as other:
        (entry,) = compare(engine, {"free": other}, workload()[:SMALL_BATCH], rounds=rounds)
    return median(entry.ratios)


def cache_saves(checkpoint: Path, *, rounds: int) -> float:
    """Return the time of one request computed again for each token over its time with the KV cache.

    The prefix cache is off: it would keep the KV of the tokens that are to be computed again.
    """
    config = msgspec.structs.replace(THROUGHPUT, prefix_cache=False)
    ratios = []
    with OwnEngine.started(checkpoint, config) as engine:
        for _ in range(rounds):
            kept = engine.run([RECOMPUTED]).wall_s
            ratios.append(_without_cache(engine, RECOMPUTED) / kept)
    return median(ratios)


def _without_cache(engine: OwnEngine, request: Request) -> float:
    """Each token is that of a new request, whose prompt is all that came before."""
    tokens = list(request.prompt)
    wall_s = 0.0
    for _ in range(request.output_tokens):
        answer = engine.run([Request(tokens, 1)])
        tokens += answer.tokens[0]
        wall_s += answer.wall_s
    return wall_s


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds that each function took by itself over one load, the greatest first."""

    own_s: Mapping[str, float]

    def lines(self) -> list[str]:
        whole_s = sum(self.own_s.values())
        return [f"  {own_s / whole_s:6.1%}  {name}" for name, own_s in list(self.own_s.items())[:SHOWN]]


def profile(checkpoint: Path, config: EngineConfig, requests: Sequence[Request]) -> Profile:
    """Return where one run of the load spends its time, in this process; a run before it is not counted.

    A function's own time includes what it calls in C++ or torch by way of ctypes; calls of torch that the
    interpreter sees are lines of their own.
    """
    engine, _ = load(msgspec.structs.replace(config, model_dir=str(checkpoint)), lambda *_: None)
    _run(engine, requests)
    with cProfile.Profile() as profiler:
        _run(engine, requests)
    counted: Any = pstats.Stats(profiler)
    own_s = {_named(*where): figures[2] for where, figures in counted.stats.items()}
    return Profile(dict(sorted(own_s.items(), key=lambda item: -item[1])))


def _named(file: str, line: int, function: str) -> str:
    return function if file.startswith("~") else f"{Path(file).stem}.{function}:{line}"


def _run(engine: Engine, requests: Sequence[Request]) -> None:
    for handle, request in enumerate(requests):
        count = request.output_tokens
        sampling, limits = Sampling(seed=0, temperature=0.0), OutputLimits(count, ignore_eos=True)
        engine.apply(Submit(handle, Prompt(request.prompt), sampling, limits, count))
    while engine.has_work:
        engine.step()
