"""What the engine with vLLM's ranks must keep: resumes, ranks, families, and how soon a lost rank ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import psutil

from bench.engines.load import Request
from bench.engines.own import THROUGHPUT, OwnEngine, Stream
from bench.engines.runner import RunnerFailed
from services.worker.engine_protocol import EngineConfig

SEQUENCES: Final = 24
TOKENS: Final = 24
CONFIG: Final = msgspec.structs.replace(
    THROUGHPUT, executor="vllm", threads=1, block_size=32, kv_memory_bytes=64 * 1024**2, token_budget=96
)


def configured(ranks: int = 1) -> EngineConfig:
    return msgspec.structs.replace(CONFIG, tensor_parallel=ranks, threads=ranks)


def prompts(vocabulary: int, count: int = SEQUENCES) -> list[list[int]]:
    rng = Random(5)
    return [[rng.randrange(5, vocabulary) for _ in range(rng.randint(20, 60))] for _ in range(count)]


def outputs(
    engine: OwnEngine,
    given: Sequence[list[int]],
    cuts: Sequence[Sequence[int]] = (),
    tokens: int = TOKENS,
    *,
    drawn: float = 0.8,
) -> list[list[int]]:
    """Return what prompts are continued with together, after what ``cuts`` have.

    ``drawn``: the temperature of every other one.
    """
    streams: list[Stream] = []
    for place, prompt in enumerate(given):
        before = list(cuts[place]) if cuts else []
        stream = engine.submit(Request(prompt, tokens), produced=before, temperature=drawn * (place % 2))
        stream.tokens += before
        streams.append(stream)
    while any(stream.is_live for stream in streams):
        engine.step()
    return [stream.tokens for stream in streams]


def alone(engine: OwnEngine, given: Sequence[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    """Return the same, with one prompt at a time in the engine."""
    found = []
    for place, prompt in enumerate(given):
        stream = engine.submit(Request(prompt, tokens), temperature=0.8 * (place % 2))
        while stream.is_live:
            engine.step()
        found.append(stream.tokens)
    return found


def resumed(checkpoint: Path, python: str, vocabulary: int) -> tuple[float, list[list[int]]]:
    """Return the part of streams cut anywhere that end as the undisturbed ones, and these."""
    with OwnEngine.started(checkpoint, configured(), python=python) as engine, engine.resumed():
        given = prompts(vocabulary)
        whole = alone(engine, given)
        rng = Random(7)
        cut = [tokens[: rng.randint(1, TOKENS - 1)] for tokens in whole]
        again = outputs(engine, given, cut)
    return sum(mine == other for mine, other in zip(whole, again, strict=True)) / len(whole), whole


def two_ranks(
    checkpoint: Path, python: str, vocabulary: int, expected: list[list[int]]
) -> tuple[bool, float]:
    """Return whether two ranks produce the same, and after how many seconds a killed one has ended it."""
    with OwnEngine.started(checkpoint, configured(2), python=python) as engine, engine.resumed():
        same = outputs(engine, prompts(vocabulary)) == expected
        for prompt in prompts(vocabulary):
            engine.submit(Request(prompt, 400))
        for _ in range(8):
            engine.step()
        # The last child; the first may be the one that tracks shared memory.
        rank = max(psutil.Process(engine.pid).children(), key=lambda each: each.create_time())
        killed_s = time.perf_counter()
        os.kill(rank.pid, signal.SIGKILL)
        try:
            while True:
                engine.step()
        except RunnerFailed:  # its connection is closed
            return same, time.perf_counter() - killed_s


def family_equal(folder: Path, python: str) -> bool:
    """Return whether a family's checkpoint is continued as transformers does: alone, in company, resumed."""
    made = msgspec.json.decode((folder / "expected.json").read_bytes(), type=Expected)
    with OwnEngine.started(folder, configured(), python=python) as engine, engine.resumed():
        tokens = len(made.outputs[0])
        found = [engine.generate([Request(prompt, tokens)])[0].tokens for prompt in made.prompts]
        company = [stream.tokens for stream in engine.generate([Request(p, tokens) for p in made.prompts])]
        cuts = [
            output[: 1 + place * tokens // len(made.outputs)] for place, output in enumerate(made.outputs)
        ]
        again = outputs(engine, made.prompts, cuts, tokens, drawn=0.0)
    return found == company == again == made.outputs


class Expected(msgspec.Struct, frozen=True):
    """What transformers continues the prompts with."""

    prompts: list[list[int]]
    outputs: list[list[int]]
