"""Waits double, stay within their bounds and are not alike."""

from __future__ import annotations

from random import Random

from services.core.backoff import Backoff


def test_waits_double_up_to_the_longest_and_lose_at_most_half() -> None:
    backoff = Backoff(first_s=0.1, max_s=2.0)
    rng = Random(1)
    for failures, ceiling_s in ((0, 0.1), (1, 0.2), (2, 0.4), (4, 1.6), (5, 2.0), (10_000, 2.0)):
        waits = [backoff.wait_s(failures, rng) for _ in range(500)]
        assert ceiling_s / 2 <= min(waits) < 0.55 * ceiling_s
        assert 0.95 * ceiling_s < max(waits) <= ceiling_s


def test_those_who_failed_together_do_not_come_back_together() -> None:
    backoff = Backoff(first_s=0.1, max_s=2.0)
    assert len({backoff.wait_s(3, Random(seed)) for seed in range(100)}) == 100
