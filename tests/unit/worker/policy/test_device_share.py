"""Shares of a step: they sum to it, grow with the work, and follow what was measured."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.worker.policy.device_share import (
    FIT_S,
    PRIOR,
    MeasuredCosts,
    StepCosts,
    StepPrices,
    StepWork,
    attended_before,
    prices,
)

Decode = tuple[int, int]  # rows and length
Chunk = tuple[int, int, int]  # start, end, and how many of its tokens are scored

decode_lists = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 100_000)), max_size=8)
chunk_lists = st.lists(
    st.tuples(st.integers(0, 50_000), st.integers(1, 4096), st.sampled_from([0, 1, 9])).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], min(drawn[1], drawn[2]))
    ),
    max_size=4,
)
durations = st.floats(0.0, 1.0)
unit_costs = st.floats(0.0, 1e-2)
costs = st.builds(StepCosts, *[unit_costs] * 6)


def work_of(decodes: list[Decode], chunks: list[Chunk]) -> StepWork:
    return StepWork(
        len(decodes) + len(chunks),
        sum(rows for rows, _ in decodes),
        sum(length for _, length in decodes),
        sum(end - start for start, end, _ in chunks),
        sum(attended_before(start, end) for start, end, _ in chunks),
        sum(scored for _, _, scored in chunks),
    )


def shares(price: StepPrices, decodes: list[Decode], chunks: list[Chunk]) -> list[float]:
    return [price.decode(*decode) for decode in decodes] + [price.chunk(*chunk) for chunk in chunks]


@settings(max_examples=400, deadline=None)
@example(costs=StepCosts(2e-311, 0.0, 0.0, 0.0, 0.0, 0.0), decodes=[], chunks=[(0, 1, 0)], step_s=1.0)
@given(costs, decode_lists, chunk_lists, durations)
def test_shares_are_not_negative_and_sum_to_the_step(
    costs: StepCosts, decodes: list[Decode], chunks: list[Chunk], step_s: float
) -> None:
    if not decodes and not chunks:
        return
    found = shares(prices(costs, work_of(decodes, chunks), step_s), decodes, chunks)
    assert min(found) >= 0.0
    assert sum(found) == pytest.approx(step_s, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(costs, decode_lists, chunk_lists, st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_does_not_matter(
    costs: StepCosts, decodes: list[Decode], chunks: list[Chunk], rng: random.Random
) -> None:
    if not decodes and not chunks:
        return
    first = prices(costs, work_of(decodes, chunks), 0.1)
    second = prices(costs, work_of(rng.sample(decodes, len(decodes)), chunks[::-1]), 0.1)
    assert first == pytest.approx(second)


@settings(max_examples=200, deadline=None)
@given(costs, decode_lists, chunk_lists, st.integers(0, 5000), st.integers(0, 5000))
def test_more_work_costs_no_less(
    costs: StepCosts, decodes: list[Decode], chunks: list[Chunk], tokens: int, start: int
) -> None:
    price = prices(costs, work_of([*decodes, (1, 100)], chunks), 0.1)
    assert price.decode(1, 100 + tokens) >= price.decode(1, 100)
    assert price.decode(2, 100) >= price.decode(1, 100)
    assert price.chunk(0, 100 + tokens) >= price.chunk(0, 100)
    assert price.chunk(start, start + 100) >= price.chunk(0, 100)
    assert price.chunk(0, 100, 99) >= price.chunk(0, 100)


def test_a_prefill_pays_what_it_adds_to_the_step() -> None:
    """512 prompt tokens add 25.6 ms to a step that takes 13.15 ms with 63 decodes."""
    decodes, step_s = 63, 10e-3 + 63 * 50e-6
    price = prices(PRIOR, StepWork(decodes + 1, decodes, 63_000.0, 512, 0), step_s + 512 * 50e-6)
    assert price.chunk(0, 512) == pytest.approx(512 * 50e-6 + 10e-3 / 64)
    assert decodes * price.decode(1, 1000) == pytest.approx(step_s - 10e-3 / 64)


def test_a_step_of_which_nothing_takes_time_is_shared_all_the_same() -> None:
    price = prices(StepCosts(0.0, 0.0, 0.0, 1.0, 0.0, 0.0), StepWork(2, 2, 20.0), 0.1)
    assert 2 * price.decode(1, 10) == pytest.approx(0.1)


def test_the_costs_follow_the_measured_steps() -> None:
    true = StepCosts(4e-3, 2e-4, 3e-7, 1e-4, 5e-9, 6e-4)
    measured, rng, spent_s = MeasuredCosts(), random.Random(3), 0.0
    while spent_s < 5 * FIT_S:
        decodes = [(1, rng.randint(10, 5000)) for _ in range(rng.randint(1, 64))]
        start = rng.randint(0, 4000)
        size = rng.randint(16, 512)
        scored = rng.choice((0, size))
        chunks = [(start, start + size, scored)] if rng.random() < 0.3 else []
        work = work_of(decodes, chunks)
        step_s = sum(unit * amount for unit, amount in zip(true, (1, *work[1:]), strict=True))
        measured.add(work, step_s * rng.uniform(0.98, 1.02))
        spent_s += step_s
    assert measured.costs[:4] == pytest.approx(true[:4], rel=0.2)
    assert measured.costs.scored_s == pytest.approx(true.scored_s, rel=0.2)


def test_without_a_prefill_a_prompt_token_is_taken_to_cost_what_a_row_does() -> None:
    measured, rng = MeasuredCosts(), random.Random(3)
    for _ in range(1000):
        rows = rng.randint(1, 64)
        measured.add(StepWork(rows, rows, rows * 100.0), 4e-3 + rows * 2e-4)
    assert measured.costs.prefill_s == measured.costs.row_s > 0.0


def test_a_scored_prompt_pays_for_the_head_over_its_rows_and_its_neighbours_do_not() -> None:
    """Of 512 tokens the head takes 3 ms of a step: without it the decodes would pay a part of that."""
    costs = StepCosts(1e-3, 1e-4, 0.0, 1e-5, 0.0, 3e-3 / 512)
    step_s = 1e-3 + 8 * 1e-4 + 512 * 1e-5 + 3e-3
    price = prices(costs, StepWork(9, 8, 800.0, 512, 0, 512), step_s)
    assert price.decode(1, 100) == pytest.approx(1e-4 + 1e-3 / 9)
    assert price.chunk(0, 512, 512) == pytest.approx(512 * 1e-5 + 3e-3 + 1e-3 / 9)


def test_contradictory_samples_change_nothing() -> None:
    measured, rng = MeasuredCosts(), random.Random(3)
    for _ in range(2000):
        measured.add(StepWork(4, 4, 100.0), rng.choice((1e-4, 1e-4, 1e-4, 2.0)))
    assert measured.costs == PRIOR
