"""A request alone and the same one among neighbours that do their worst: not a bit of it may differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import hypothesis
from hypothesis import strategies as st

from services.worker.engine.execute.executor import Batch, Executor, Samples
from tests.support.engine_oracle import (
    CONTEXT,
    HOSTILE,
    MOST_OUTPUT,
    VOCABULARY,
    Arrival,
    Run,
    Schedule,
    load_engine,
    prompts,
    random_ids,
    schedules,
    settings,
)

ALONE: Final = {
    "block_size": 16,
    "kv_blocks": 2 * CONTEXT // 16,
    "token_budget": 512,
    "max_sequences": 4,
    "prefix_cache": False,
    "operators": "native",
}
STOPS: Final = tuple(range(5, VOCABULARY, 3))
BIAS: Final = {7: 3.0, 40: -100.0, 41: 3.0}
# The options of a request, by which it is compared; each is drawn independently.
ASKED: Final[Mapping[str, tuple[Mapping[str, Any], ...]]] = {
    "temperature": ({"temperature": 0.9}, {"temperature": 1.3}),
    "filters": ({"top_p": 0.9}, {"top_k": 7, "min_p": 0.02}),
    "logprobs": ({"logprobs": 100}, {"logprobs": 3}, {"logprobs": 0}),
    "penalties": ({"repetition_penalty": 1.2}, {"frequency_penalty": 0.7, "presence_penalty": -0.4}),
    "bias": ({"logit_bias": BIAS},),
    "min_tokens": ({"min_tokens": 4, "stop_token_ids": STOPS},),
}
BEFORE: Final = ("blocks used before", "seats used before", "recomputed")
HAPPENED: Final = (*ASKED, *BEFORE, "cached", "accepted")


@dataclass(frozen=True, slots=True)
class Company:
    """A request, and what comes before it, with it and after it: ``others`` holds it as its last arrival.

    ``asked`` names what it asks for; ``runs_ahead``: the next step in company is submitted before the tokens
    of the one before are known.
    """

    victim: Arrival
    asked: tuple[str, ...]
    others: Schedule
    runs_ahead: bool = False


@st.composite
def companies(draw: st.DrawFn) -> Company:
    """Neighbours begin as it does, are short of blocks, use its blocks and its place before and after it."""
    output = draw(st.integers(4, 14))
    asked = tuple(name for name in ASKED if draw(st.booleans()))
    sampling = {key: value for name in asked for key, value in draw(st.sampled_from(ASKED[name])).items()}
    victim = Arrival(0, draw(prompts()), output, sampling, seed=77)
    others = draw(schedules())
    step, credit = draw(st.sampled_from((0, 1, 2, 3, 4, 6, 9, 12, 30))), draw(st.sampled_from((0, 0, 3)))
    at = replace(victim, step=step, credit=credit)
    blocks = -(-(len(victim.prompt) + output) // others.options["block_size"])
    room = max(others.options["kv_blocks"], blocks + draw(st.sampled_from((0, 0, 1, 3, 8))))
    options = {**others.options, "kv_blocks": room, "operators": "native"}
    return Company(victim, asked, Schedule((*others.arrivals, at), options), draw(st.booleans()))


LATEST: Final = replace(
    Arrival(0, tuple(random_ids(5, 9)), 14, {"temperature": 0.9, "logprobs": 3}, seed=77), step=1
)
# The youngest of two that have no room for both gives its blocks up.
RECOMPUTED: Final = Company(
    replace(LATEST, step=0),
    (),
    Schedule(
        (Arrival(0, tuple(random_ids(6, 12)), MOST_OUTPUT, HOSTILE[0]), LATEST),
        {"block_size": 4, "kv_blocks": 10, "token_budget": 64, "max_sequences": 2, "operators": "native"},
    ),
)
# One fills the pool and has the only seat, then the other has all of that.
AFTERWARDS: Final = Company(
    replace(LATEST, step=0),
    (),
    Schedule(
        (Arrival(0, tuple(random_ids(7, 16)), 8, HOSTILE[1]), LATEST),
        {"block_size": 4, "kv_blocks": 6, "token_budget": 64, "max_sequences": 1, "operators": "native"},
    ),
)


@dataclass(slots=True)
class Occupancy:
    """Implements ``Executor``: passes batches on, and notes by handle who had its blocks and its seat before.

    A block was used before where another wrote to it last, a seat where another decoded in its place; a
    sequence is recomputed where positions of it are computed that were computed before.
    """

    executor: Executor
    block_size: int
    counts: dict[int, Counter[str]] = field(default_factory=dict)
    _writers: dict[int, int] = field(default_factory=dict)
    _seated: dict[int, int] = field(default_factory=dict)
    _reached: dict[int, int] = field(default_factory=dict)

    @property
    def runs_ahead(self) -> bool:
        return self.executor.runs_ahead

    def submit(self, batch: Batch) -> None:
        """See ``Executor``."""
        spans = [(sequence, len(sequence.tokens) - 1, len(sequence.tokens)) for sequence in batch.decodes]
        spans += [(chunk.sequence, chunk.start, chunk.end) for chunk in batch.prefills]
        for sequence, start, end in spans:
            mine = self.counts.setdefault(sequence.handle, Counter())
            mine["recomputed"] += start < self._reached.get(sequence.handle, 0)
            self._reached[sequence.handle] = end
            for block in sequence.blocks[start // self.block_size : -(-end // self.block_size)]:
                mine["blocks used before"] += self._writers.get(block, sequence.handle) != sequence.handle
                self._writers[block] = sequence.handle
        for seat, sequence in enumerate(batch.decodes):
            before = self._seated.get(seat, sequence.handle)
            self.counts[sequence.handle]["seats used before"] += before != sequence.handle
            self._seated[seat] = sequence.handle
        self.executor.submit(batch)

    def collect(self) -> Samples:
        """See ``Executor``."""
        return self.executor.collect()

    def resize(self, blocks: int) -> None:
        """See ``Executor``."""
        self.executor.resize(blocks)


def compare_neighbours(folder: Path, *, seed: int, examples: int, dtype: str = "float32") -> Counter[str]:
    """Raise AssertionError for anything of a request that company changed; return what went on.

    Counts under the names in ``HAPPENED`` are of the requests that were compared, all others of whole runs.
    """
    counts: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(examples)
    @hypothesis.given(companies())
    def check(company: Company) -> None:
        counts.update(compared(folder, company, dtype))

    for company in (RECOMPUTED, AFTERWARDS):
        counts.update(compared(folder, company, dtype))
    check()
    return counts


def compared(folder: Path, company: Company, dtype: str) -> Counter[str]:
    """Run a request alone, then in its company, each in an engine that did nothing before."""
    alone = Run(load_engine(folder, {**ALONE, "dtype": dtype}), (company.victim,)).to_end()
    options = {**company.others.options, "dtype": dtype}
    watching: list[Occupancy] = []

    def watched(executor: Executor) -> Executor:
        watching.append(Occupancy(executor, options["block_size"]))
        return watching[0]

    engine = load_engine(folder, options, runs_ahead=company.runs_ahead, watched=watched)
    among = Run(engine, company.others.arrivals).to_end()
    last = len(company.others.arrivals) - 1
    assert among.tokens[last] == alone.tokens[0]
    assert among.logprobs.get(last) == alone.logprobs.get(0)
    assert among.reasons[last] == alone.reasons[0]
    counts = Counter({name: among.counts[name] for name in ("mixed steps", "preemptions", "proposed")})
    return counts + among.of[last] + watching[0].counts[last] + Counter(company.asked)
