"""Domain errors. What the world does wrong is one of these; our own bugs are assertions.

    FairwayError
    ├── InvalidInput            PromptTooLong, UnsupportedFeature
    ├── Unauthenticated
    ├── PermissionDenied
    ├── NotFound                ModelNotFound
    ├── Conflict                AlreadyExists (IdempotencyConflict), EtagMismatch
    ├── FailedPrecondition      IntegrityError, DoesNotFit, ResultExpired, VersionGone
    ├── OverQuota               RequestRateExceeded, ConcurrencyExceeded, IdempotencyKeysExceeded,
    │                           OverCommitment, ShareExceeded
    ├── Unavailable             NoWorkerAvailable, QueueFull, QueueTimeout, Draining,
    │                           StoreUnavailable (StoreReplaced), NoLeader, StreamBroken, Overloaded,
    │                           DeadlineUnmeetable, VersionFailing, TicketExpired
    ├── DeadlineExceeded
    ├── RequestCancelled        SlowReader
    ├── Unimplemented
    └── InternalError           carries an incident id, never a text of its own

``services/rpc/status.py`` is the only place where one becomes a gRPC or HTTP status.
"""

from __future__ import annotations

from typing import ClassVar


class FairwayError(Exception):
    """Base. ``message`` is public; ``metadata`` carries every value that it mentions.

    ``retry_after_s`` is set where a retry helps, and says from when on.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, **metadata: str | int | float
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}
        self.retry_after_s = retry_after_s


class InvalidInput(FairwayError):
    """The request can never succeed as it is. ``field`` in the metadata names what to change."""

    reason = "INVALID_INPUT"


class PromptTooLong(InvalidInput):
    reason = "PROMPT_TOO_LONG"


class UnsupportedFeature(InvalidInput):
    """A known option that this server does not offer."""

    reason = "UNSUPPORTED_FEATURE"


class Unauthenticated(FairwayError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(FairwayError):
    reason = "PERMISSION_DENIED"


class NotFound(FairwayError):
    reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    reason = "MODEL_NOT_FOUND"


class Conflict(FairwayError):
    reason = "CONFLICT"


class AlreadyExists(Conflict):
    reason = "ALREADY_EXISTS"


class IdempotencyConflict(AlreadyExists):
    """The idempotency key was used for another request. Not ABORTED, which invites a retry."""

    reason = "IDEMPOTENCY_CONFLICT"


class EtagMismatch(Conflict):
    reason = "ETAG_MISMATCH"


class FailedPrecondition(FairwayError):
    reason = "FAILED_PRECONDITION"


class IntegrityError(FailedPrecondition):
    """Stored or received bytes are not what their digest says."""

    reason = "INTEGRITY_ERROR"


class DoesNotFit(FailedPrecondition):
    """It needs more memory than the device has."""

    reason = "DOES_NOT_FIT"


class ResultExpired(FailedPrecondition):
    """The request of this idempotency key was run, and its output is not kept any more."""

    reason = "RESULT_EXPIRED"


class VersionGone(FailedPrecondition):
    """The version that began the output is served no more, so nothing can continue it."""

    reason = "VERSION_GONE"


class OverQuota(FairwayError):
    reason = "OVER_QUOTA"


class RequestRateExceeded(OverQuota):
    reason = "REQUEST_RATE_EXCEEDED"


class ConcurrencyExceeded(OverQuota):
    reason = "CONCURRENCY_EXCEEDED"


class IdempotencyKeysExceeded(OverQuota):
    """The tenant has as many idempotency keys remembered as may be."""

    reason = "IDEMPOTENCY_KEYS_EXCEEDED"


class OverCommitment(OverQuota):
    """The model is overloaded, and the tenant uses more than what was promised to it."""

    reason = "OVER_COMMITMENT"


class ShareExceeded(OverQuota):
    """The caller holds its share of something bounded that all callers use: others still find room."""

    reason = "SHARE_EXCEEDED"


class Unavailable(FairwayError):
    reason = "UNAVAILABLE"


class NoWorkerAvailable(Unavailable):
    reason = "NO_WORKER_AVAILABLE"


class QueueFull(Unavailable):
    reason = "QUEUE_FULL"


class QueueTimeout(Unavailable):
    reason = "QUEUE_TIMEOUT"


class Draining(Unavailable):
    reason = "DRAINING"


class StoreUnavailable(Unavailable):
    """etcd, Redis or the blob store did not answer within its timeout."""

    reason = "STORE_UNAVAILABLE"


class StoreReplaced(StoreUnavailable):
    """The store that answers is not the one that this process belongs to: nothing is read from it or written
    to it. An operator heals it, so a caller does not try again."""

    reason = "STORE_REPLACED"


class Overloaded(Unavailable):
    """The model has more work than it can begin in time, and this is what is given up first."""

    reason = "OVERLOADED"


class DeadlineUnmeetable(Unavailable):
    """The request's own deadline passes before it could begin."""

    reason = "DEADLINE_UNMEETABLE"


class VersionFailing(Unavailable):
    """Workers of this version are lost under most requests; only a few trials pass for a while."""

    reason = "VERSION_FAILING"


class NoLeader(Unavailable):
    reason = "NO_LEADER"


class StreamBroken(Unavailable):
    """The worker was lost and the stream could not be continued elsewhere."""

    reason = "STREAM_BROKEN"


class TicketExpired(Unavailable):
    """A gateway's clock is so far behind the scheduler's that what it signs is over already."""

    reason = "TICKET_EXPIRED"


class DeadlineExceeded(FairwayError):
    reason = "DEADLINE_EXCEEDED"


class RequestCancelled(FairwayError):
    reason = "CANCELLED"


class SlowReader(RequestCancelled):
    reason = "SLOW_READER"


class Unimplemented(FairwayError):
    reason = "UNIMPLEMENTED"


class InternalError(FairwayError):
    reason = "INTERNAL"


def first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that stands for a group: the first that is no domain error, else the first.

    A bug goes before the domain errors that it caused in other tasks. It is used with
    ``except BaseExceptionGroup``: before Python 3.11.4, a plain error that an ``except*`` block raises is
    wrapped in another group.
    """
    leaves: list[BaseException] = []
    groups: list[BaseExceptionGroup[BaseException]] = [group]
    while groups:
        for error in groups.pop().exceptions:
            if isinstance(error, BaseExceptionGroup):
                groups.append(error)
            else:
                leaves.append(error)
    return next((leaf for leaf in leaves if not isinstance(leaf, FairwayError)), leaves[0])
