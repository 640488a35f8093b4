"""The budget follows what steps take, whatever the device is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.policy.prefill import PrefillBudget

TARGET_S = 0.05
AIM_S = 0.045  # what it steers to


def settle(budget: PrefillBudget, base_s: float, token_s: float, *, steps: int = 80) -> float:
    """Return what a step takes once the budget has followed a device for so many steps."""
    for _ in range(steps):
        tokens = budget.tokens
        budget.measured(tokens, base_s + token_s * tokens)
    return base_s + token_s * budget.tokens


@settings(max_examples=300, deadline=None)
@given(st.floats(0.0001, 0.04), st.floats(1e-6, 1e-3), st.sampled_from([64, 512, 8192]), st.floats(0.0, 10.0))
def test_a_step_nears_the_target_from_any_start(
    base_s: float, token_s: float, most: int, full_step_s: float
) -> None:
    budget = PrefillBudget(TARGET_S, most_tokens=most, full_step_s=full_step_s)
    step_s = settle(budget, base_s, token_s, steps=300)
    floor = max(16, most // 64)
    if base_s + token_s * most <= AIM_S:
        assert budget.tokens == most
    elif base_s + token_s * floor >= AIM_S:  # the floor keeps the prefill moving
        light_s = base_s + token_s * floor
        assert floor <= budget.tokens <= max(floor, (1.25 * light_s - base_s) / token_s + 1)
    else:
        assert step_s <= AIM_S * 1.01 + token_s
        assert step_s >= AIM_S * 0.95 - token_s


def test_it_follows_a_device_that_changes() -> None:
    budget = PrefillBudget(TARGET_S, most_tokens=8192)
    assert settle(budget, 0.005, 20e-6) == pytest.approx(AIM_S, rel=0.02)
    assert settle(budget, 0.005, 60e-6) == pytest.approx(AIM_S, rel=0.02)
    assert settle(budget, 0.030, 20e-6) == pytest.approx(AIM_S, rel=0.02)


def test_a_changed_target_is_reached_from_either_side() -> None:
    budget = PrefillBudget(TARGET_S, most_tokens=8192)
    settle(budget, 0.005, 20e-6)
    before = budget.tokens
    budget.aim(2 * TARGET_S)
    assert budget.tokens > 1.9 * before
    assert settle(budget, 0.005, 20e-6) == pytest.approx(2 * AIM_S, rel=0.02)
    budget.aim(TARGET_S / 2)
    assert budget.tokens < before
    assert settle(budget, 0.005, 20e-6) == pytest.approx(AIM_S / 2, rel=0.02)


def test_one_slow_step_costs_half_of_it_at_most() -> None:
    budget = PrefillBudget(TARGET_S, most_tokens=1024)
    budget.measured(1024, 30.0)
    assert budget.tokens == 512


def test_a_step_that_left_its_budget_unused_says_nothing() -> None:
    budget = PrefillBudget(TARGET_S, most_tokens=1024)
    for _ in range(50):
        budget.measured(100, 0.04)
        budget.measured(0, 0.01)
    assert budget.tokens == 1024


def test_decodes_that_miss_the_target_alone_do_not_stop_the_prefill() -> None:
    budget = PrefillBudget(TARGET_S, most_tokens=1024)
    for _ in range(100):  # 0.2 s whatever is prefilled
        budget.measured(budget.tokens, 0.2)
    assert budget.tokens == 1024


def test_it_stays_within_bounds_whatever_it_is_told() -> None:
    rng = random.Random(7)
    budget = PrefillBudget(TARGET_S, most_tokens=1024)
    for _ in range(5000):
        budget.measured(rng.choice([0, 1, 16, 300, 1024, 5000]), rng.choice([0.0, 1e-9, 0.01, 0.1, 1e6]))
        assert 16 <= budget.tokens <= 1024


@pytest.mark.parametrize(("target_s", "most"), [(0.0, 10), (-1.0, 10), (float("nan"), 10), (0.1, 0)])
def test_nonsense_is_refused(target_s: float, most: int) -> None:
    with pytest.raises(ValueError, match="no budget"):
        PrefillBudget(target_s, most_tokens=most)
