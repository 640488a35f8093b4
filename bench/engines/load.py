"""The requests of an engine benchmark, as token ids: the same prompts and lengths for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

VOCABULARY: Final = 32000
FIRST_PLAIN_ID: Final = 3  # those below are the usual ids of unknown, begin and end
REQUESTS: Final = 32
PROMPT_TOKENS: Final = (64, 512)
OUTPUT_TOKENS: Final = (16, 128)


@dataclass(frozen=True, slots=True)
class Request:
    """``output_tokens`` are produced greedily, end-of-sequence ignored. ``root`` 0: no prefix cache."""

    prompt: list[int]
    output_tokens: int
    root: int = 0


def workload(seed: int = 0) -> tuple[Request, ...]:
    """Return 32 requests that arrive at once; with seed 0, 9,359 prompt and 2,411 output tokens."""
    rng = Random(seed)
    requests = []
    for _ in range(REQUESTS):
        prompt_tokens, output_tokens = rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)
        requests.append(Request(random_ids(rng, prompt_tokens), output_tokens))
    return tuple(requests)


def random_ids(rng: Random, count: int) -> list[int]:
    """Return plain token ids, each drawn alone: nothing in them repeats."""
    return [rng.randint(FIRST_PLAIN_ID, VOCABULARY - 1) for _ in range(count)]


def warm_up(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return a short version of a load: what an engine sets up at its first use is then set up."""
    return tuple(Request(request.prompt, min(request.output_tokens, 4)) for request in requests[:4])


def prompt_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.prompt) for request in requests)


def output_tokens(requests: Sequence[Request]) -> int:
    return sum(request.output_tokens for request in requests)
