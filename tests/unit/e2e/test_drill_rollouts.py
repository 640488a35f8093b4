"""The drill of rollouts fails by its figures."""

from __future__ import annotations

import pytest

from tests.e2e.drill_rollouts import failures_of

GOOD: dict[str, float | None] = {
    "good_promoted_ratio": 1.0,
    "bad_rolled_back_ratio": 1.0,
    "actuation_p95_s": 5.0,
    "rollback_p95_s": 60.0,
    "ab_memory_ratio": 1.1,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("good_promoted_ratio", 0.95),
        ("bad_rolled_back_ratio", 0.99),
        ("actuation_p95_s", 5.001),
        ("rollback_p95_s", 61.0),
        ("ab_memory_ratio", 1.101),
    ],
)
def test_each_figure_has_its_bound(name: str, value: float) -> None:
    assert failures_of(GOOD) == []
    (failure,) = failures_of({**GOOD, name: value})
    assert failure.startswith(name)


def test_what_was_not_measured_misses_nothing() -> None:
    assert failures_of(dict.fromkeys(GOOD)) == []
