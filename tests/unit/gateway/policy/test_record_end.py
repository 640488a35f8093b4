"""A failure is a result only when every retry would meet it again."""

from __future__ import annotations

import pytest

from services.core import errors
from services.gateway.policy.record_end import ends_record

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
