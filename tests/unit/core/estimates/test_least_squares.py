"""The fit finds what made the samples, never below zero, and says what no sample shows."""

from __future__ import annotations

import random

import pytest

from services.core.estimates.least_squares import NormalEquations, non_negative


def equations(values: tuple[float, ...], *, samples: int = 50, noise: float = 0.0) -> NormalEquations:
    rng = random.Random(7)
    made = NormalEquations.zero(len(values), 0.98)
    for _ in range(samples):
        work = [rng.uniform(0.0, 100.0) for _ in values]
        taken = sum(value * amount for value, amount in zip(values, work, strict=True))
        made.add(work, taken * (1.0 + rng.uniform(-noise, noise)))
    return made


def test_five_unknowns_are_found() -> None:
    values = (1e-2, 5e-5, 1e-7, 2e-5, 3e-9)
    found = non_negative([equations(values)])
    assert found.values == pytest.approx(values, rel=1e-3)
    assert found.error_ratio < 1e-3


def test_noise_gives_no_negative_value() -> None:
    found = non_negative([equations((1.0, 0.0, 0.0), noise=0.3)])
    assert all(value is not None and value >= 0.0 for value in found.values)
    assert found.values[0] == pytest.approx(1.0, rel=0.3)


def test_what_no_sample_shows_is_none() -> None:
    made = NormalEquations.zero(2, 0.98)
    made.add([4.0, 0.0], 8.0)
    found = non_negative([made])
    assert found.values[0] == pytest.approx(2.0)
    assert found.values[1] is None
    assert found.samples == 1.0


def test_no_samples_at_all() -> None:
    found = non_negative([NormalEquations.zero(2, 0.98)])
    assert (found.values, found.samples, found.error_ratio) == ((None, None), 0.0, 1.0)
