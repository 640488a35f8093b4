from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.client.policy import (
    Candidate,
    Failure,
    FailureRecord,
    FaultScope,
    GiveUp,
    Retry,
    RetryBudget,
    RetryPolicy,
    after_failure,
    backoff_s,
    choose,
    fault_scope,
    is_retryable,
)

RATIO = st.floats(0, 1)
JITTER = st.floats(0, 1, exclude_max=True)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["request", "retry"]), st.floats(0, 20)), max_size=200),
    ratio=RATIO,
    floor=st.floats(0, 20),
    floor_per_s=st.floats(0, 2),
)
def test_retries_stay_within_the_budget_in_every_span(
    steps: list[tuple[str, float]], ratio: float, floor: float, floor_per_s: float
) -> None:
    policy = RetryPolicy(
        budget_ratio=ratio, budget_floor=floor, budget_floor_per_s=floor_per_s, budget_max=25
    )
    budget, now_s = RetryBudget(policy, 0.0), 0.0
    sums = [(0.0, 0, 0)]  # time, requests and retries so far
    for kind, wait_s in steps:
        now_s += wait_s
        _, requests, retries = sums[-1]
        if kind == "request":
            budget.request_began(now_s)
            requests += 1
        elif budget.take(now_s):
            retries += 1
        sums.append((now_s, requests, retries))
        assert 0 <= budget.balance <= policy.budget_max
    for start, (from_s, from_requests, from_retries) in enumerate(sums):
        saved = floor if start == 0 else policy.budget_max
        for until_s, until_requests, until_retries in sums[start:]:
            allowed = saved + ratio * (until_requests - from_requests) + floor_per_s * (until_s - from_s)
            assert until_retries - from_retries <= allowed + 1e-6


def test_budget_gives_what_it_has_and_not_more() -> None:
    budget = RetryBudget(RetryPolicy(budget_floor=2, budget_ratio=0.25, budget_floor_per_s=0.5), 10.0)
    assert [budget.take(10.0) for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.request_began(10.0)
    assert [budget.take(10.0) for _ in range(2)] == [True, False]
    assert [budget.take(12.0) for _ in range(2)] == [True, False]
    assert not budget.take(5.0), "a clock that went back fills nothing"


@given(attempt=st.integers(1, 10_000), jitter=JITTER)
def test_backoff_is_full_jitter_below_a_doubling_cap(attempt: int, jitter: float) -> None:
    policy = RetryPolicy(first_delay_s=0.1, max_delay_s=3.0)
    ceiling_s = min(3.0, 0.1 * 2.0 ** min(attempt - 1, 40))
    found = backoff_s(policy, attempt, jitter)
    assert 0 <= found <= ceiling_s
    assert math.isclose(found, jitter * ceiling_s)


@given(
    reason=st.sampled_from(["CONNECTION_LOST", "QUEUE_FULL", "OVER_QUOTA", "INVALID_INPUT", "NEW_REASON"]),
    retry_after_s=st.none() | st.floats(0, 60),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    attempt=st.integers(1, 8),
    left_s=st.floats(0.001, 60),
    jitter=JITTER,
    floor=st.sampled_from([0.0, 1.0]),
)
def test_a_retry_has_a_reason_an_attempt_time_and_budget(
    reason: str,
    retry_after_s: float | None,
    flags: tuple[bool, bool, bool, bool],
    attempt: int,
    left_s: float,
    jitter: float,
    floor: float,
) -> None:
    policy = RetryPolicy(budget_floor=floor, budget_floor_per_s=0)
    budget = RetryBudget(policy, 100.0)
    failure = Failure(reason, flags[0], flags[1], retry_after_s, repeatable=flags[2], attaches=flags[3])
    decision = after_failure(
        policy, budget, failure, attempt=attempt, now_s=100.0, deadline_s=100.0 + left_s, jitter=jitter
    )
    if isinstance(decision, GiveUp):
        assert budget.balance == floor, "what is not sent takes nothing"
        return
    assert is_retryable(failure)
    assert failure.repeatable
    assert attempt < policy.max_attempts
    assert (retry_after_s or 0.0) <= decision.delay_s < left_s
    assert floor - budget.balance == (0.0 if failure.attaches else 1.0)


@pytest.mark.parametrize(
    ("failure", "retried"),
    [
        (Failure("CONNECTION_LOST", True, False), True),
        (Failure("DRAINING", True, False), True),
        (Failure("STREAM_BROKEN", True, False, 1.0), True),
        (Failure("REQUEST_RATE_EXCEEDED", False, True, 1.0), True),
        (Failure("REQUEST_RATE_EXCEEDED", False, True), False),
        (Failure("REASON_OF_A_NEWER_SERVER", True, False, 1.0), True),
        (Failure("REASON_OF_A_NEWER_SERVER", True, False), False),
        (Failure("INVALID_INPUT", False, False, 1.0), False),
        (Failure("DEADLINE_EXCEEDED", False, False), False),
        (Failure("NO_GATEWAY", True, False), False),
        (Failure("RESULT_EXPIRED", False, False), False),
    ],
)
def test_only_what_a_retry_cures_is_retried(failure: Failure, retried: bool) -> None:
    policy = RetryPolicy()
    decision = after_failure(
        policy, RetryBudget(policy, 0), failure, attempt=1, now_s=0, deadline_s=60, jitter=0.5
    )
    assert isinstance(decision, Retry) is retried


def test_give_up_says_why() -> None:
    policy = RetryPolicy(budget_floor=0, budget_floor_per_s=0)
    lost, budget = Failure("CONNECTION_LOST", True, False), RetryBudget(policy, 0)

    def why(failure: Failure, attempt: int = 1, deadline_s: float = 60) -> str:
        found = after_failure(
            policy, budget, failure, attempt=attempt, now_s=0, deadline_s=deadline_s, jitter=0.5
        )
        assert isinstance(found, GiveUp)
        return found.why

    assert "budget" in why(lost)
    assert "5 attempts" in why(lost, attempt=5)
    assert "deadline" in why(Failure("QUEUE_FULL", True, False, 90.0))
    assert "idempotency key" in why(Failure("CONNECTION_LOST", True, False, repeatable=False))
    assert "not retryable" in why(Failure("NOT_FOUND", False, False))


@given(jitters=st.lists(JITTER, min_size=1, max_size=20))
def test_a_gateway_that_keeps_failing_is_left_alone_for_longer(jitters: list[float]) -> None:
    record, now_s = FailureRecord(), 0.0
    for failures, jitter in enumerate(jitters):
        record = record.failed(now_s, jitter=jitter)
        whole_s = min(30.0, 0.5 * 2**failures)
        assert whole_s / 2 - 1e-9 <= record.avoided_until_s - now_s <= whole_s + 1e-9
        assert record.failed(now_s, jitter=jitter) == record, "the same outage counts once"
        assert record.succeeded(now_s) == record, "an answer of before does not readmit"
        now_s = record.avoided_until_s
    assert not record.avoided(now_s)
    assert record.succeeded(now_s) == FailureRecord()


def test_a_gateway_is_left_alone_for_as_long_as_it_says() -> None:
    assert FailureRecord().failed(0.0, jitter=0.0, retry_after_s=7.0).avoided_until_s == 7.0


@given(
    candidates=st.lists(
        st.builds(
            Candidate,
            address=st.sampled_from("abcdefgh"),
            failures=st.builds(
                FailureRecord, count=st.just(1), avoided_until_s=st.sampled_from([0.0, 5.0, 9.0])
            ),
            in_flight=st.integers(0, 3),
            down=st.booleans(),
        ),
        min_size=1,
        unique_by=lambda one: one.address,
    ),
    jitter=JITTER,
    last_failed=st.sampled_from("abcdefgh"),
)
def test_choice_is_the_best_there_is(candidates: list[Candidate], jitter: float, last_failed: str) -> None:
    chosen = choose(tuple(candidates), now_s=2.0, jitter=jitter, last_failed=last_failed)
    one = next(candidate for candidate in candidates if candidate.address == chosen)
    good = [each for each in candidates if not each.down and not each.failures.avoided(2.0)]
    others = [each for each in good if each.address != last_failed]
    if others:
        assert one in others
        assert one.in_flight == min(each.in_flight for each in others)
    elif good:
        assert one in good
    elif any(not each.down for each in candidates):
        assert not one.down, "an avoided gateway before one that is not connected"


def test_ties_are_broken_by_the_jitter() -> None:
    equal = tuple(Candidate(name, FailureRecord(), 1, False) for name in "abcd")
    assert [choose(equal, now_s=0, jitter=at / 4) for at in range(4)] == ["a", "b", "c", "d"]


def test_fault_scope() -> None:
    assert fault_scope("DRAINING") is fault_scope("CONNECTION_LOST") is FaultScope.GATEWAY
    assert fault_scope("QUEUE_FULL") is FaultScope.CALL
    assert fault_scope("NO_WORKER_AVAILABLE") is fault_scope("OVER_QUOTA") is FaultScope.NONE


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"first_delay_s": 0},
        {"first_delay_s": 3, "max_delay_s": 2},
        {"budget_ratio": 1.5},
        {"budget_floor": -1},
        {"budget_floor": 5, "budget_max": 4},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
