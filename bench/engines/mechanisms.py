"""Prefix cache and speculation: what each saves where it can, and what it costs where it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from bench.engines.checkpoints import cycling_checkpoint, next_token
from bench.engines.load import VOCABULARY, Request, random_ids
from bench.engines.own import THROUGHPUT, OwnEngine
from bench.engines.rounds import Compared, compare

ROOT: Final = 7  # of prefix names: one isolation domain
PREFIX_TOKENS: Final = 2000
OWN_TOKENS: Final = 32
FIRST_REQUESTS: Final = 2  # requests of a prefix before it counts as cached
AT_ONCE: Final = 4  # sequences that speculate side by side
OUTPUT_TOKENS: Final = 160
TURNS: Final = 4  # with and without speculation, of each pair of processes
GRAM: Final = 3  # tokens that misleading prompts repeat before they go on differently


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """TTFT in seconds, of a prompt that nothing is known of and of one whose prefix is cached."""

    cold_s: float
    cached_s: float
    cached_tokens: int


def prefix_hits(checkpoint: Path, *, rounds: int) -> list[PrefixHit]:
    """Return one hit per round, each on a prefix of its own, in an engine that does nothing else."""
    found = []
    rng = Random(4)
    with OwnEngine.started(checkpoint) as engine, engine.resumed():
        for _ in range(rounds):
            prefix = random_ids(rng, PREFIX_TOKENS)
            streams = [
                engine.generate([Request([*prefix, *random_ids(rng, OWN_TOKENS)], 1, ROOT)])[0]
                for _ in range(FIRST_REQUESTS + 1)
            ]
            last = streams[-1]
            found.append(PrefixHit(streams[0].ttft_s, last.ttft_s, last.cached_tokens))
    return found


def prefix_ratios(hits: Sequence[PrefixHit]) -> list[float]:
    """Return the rounds' ratios, cached over cold."""
    return [hit.cached_s / hit.cold_s for hit in hits]


def speculation(name: str, folder: Path, *, rounds: int) -> dict[str, Compared]:
    """Return tokens/s with prompt lookup against those without, by what the text is like.

    ``repeats``: the output goes round a cycle that the prompt holds. ``fresh``: no run of tokens comes twice.
    ``misleading``: each run of the output is in the prompt, where it goes on differently.

    Each round has processes of its own, one or the other started first: two of the same configuration differ
    by some percent for as long as they live, by where their memory lies.
    """
    there = cycling_checkpoint(name, folder)
    plain = THROUGHPUT
    proposing = msgspec.structs.replace(plain, speculation="prompt_lookup")
    found = {kind: Compared("without speculation") for kind in texts()}
    for number in range(rounds):
        with contextlib.ExitStack() as undo:
            engines = {
                config: undo.enter_context(OwnEngine.started(there, config))
                for config in ((proposing, plain) if number % 2 else (plain, proposing))
            }
            for kind, requests in texts().items():
                others = {"without speculation": engines[plain]}
                (entry,) = compare(engines[proposing], others, requests, rounds=TURNS)
                found[kind].join(entry)
    return found


def texts() -> dict[str, list[Request]]:
    """Return a load of each kind for a checkpoint that goes on with ``next_token``."""
    rng = Random(5)
    half = VOCABULARY // 2
    starts = [half + number * (half // AT_ONCE) for number in range(AT_ONCE)]
    return {
        "repeats": [Request(walk(rng.randrange(half), 128), OUTPUT_TOKENS) for _ in starts],
        "fresh": [Request([*random_ids(rng, 128), start], OUTPUT_TOKENS) for start in starts],
        "misleading": [Request(misleading(rng, start), OUTPUT_TOKENS) for start in starts],
    }


def walk(token: int, count: int) -> list[int]:
    """Return ``count`` tokens from ``token`` on, as the cycling checkpoint goes on."""
    tokens = [token]
    while len(tokens) < count:
        tokens.append(next_token(tokens[-1]))
    return tokens


def misleading(rng: Random, start: int) -> list[int]:
    """Return a prompt that ends in ``start`` and holds each run of what follows, before some other token."""
    coming = walk(start, OUTPUT_TOKENS + GRAM)
    runs = (coming[place : place + GRAM] for place in range(OUTPUT_TOKENS))
    return [*(token for run in runs for token in (*run, *random_ids(rng, 1))), start]
