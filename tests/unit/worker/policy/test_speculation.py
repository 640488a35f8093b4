"""How many tokens to propose, on synthetic streams: what is lost and gained, and how soon a shift is seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.worker.policy.speculation import SpeculationPolicy, Verified

BASE_S = 0.01  # what a step without rows takes
PREFILL_S = 0.02  # and prompts beside it
MOST = 8

Acceptance = Callable[[int], float]  # by step


@dataclass
class Stream:
    """Sequences that decode for ever. ``row_ratio``: what a row takes over what a step without rows takes."""

    sequences: int
    row_ratio: float
    acceptance: Acceptance
    noise: float = 0.0
    proposing_ratio: float = 0.0  # what asking for one sequence takes
    found: float = 1.0  # how often a proposer has anything
    life: int = 1 << 30  # steps of a sequence
    prefills: int = 0  # one step in so many takes in prompts too; 0: none
    seed: int = 0
    policy: SpeculationPolicy = field(default_factory=lambda: SpeculationPolicy(most_tokens=MOST))
    proposed: list[int] = field(default_factory=list)  # by step
    accepted: list[int] = field(default_factory=list)
    took_s: float = 0.0
    prefilling_s: float = 0.0

    def run(self, steps: int) -> None:
        rng = random.Random(self.seed)
        for step in range(steps):
            generation, begins = divmod(step, self.life)
            handles = [generation * self.sequences + index for index in range(self.sequences)]
            if begins == 0:
                for handle in handles:
                    self.policy.forget(handle - self.sequences)
            prefills = self.prefills > 0 and step % self.prefills == 0
            may = self.policy.may_propose
            counts = self.policy.counts(handles, most_rows=1000, prefills=prefills) if may else {}
            assert all(1 <= count <= MOST for count in counts.values())
            verified = [
                Verified(handles[index], count, self._accepted(rng, count, self.acceptance(step)))
                for index, count in counts.items()
                if rng.random() < self.found
            ]
            self._measure(rng, verified, len(counts) * self.proposing_ratio * BASE_S, prefills)

    def _accepted(self, rng: random.Random, count: int, acceptance: float) -> int:
        return next((place for place in range(count) if rng.random() >= acceptance), count)

    def _measure(
        self, rng: random.Random, verified: list[Verified], proposing_s: float, prefills: bool
    ) -> None:
        proposed = sum(each.proposed for each in verified)
        step_s = self.step_s(self.sequences + proposed)
        noisy_s = max(0.2, 1.0 + self.noise * rng.gauss(0.0, 1.0)) * step_s
        prefill_s = PREFILL_S if prefills else 0.0
        self.policy.measured(
            self.sequences, verified, step_s=noisy_s + prefill_s, proposing_s=proposing_s, prefilled=prefills
        )
        self.proposed.append(proposed)
        self.accepted.append(sum(each.accepted for each in verified))
        self.took_s += step_s + prefill_s + proposing_s
        self.prefilling_s += prefill_s

    def step_s(self, rows: int) -> float:
        return BASE_S * (1.0 + self.row_ratio * rows)

    @property
    def time_ratio(self) -> float:
        """What it took over what the same tokens take one at a time."""
        tokens = len(self.proposed) * self.sequences + sum(self.accepted)
        plain_s = self.step_s(self.sequences) * tokens / self.sequences
        return self.took_s / (plain_s + self.prefilling_s)


SEQUENCES = st.sampled_from([1, 2, 5, 16, 64, 150])
ROW_RATIOS = st.sampled_from([0.001, 0.01, 0.05, 0.2, 1.0])
COMMON = settings(max_examples=30, deadline=None)


@COMMON
@given(
    sequences=SEQUENCES,
    row_ratio=ROW_RATIOS,
    noise=st.sampled_from([0.0, 0.03]),
    life=st.sampled_from([15, 80, 1 << 30]),
    proposing_ratio=st.sampled_from([0.0, 0.001]),
    found=st.sampled_from([0.1, 1.0]),
    prefills=st.sampled_from([0, 2, 3]),
    seed=st.integers(0, 1000),
)
# The first step is slower than those after it: beside it rows seem to cost nothing.
@example(
    sequences=16, row_ratio=0.01, noise=0.03, life=15, proposing_ratio=0.0, found=1.0, prefills=0, seed=2
)
@example(
    sequences=64,
    row_ratio=0.01,
    noise=0.03,
    life=1 << 30,
    proposing_ratio=0.001,
    found=1.0,
    prefills=0,
    seed=811,
)
def test_where_nothing_is_accepted_little_is_lost(
    sequences: int,
    row_ratio: float,
    noise: float,
    life: int,
    proposing_ratio: float,
    found: float,
    prefills: int,
    seed: int,
) -> None:
    stream = Stream(
        sequences, row_ratio, lambda step: 0.0, noise, proposing_ratio, found, life, prefills, seed
    )
    stream.run(150)
    assert stream.time_ratio <= 1.03


@COMMON
@given(sequences=SEQUENCES, row_ratio=ROW_RATIOS, acceptance=st.floats(0.0, 1.0), seed=st.integers(0, 1000))
@example(sequences=64, row_ratio=1.0, acceptance=0.7490831890272415, seed=647)
def test_whatever_is_accepted_little_is_lost(
    sequences: int, row_ratio: float, acceptance: float, seed: int
) -> None:
    stream = Stream(sequences, row_ratio, lambda step: acceptance, 0.02, seed=seed)
    stream.run(150)
    assert stream.time_ratio <= 1.03


# Where a row costs a third of a token and more, there is little to gain.
CHEAP = [(1, 0.001), (1, 0.05), (4, 0.01), (4, 0.05), (16, 0.01), (64, 0.003)]


@pytest.mark.parametrize(("sequences", "row_ratio"), CHEAP)
def test_text_that_begins_to_repeat_is_seen_within_50_steps(sequences: int, row_ratio: float) -> None:
    stream = Stream(sequences, row_ratio, lambda step: 0.95 if step >= 200 else 0.0, 0.02)
    stream.run(300)
    settled = sum(stream.accepted[250:])
    lost = sum(stream.proposed[150:200]) * stream.row_ratio
    assert lost <= 0.03 * 50 * (1.0 + row_ratio * sequences)
    assert settled / 50 / sequences > 1.0, "two tokens a step and sequence"


@pytest.mark.parametrize(("sequences", "row_ratio"), CHEAP)
def test_text_that_stops_repeating_is_seen_within_50_steps(sequences: int, row_ratio: float) -> None:
    stream = Stream(sequences, row_ratio, lambda step: 0.95 if step < 200 else 0.0, 0.02)
    stream.run(300)
    lost = sum(stream.proposed[250:]) * stream.row_ratio
    assert lost <= 0.03 * 50 * (1.0 + row_ratio * sequences)
    assert sum(stream.proposed[150:200]) >= 50 * 2 * sequences


def test_of_several_sequences_those_that_repeat_speculate() -> None:
    policy = SpeculationPolicy(most_tokens=MOST)
    handles = list(range(10))
    whole = 0  # steps in which all that repeat are asked for all they can have
    for step in range(120):
        counts = policy.counts(handles, most_rows=100) if policy.may_propose else {}
        verified = [
            Verified(handles[index], count, count if handles[index] < 3 else 0)
            for index, count in counts.items()
        ]
        whole += step >= 60 and all(counts.get(handle) == MOST for handle in range(3))
        rows = len(handles) + sum(counts.values())
        policy.measured(10, verified, step_s=0.01 + 0.0005 * rows, proposing_s=0.0, prefilled=False)
    assert all(policy.acceptance(handle) > 0.9 for handle in range(3))
    assert all(policy.acceptance(handle) < 0.4 for handle in range(3, 10))
    assert whole >= 55, "of 60, some of which show what a plain step takes"


def test_the_rows_of_a_step_are_a_bound() -> None:
    policy = SpeculationPolicy(most_tokens=MOST)
    for _ in range(50):
        policy.measured(
            4, [Verified(h, 8, 8) for h in range(4)], step_s=0.01, proposing_s=0.0, prefilled=False
        )
    assert sum(policy.counts(range(4), most_rows=100).values()) == 4 * MOST
    assert sum(policy.counts(range(4), most_rows=11).values()) == 11
    assert sum(policy.counts(range(4), most_rows=0).values()) == 0


def test_steps_that_prefill_say_nothing_of_what_a_row_costs() -> None:
    policy = SpeculationPolicy(most_tokens=MOST)
    policy.measured(1, [], step_s=5.0, proposing_s=0.0, prefilled=True)
    assert not policy.may_propose
    policy.measured(1, [], step_s=0.01, proposing_s=0.0, prefilled=False)
    assert policy.may_propose


def test_nothing_is_kept_of_a_sequence_that_is_gone() -> None:
    policy = SpeculationPolicy(most_tokens=MOST)
    policy.measured(1, [], step_s=0.01, proposing_s=0.0, prefilled=False)
    before = policy.acceptance(1)
    for _ in range(3):
        policy.measured(1, [Verified(1, 2, 2)], step_s=0.01, proposing_s=0.0, prefilled=False)
    known = policy.acceptance(1)
    policy.forget(1)
    assert before < policy.acceptance(1) < known  # what all have shown stays


def test_no_proposals_are_no_speculation() -> None:
    with pytest.raises(ValueError, match="proposal"):
        SpeculationPolicy(most_tokens=0)
