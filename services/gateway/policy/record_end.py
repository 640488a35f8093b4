"""Classifies failures of a request with an idempotency key: final, or open for another run."""

from __future__ import annotations

from typing import Final

from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InternalError,
    OverQuota,
    PermissionDenied,
    RequestCancelled,
    Unauthenticated,
    Unavailable,
)

# Another run may succeed: it continues from the produced tokens. Another caller may have permissions that
# this one lacks.
_PASSING: Final = (
    Unavailable,
    DeadlineExceeded,
    RequestCancelled,
    OverQuota,
    InternalError,
    PermissionDenied,
    Unauthenticated,
)


def ends_record(error: FairwayError) -> bool:
    """Whether every retry of an accepted request would meet this error again."""
    return error.retry_after_s is None and not isinstance(error, _PASSING)
