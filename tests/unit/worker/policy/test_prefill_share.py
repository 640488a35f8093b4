"""How prefills share a step: whatever comes, all finish, and a short one waits for shorter ones only."""

from __future__ import annotations

from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.policy.prefill import OLDEST_RATIO, PrefillClaim, shares

claims_lists = st.lists(st.tuples(st.integers(1, 5000), st.integers(-3, 2)), min_size=1, max_size=12)


def _claims(drawn: list[tuple[int, int]]) -> list[PrefillClaim]:
    return [PrefillClaim(tokens, (priority, arrival)) for arrival, (tokens, priority) in enumerate(drawn)]


@settings(max_examples=400, deadline=None)
@given(claims_lists, st.integers(0, 2048))
def test_a_step_is_used_and_nobody_but_the_oldest_passes_a_shorter_one(
    drawn: list[tuple[int, int]], budget: int
) -> None:
    claims = _claims(drawn)
    taken = shares(claims, budget)
    assert all(0 <= tokens <= claim.tokens for tokens, claim in zip(taken, claims, strict=True))
    assert sum(taken) == min(budget, sum(claim.tokens for claim in claims))
    if budget:
        assert taken[0] >= min(claims[0].tokens, max(1, int(budget * OLDEST_RATIO)))
    short = [claim.rank for claim, tokens in zip(claims, taken, strict=True) if tokens < claim.tokens]
    if short:
        first_short = min(short)
        beyond = [
            tokens for claim, tokens in zip(claims[1:], taken[1:], strict=True) if claim.rank > first_short
        ]
        assert not any(beyond)


arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 3000), st.integers(-1, 1)), min_size=1, max_size=15
)


@settings(max_examples=300, deadline=None)
@given(arrivals, st.integers(1, 256))
def test_every_prefill_finishes_within_its_bound(drawn: list[tuple[int, int, int]], budget: int) -> None:
    """The bound of the module: steps <= ceil((own + before it in line meanwhile) / (budget - share))."""
    pending = sorted(drawn)
    total = sum(tokens for _, tokens, _ in pending)
    waiting: dict[int, list[int]] = {}  # arrival number: tokens left, priority
    came: dict[int, int] = {}
    passed: dict[int, int] = {}  # tokens of others that went before it in line
    own: dict[int, int] = {}
    number = step = 0
    while pending or waiting:
        while pending and pending[0][0] <= step:
            _, tokens, priority = pending.pop(0)
            waiting[number], came[number], passed[number], own[number] = [tokens, priority], step, 0, tokens
            number += 1
        numbers = list(waiting)
        claims = [PrefillClaim(waiting[each][0], (waiting[each][1], each)) for each in numbers]
        taken = shares(claims, budget)
        ranks = dict(zip(numbers, (claim.rank for claim in claims), strict=True))
        oldest = min(numbers, default=-1)
        for each, tokens in zip(numbers, taken, strict=True):
            for other in numbers:
                if other != each and ranks[each] < ranks[other]:
                    passed[other] += tokens
            waiting[each][0] -= tokens
        step += 1
        for each in numbers:
            if not waiting[each][0]:
                line = budget - max(1, int(budget * OLDEST_RATIO))
                if each != oldest and line > 0:
                    assert step - came[each] <= ceil((own[each] + passed[each]) / line)
                del waiting[each]
        assert step <= 31 + total, "it does not end"


def test_a_short_prompt_is_done_in_the_step_it_comes_in_beside_a_long_one() -> None:
    long, short = PrefillClaim(100_000, (-3, 0)), PrefillClaim(50, (-2, 1))
    assert shares([long, short], 512) == [462, 50]


def test_a_flood_of_short_prompts_leaves_the_long_one_its_share() -> None:
    flood = [PrefillClaim(50, (-2, arrival)) for arrival in range(1, 100)]
    assert shares([PrefillClaim(100_000, (-2, 0)), *flood], 512)[0] == 128


def test_of_equal_lengths_the_higher_class_goes_first() -> None:
    claims = [PrefillClaim(4000, (-2, 0)), PrefillClaim(300, (-1, 1)), PrefillClaim(300, (-3, 2))]
    assert shares(claims, 400) == [100, 0, 300]
