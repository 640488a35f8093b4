"""Circuits open on failures that are many and most, let trials through, and close again."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.health.breaker import BreakerPolicy, Circuit, Circuits, CircuitState

POLICY = BreakerPolicy()


def test_failures_open_it_and_trials_close_it() -> None:
    circuit = Circuit(POLICY)
    assert not any(circuit.failed(1.0) for _ in range(POLICY.min_failures - 1))
    assert circuit.failed(1.0)
    assert circuit.state.value == "open"
    assert not circuit.lets_through(1.0 + POLICY.base_open_s - 0.1)
    now_s = 1.0 + POLICY.base_open_s
    assert circuit.advance(now_s)
    assert circuit.lets_through(now_s)
    circuit.passed(now_s)
    assert not circuit.lets_through(now_s), "one trial at a time"
    assert [circuit.succeeded(now_s + 1.0) for _ in range(POLICY.trial_successes)][-1]
    assert circuit.state.value == "closed"


def test_a_trial_that_fails_opens_it_for_twice_as_long() -> None:
    circuit = Circuit(POLICY)
    circuit.failed(0.0, POLICY.min_failures)
    lengths, now_s = [], 0.0
    for _ in range(8):
        lengths.append(circuit.until_s - now_s)
        now_s = circuit.until_s
        assert circuit.advance(now_s)
        assert circuit.failed(now_s)
    assert lengths == [5.0, 10.0, 20.0, 40.0, 80.0, 120.0, 120.0, 120.0]


def test_few_failures_among_many_successes_leave_it_closed() -> None:
    circuit = Circuit(POLICY)
    for second in range(300):
        circuit.succeeded(float(second), 10)
        assert not circuit.failed(float(second), 5)


def test_failures_long_apart_leave_it_closed() -> None:
    circuit = Circuit(POLICY)
    assert not any(circuit.failed(second * 40.0) for second in range(50))


def test_success_of_what_began_before_does_not_close_an_open_one() -> None:
    circuit = Circuit(POLICY)
    circuit.failed(0.0, 9)
    assert not circuit.succeeded(1.0, 100)
    assert circuit.state is CircuitState.OPEN


@given(st.lists(st.tuples(st.sampled_from(("fail", "good", "pass")), st.floats(0.0, 20.0)), max_size=200))
@settings(max_examples=100, deadline=None)
def test_an_open_circuit_always_comes_to_a_trial(events: list[tuple[str, float]]) -> None:
    """Whatever happened, after the longest wait something may pass; and trials are that far apart."""
    circuit, now_s, trials = Circuit(POLICY), 0.0, []
    for kind, wait_s in events:
        now_s += wait_s
        circuit.advance(now_s)
        if kind == "fail":
            circuit.failed(now_s)
        elif kind == "good":
            circuit.succeeded(now_s)
        elif circuit.lets_through(now_s):
            if circuit.state is CircuitState.HALF_OPEN:
                trials.append(now_s)
            circuit.passed(now_s)
    assert all(later - earlier >= POLICY.trial_interval_s for earlier, later in itertools.pairwise(trials))
    now_s += POLICY.max_open_s
    circuit.advance(now_s)
    assert circuit.lets_through(now_s)


def test_an_open_circuit_is_not_forgotten_for_closed_ones() -> None:
    circuits: Circuits[str] = Circuits("worker", POLICY, max_circuits=3)
    for _ in range(POLICY.min_failures):
        circuits.failed("bad", 0.0)
    for number in range(5):
        circuits.succeeded(f"w{number}", 0.0)
    assert len(circuits) == 3
    assert not circuits.lets_through("bad", 0.0)


def test_circuits_are_bounded_and_idle_ones_go() -> None:
    circuits: Circuits[str] = Circuits("worker", POLICY, max_circuits=3)
    for number in range(5):
        circuits.failed(f"w{number}", 0.0)
    assert len(circuits) == 3
    assert circuits.get("w0") is None
    assert circuits.advance(POLICY.forgive_s + 1.0) == ()
    assert len(circuits) == 0
    assert circuits.lets_through("w4", math.inf)
