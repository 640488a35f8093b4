"""Which failures are the result of a request under an idempotency key, and which are let go of."""

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

# Another run may fare better: it goes on from the tokens that were produced. Another caller may be allowed
# what this one is not.
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
