"""Placing again is bounded, backs off, and leaves alone what cannot help."""

import pytest

from services.core import errors
from services.core.generation import NotAdmittedReason
from services.core.poison.suspicion import MAX_LOSSES, LossCause, StepRole
from services.gateway.policy.retry import (
    MAX_REFUSALS,
    BudgetPolicy,
    GiveUp,
    OutsideKills,
    PlaceAgain,
    RetryBudget,
    after_loss,
    after_not_finite,
    after_refusal,
    ends_record,
)


def test_the_first_refusal_is_placed_again_at_once() -> None:
    assert after_refusal(NotAdmittedReason.NO_ROOM, "w", 1, 1.0) == PlaceAgain(0.0, "")


def test_refusals_back_off_to_a_cap() -> None:
    delays = []
    for refusals in range(2, MAX_REFUSALS):
        decision = after_refusal(NotAdmittedReason.NO_ROOM, "w", refusals, 1.0)
        assert isinstance(decision, PlaceAgain)
        delays.append(decision.delay_s)
    assert delays == sorted(delays)
    assert 0 < delays[0] < 0.01
    assert delays[-1] == 0.2


def test_a_draining_worker_is_left_alone() -> None:
    for reason in (NotAdmittedReason.DRAINING, NotAdmittedReason.NOT_READY):
        decision = after_refusal(reason, "w", 1, 0.5)
        assert isinstance(decision, PlaceAgain)
        assert decision.exclude_worker == "w"


def test_refusals_and_tries_without_numbers_end() -> None:
    assert isinstance(after_refusal(NotAdmittedReason.NO_ROOM, "w", MAX_REFUSALS, 0.5), GiveUp)
    assert isinstance(after_not_finite("w", MAX_LOSSES, 0.5), GiveUp)
    assert after_not_finite("w", 1, 1.0) == PlaceAgain(0.05, "w")


@pytest.mark.parametrize(
    ("cause", "role", "blamed"),
    [
        (LossCause.OUTSIDE, StepRole.NONE, True),
        (LossCause.OUTSIDE, StepRole.SHARED, True),
        (LossCause.OUTSIDE, StepRole.BYSTANDER, False),
        (LossCause.FAULT, StepRole.SHARED, False),
        (LossCause.FAULT, StepRole.BYSTANDER, False),
        (LossCause.FAULT, StepRole.ALONE, True),
    ],
)
def test_a_worker_is_charged_with_a_loss_unless_a_member_of_the_step_is_its_likely_cause(
    cause: LossCause, role: StepRole, blamed: bool
) -> None:
    assert after_loss("w", 1, 0.5, cause, role).exclude_worker == ("w" if blamed else "")


def test_losses_back_off_to_a_cap() -> None:
    delays = [after_loss("w", n, 1.0, LossCause.FAULT, StepRole.SHARED).delay_s for n in range(1, 20)]
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (0.05, 0.8)


def test_a_kill_in_a_shared_step_or_outside_of_one_shows_that_engines_are_killed() -> None:
    kills = OutsideKills()
    for cause, role in (
        (LossCause.FAULT, StepRole.SHARED),
        (LossCause.OUTSIDE, StepRole.ALONE),
        (LossCause.OUTSIDE, StepRole.BYSTANDER),
    ):
        kills.note(cause, role, 5.0)
        assert not kills.any_since(0.0)
    kills.note(LossCause.OUTSIDE, StepRole.SHARED, 5.0)
    assert kills.any_since(5.0)
    assert not kills.any_since(5.1)


def test_a_lost_worker_is_placed_again_at_once_and_a_lost_fleet_at_a_pace() -> None:
    budget = RetryBudget(BudgetPolicy(ratio=0.1, floor_per_s=10.0, burst=128.0))
    waits = [budget.take(0.0) for _ in range(328)]
    assert waits[:128] == [0.0] * 128
    assert waits[128] == 0.1
    assert max(waits) == 20.0
    assert budget.take(20.0) == 0.1, "who waited had their turn"


def test_requests_and_time_fill_the_budget_to_its_bound() -> None:
    budget = RetryBudget(BudgetPolicy(ratio=0.1, floor_per_s=1.0, burst=5.0))
    for _ in range(5):
        assert budget.take(0.0) == 0.0
    for _ in range(20):
        budget.request_began(0.0)
    assert budget.take(0.0) == budget.take(0.0) == 0.0
    assert budget.take(0.0) > 0.0
    budget.request_began(1000.0)
    assert [budget.take(1000.0) for _ in range(5)] == [0.0] * 5
    assert budget.take(1000.0) > 0.0


PASSING = (
    errors.NoWorkerAvailable,
    errors.QueueTimeout,
    errors.StreamBroken,
    errors.Draining,
    errors.StoreUnavailable,
    errors.DeadlineExceeded,
    errors.RequestCancelled,
    errors.SlowReader,
    errors.ConcurrencyExceeded,
    errors.RequestRateExceeded,
    errors.InternalError,
    errors.PermissionDenied,
    errors.Unauthenticated,
)
FINAL = (errors.InvalidInput, errors.PromptTooLong, errors.VersionGone, errors.IntegrityError)


@pytest.mark.parametrize("kind", PASSING)
def test_another_run_may_fare_better(kind: type[errors.FairwayError]) -> None:
    assert not ends_record(kind("x"))


@pytest.mark.parametrize("kind", FINAL)
def test_a_retry_would_fail_in_the_same_way(kind: type[errors.FairwayError]) -> None:
    assert ends_record(kind("x"))


def test_what_says_when_to_retry_is_no_result() -> None:
    assert not ends_record(errors.FailedPrecondition("x", retry_after_s=1.0))
