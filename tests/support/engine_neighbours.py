"""A request alone and the same one among neighbours that do their worst: not a bit of it may differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import hypothesis
from hypothesis import strategies as st

from tests.support.engine_oracle import (
    CONTEXT,
    Arrival,
    Outcome,
    Run,
    Schedule,
    load_engine,
    prompts,
    schedules,
    settings,
)

VICTIM: Final[tuple[Mapping[str, Any], ...]] = (
    {"logprobs": 100},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.1, "repetition_penalty": 1.2, "logprobs": 0},
)
ALONE: Final = {
    "block_size": 16,
    "kv_blocks": 2 * CONTEXT // 16,
    "token_budget": 512,
    "max_sequences": 4,
    "prefix_cache": False,
    "operators": "native",
}


@dataclass(frozen=True, slots=True)
class Company:
    """A request, and what comes before it, with it and after it: ``others`` holds it as its last arrival."""

    victim: Arrival
    others: Schedule


@st.composite
def companies(draw: st.DrawFn) -> Company:
    """Neighbours begin as it does, are short of blocks, use its blocks and its place before and after it."""
    output = draw(st.integers(4, 14))
    victim = Arrival(0, draw(prompts()), output, draw(st.sampled_from(VICTIM)), seed=77)
    others = draw(schedules())
    at = replace(victim, step=draw(st.integers(0, 12)))
    blocks = -(-(len(victim.prompt) + output) // others.options["block_size"])
    room = max(others.options["kv_blocks"], blocks + draw(st.integers(0, 8)))
    options = {**others.options, "kv_blocks": room, "operators": "native"}
    return Company(victim, Schedule((*others.arrivals, at), options))


def compare_neighbours(folder: Path, *, seed: int, examples: int) -> Counter[str]:
    """Raise AssertionError for a token or a log-probability that company changed; return what went on."""
    counts: Counter[str] = Counter()
    alone_engine = load_engine(folder, ALONE)
    known: dict[str, Outcome] = {}

    @hypothesis.seed(seed)
    @settings(examples)
    @hypothesis.given(companies())
    def check(company: Company) -> None:
        alone = known.setdefault(str(company.victim), Run(alone_engine, (company.victim,)).to_end())
        engine = load_engine(folder, company.others.options)
        among = Run(engine, company.others.arrivals).to_end()
        counts.update(among.counts)
        last = len(company.others.arrivals) - 1
        assert among.tokens[last] == alone.tokens[0]
        assert among.logprobs[last] == alone.logprobs[0]

    check()
    return counts
