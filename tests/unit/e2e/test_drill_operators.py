"""The drill of operators fails by its figures, and compares the wait of a text with that of its header."""

from __future__ import annotations

import pytest

from tests.e2e.drill_operators import misses, states_wait

GOOD = {"traps": 12, "closed_ratio": 1.0, "revert_p95_s": 3.0, "failed": 0}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"revert_p95_s": None}, []),
        ({"closed_ratio": 0.917}, ["closed_ratio"]),
        ({"failed": 1}, ["failed"]),
        ({"revert_p95_s": 60.1}, ["revert_p95_s"]),
    ],
)
def test_a_figure_that_misses_its_bound_is_named(change: dict[str, float | None], missed: list[str]) -> None:
    assert misses({**GOOD, **change}) == missed


@pytest.mark.parametrize(
    ("header", "text", "holds"),
    [
        ("30", "the limit is 2 a minute; try again in 29.4 s", True),
        ("30", "try again in 30 seconds", True),
        ("31", "try again in 29.4 s", False),
        ("30", "the limit is 2 a minute", False),
        ("", "try again in 30 s", False),
    ],
)
def test_a_text_states_the_wait_of_its_header(header: str, text: str, holds: bool) -> None:
    assert states_wait(header, text) is holds
