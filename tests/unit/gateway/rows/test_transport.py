"""The transport that a gateway observes of each worker."""

from __future__ import annotations

import pytest

from services.gateway.rows.runner import WorkerTransport


def test_the_level_is_within_what_was_observed_of_that_worker() -> None:
    transport = WorkerTransport()
    for number in range(1000):
        transport.note("w1", 0.001 + 0.00001 * (number % 100))
        transport.note("w2", 0.02)
    assert transport.level_s("w1") == pytest.approx(0.002, rel=0.1)
    assert transport.level_s("w2") == pytest.approx(0.02, rel=0.1)
    assert transport.level_s("w3") == 0.0


def test_it_follows_a_change() -> None:
    transport = WorkerTransport()
    for _ in range(2000):
        transport.note("w1", 0.050)
    for _ in range(6000):
        transport.note("w1", 0.001)
    assert transport.level_s("w1") < 0.002


def test_few_rows_give_no_level() -> None:
    transport = WorkerTransport()
    for _ in range(10):
        transport.note("w1", 0.5)
    assert transport.level_s("w1") == 0.0
