"""Which failures are the result of a request under an idempotency key, and which are let go of."""

from __future__ import annotations

from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InternalError,
    OverQuota,
    RequestCancelled,
    Unavailable,
)

# Another run may fare better: it goes on from the tokens that were produced.
_PASSING = (Unavailable, DeadlineExceeded, RequestCancelled, OverQuota, InternalError)


def ends_record(error: FairwayError) -> bool:
    """Whether every retry of an accepted request would meet this error again."""
    return error.retry_after_s is None and not isinstance(error, _PASSING)
