"""Predicted outputs against exact quantiles, their fallbacks, their correction and their memory."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.output_quantile import (
    OutputHistogram,
    OutputPolicy,
    OutputQuantiles,
    bucket_of,
    edge_of,
)

POLICY = OutputPolicy(quantile=0.8, default_tokens=256, min_samples=10)


@given(st.integers(1, 1 << 20))
def test_a_bucket_holds_its_tokens_within_a_fifth(tokens: int) -> None:
    edge = edge_of(bucket_of(tokens))
    assert tokens <= edge <= max(tokens, math.ceil(tokens * 2**0.25))


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=300), st.sampled_from([0.5, 0.8, 0.9, 0.99]))
def test_the_quantile_is_the_exact_one_or_up_to_a_fifth_more(outputs: list[int], level: float) -> None:
    histogram = OutputHistogram(window=1000)
    for tokens in outputs:
        histogram.note(tokens)
    histogram._known.clear()
    exact = sorted(outputs)[math.ceil(level * len(outputs) - 1e-9) - 1]
    assert exact <= histogram.quantile(level) <= max(exact, math.ceil(exact * 2**0.25))


def test_old_outputs_fade() -> None:
    histogram = OutputHistogram(window=256)
    for _ in range(1000):
        histogram.note(1000)
    for _ in range(1000):
        histogram.note(10)
    assert histogram.quantile(0.8) <= 12
    assert histogram.samples <= 256


def test_few_samples_fall_back_to_the_version_and_then_to_the_default() -> None:
    found = OutputQuantiles(POLICY)
    assert found.predict("a", "v") == 256
    for _ in range(10):
        found.note("b", "v", 20)
    assert found.predict("b", "v") == found.predict("a", "v") == edge_of(bucket_of(20))
    for _ in range(10):
        found.note("a", "v", 500)
    assert found.predict("a", "v") >= 500
    assert found.predict("b", "v") < 30, "each tenant by its own"
    assert found.predict("a", "other") == 256


def test_outputs_beyond_the_prediction_raise_it_and_those_within_lower_it_again() -> None:
    found = OutputQuantiles(POLICY)
    for tokens in range(1, 101):
        found.note("a", "v", tokens)
    before = found.predict("a", "v")
    for _ in range(20):
        found.note("a", "v", 50, predicted_tokens=10)
    assert found.level("v") > POLICY.quantile
    for _ in range(4):
        found.note_preempted("v")
    assert found.level("v") == pytest.approx(POLICY.max_quantile, abs=0.05)
    assert found.predict("a", "v") >= before
    for _ in range(200):
        found.note("a", "v", 5, predicted_tokens=100)
    assert found.level("v") == POLICY.quantile


def test_the_share_of_outputs_beyond_is_what_the_level_promises_when_lengths_grow() -> None:
    """A histogram of the past alone would lag behind; the correction makes up for it."""
    rng, found = Random(1), OutputQuantiles(OutputPolicy(quantile=0.8, min_samples=10))
    beyond = 0
    for number in range(4000):
        predicted = found.predict("a", "v")
        tokens = round(rng.uniform(1, 100) * (1 + number / 1000))
        beyond += tokens > predicted
        found.note("a", "v", tokens, predicted_tokens=predicted)
    assert beyond / 4000 < 0.22


def test_memory_is_bounded_whatever_tenants_come() -> None:
    found = OutputQuantiles(OutputPolicy(max_series=64))
    for number in range(1000):
        found.note(f"t{number}", f"v{number % 200}", 5, predicted_tokens=1)
    assert len(found) <= 64
    assert len(found._levels) <= 64


def test_a_quantile_is_between_0_and_1() -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        OutputPolicy(quantile=1.0)
