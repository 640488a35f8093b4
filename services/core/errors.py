"""Domain errors. Failures outside our control raise one of these; our own bugs are assertions.

    FairwayError
    ├── InvalidInput            PromptTooLong, UnsupportedFeature, ConstraintRefused, ContentFiltered
    ├── Unauthenticated
    ├── PermissionDenied
    ├── NotFound                ModelNotFound, ThreadNotFound
    ├── Conflict                AlreadyExists (IdempotencyConflict), EtagMismatch
    ├── FailedPrecondition      IntegrityError, DoesNotFit, ResultExpired, VersionGone, EngineNotInstalled,
    │                           NotReplaceable, PoisonedInput, SignatureMissing, SignerNotAllowed,
    │                           SignatureInvalid, KeyDestroyed
    ├── OverQuota               RequestRateExceeded, TokenRateExceeded, ConcurrencyExceeded,
    │                           BudgetExceeded, IdempotencyKeysExceeded, OverCommitment, ShareExceeded,
    │                           KvBudgetExceeded
    ├── Unavailable             NoWorkerAvailable, QueueFull, QueueTimeout, Draining,
    │                           StoreUnavailable (StoreReplaced, StorageFull, KeyUnavailable), NoLeader,
    │                           StreamBroken, Overloaded, DeadlineUnmeetable,
    │                           VersionFailing, TicketExpired, StaleRoute, UsageUnrecorded, AuditBacklog,
    │                           IsolationUnavailable, ResidencyUnavailable
    ├── DeadlineExceeded
    ├── RequestCancelled        SlowReader
    ├── Unimplemented
    └── InternalError           has an incident id and no message of its own

``services/rpc/status.py`` is the only module that maps them to a gRPC or HTTP status.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final, Self

if TYPE_CHECKING:
    from services.core.limits import RateState

_NODE_RETRY_S: Final = 2.0


def whole_seconds(wait_s: float) -> int:
    """Return a wait as HTTP's Retry-After states it."""
    return math.ceil(max(0.0, wait_s))


def retry_in(wait_s: float) -> str:
    """Return the wait of a refusal for its text: the same number as in Retry-After."""
    return f"retry in {whole_seconds(wait_s)} s"


class FairwayError(Exception):
    """Base class. ``message`` is public; ``metadata`` contains every value that the message mentions.

    ``retry_after_s`` is set where a retry helps: the number of seconds to wait before it.
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
    """The request cannot succeed unchanged. ``field`` in the metadata names the field to change."""

    reason = "INVALID_INPUT"


class PromptTooLong(InvalidInput):
    reason = "PROMPT_TOO_LONG"


class UnsupportedFeature(InvalidInput):
    """A recognised option that this server does not offer."""

    reason = "UNSUPPORTED_FEATURE"


class ConstraintRefused(InvalidInput):
    """What the output is to match is malformed, matches nothing, or needs more than one request may use."""

    reason = "CONSTRAINT_REFUSED"


class ContentFiltered(InvalidInput):
    """The input has what its safety pack blocks. ``category`` in the metadata."""

    reason = "CONTENT_FILTERED"


class Unauthenticated(FairwayError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(FairwayError):
    reason = "PERMISSION_DENIED"


class NotFound(FairwayError):
    reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    reason = "MODEL_NOT_FOUND"


class ThreadNotFound(NotFound):
    """A conversation that the server would hold: none is held, and the client sends all of its turns."""

    reason = "THREAD_NOT_FOUND"


class Conflict(FairwayError):
    reason = "CONFLICT"


class AlreadyExists(Conflict):
    reason = "ALREADY_EXISTS"


class IdempotencyConflict(AlreadyExists):
    """The idempotency key belongs to another request. Not mapped to ABORTED, which invites a retry."""

    reason = "IDEMPOTENCY_CONFLICT"


class EtagMismatch(Conflict):
    reason = "ETAG_MISMATCH"


class FailedPrecondition(FairwayError):
    reason = "FAILED_PRECONDITION"


class IntegrityError(FailedPrecondition):
    """Stored or received bytes do not match their digest."""

    reason = "INTEGRITY_ERROR"


class DoesNotFit(FailedPrecondition):
    """The version needs more memory than the device has."""

    reason = "DOES_NOT_FIT"


class EngineNotInstalled(FailedPrecondition):
    """The executor runs in an environment of its own, which the worker's machine lacks."""

    reason = "ENGINE_NOT_INSTALLED"


class NotReplaceable(FailedPrecondition):
    """The weights of the version before cannot be replaced in its engine by those of the new one."""

    reason = "NOT_REPLACEABLE"


class ResultExpired(FailedPrecondition):
    """The request of this idempotency key was run, and its output is no longer stored."""

    reason = "RESULT_EXPIRED"


class VersionGone(FailedPrecondition):
    """The version that started the output is no longer served, so the output cannot be continued."""

    reason = "VERSION_GONE"


class SignatureMissing(FailedPrecondition):
    """The signer policy of the model requires a signature, and the version has none."""

    reason = "SIGNATURE_MISSING"


class SignerNotAllowed(FailedPrecondition):
    """The version is signed, but by none of the model's signers, or by one that has expired."""

    reason = "SIGNER_NOT_ALLOWED"


class SignatureInvalid(FailedPrecondition):
    """A bundle is malformed, of another version, or not signed by the signer that it names."""

    reason = "SIGNATURE_INVALID"


class PoisonedInput(FailedPrecondition):
    """The input ends the process that computes it, or raises in a fixed-cost model, and is refused on this
    version for a while. ``deaths`` in the metadata: processes that it ended alone."""

    reason = "POISONED_INPUT"


class KeyDestroyed(FailedPrecondition):
    """The tenant was erased: nothing that was stored of it opens, and nothing more is stored."""

    reason = "KEY_DESTROYED"


class OverQuota(FairwayError):
    """``request_rate`` and ``token_rate``: the rates at the rejection, where they were checked."""

    reason = "OVER_QUOTA"
    request_rate: RateState | None = None
    token_rate: RateState | None = None


class RequestRateExceeded(OverQuota):
    reason = "REQUEST_RATE_EXCEEDED"


class TokenRateExceeded(OverQuota):
    """Without ``retry_after_s`` the request alone exceeds the limit."""

    reason = "TOKEN_RATE_EXCEEDED"


class ConcurrencyExceeded(OverQuota):
    reason = "CONCURRENCY_EXCEEDED"


class BudgetExceeded(OverQuota):
    """``retry_after_s`` is until the period ends; without it the request alone exceeds the budget."""

    reason = "BUDGET_EXCEEDED"


class IdempotencyKeysExceeded(OverQuota):
    """The tenant has reached the maximum number of stored idempotency keys."""

    reason = "IDEMPOTENCY_KEYS_EXCEEDED"


class OverCommitment(OverQuota):
    """The model is overloaded, and the tenant uses more than its committed rate."""

    reason = "OVER_COMMITMENT"


class KvBudgetExceeded(OverQuota):
    """The request alone needs more KV than its tenant may hold on any worker."""

    reason = "KV_BUDGET_EXCEEDED"


class ShareExceeded(OverQuota):
    """The caller uses its full share of a bounded resource; other callers can still use theirs."""

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
    """etcd, Redis or the blob store did not respond within its timeout."""

    reason = "STORE_UNAVAILABLE"


class StoreReplaced(StoreUnavailable):
    """The store that responds is not the store that this process belongs to. It is neither read nor written.
    An operator has to repair it, so a caller does not retry."""

    reason = "STORE_REPLACED"


class StorageFull(StoreUnavailable):
    """What is left of the store is kept for what the platform itself has to write. Nothing was written."""

    reason = "STORAGE_FULL"


class KeyUnavailable(StoreUnavailable):
    """The key that seals what is stored of a tenant cannot be unwrapped. Nothing was written."""

    reason = "KEY_UNAVAILABLE"


class ResidencyUnavailable(Unavailable):
    """No worker or store in the region that the tenant's data must not leave."""

    reason = "RESIDENCY_UNAVAILABLE"


class Overloaded(Unavailable):
    """The model has more work than it can start in time, and requests of this rank are shed first."""

    reason = "OVERLOADED"


class DeadlineUnmeetable(Unavailable):
    """The deadline of the request passes before the request can start."""

    reason = "DEADLINE_UNMEETABLE"


class IsolationUnavailable(Unavailable):
    """No node or slice that the tenant's isolation allows can serve it. It is never served elsewhere."""

    reason = "ISOLATION_UNAVAILABLE"

    @classmethod
    def of(cls, model: str, node_group: str) -> Self:
        """Return the error of a request that no node of its group can serve."""
        return cls(
            f"no node of {node_group} serves {model}, and its requests run on no other; start one, or "
            f"`fairway nodes assign` one to the tenant; {retry_in(_NODE_RETRY_S)}",
            retry_after_s=_NODE_RETRY_S,
            model=model,
            node_group=node_group,
        )


class VersionFailing(Unavailable):
    """Workers are lost under most requests of this version; only a few trial requests pass for a while."""

    reason = "VERSION_FAILING"


class NoLeader(Unavailable):
    reason = "NO_LEADER"


class StreamBroken(Unavailable):
    """The worker was lost and the stream could not be continued on another one."""

    reason = "STREAM_BROKEN"


class UsageUnrecorded(Unavailable):
    """The use of a request that has budgets could not be recorded: the usage outbox is full."""

    reason = "USAGE_UNRECORDED"


class AuditBacklog(Unavailable):
    """The audit log is not written, and as many entries wait for it as may. Nothing was changed."""

    reason = "AUDIT_BACKLOG"


class TicketExpired(Unavailable):
    """A gateway's clock is so far behind the scheduler's clock that its tickets have already expired."""

    reason = "TICKET_EXPIRED"


class StaleRoute(Unavailable):
    """The version that the request was resolved to was withdrawn before a worker started it."""

    reason = "STALE_ROUTE"


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


def is_final(error: FairwayError) -> bool:
    """Return whether a receiver refuses this message for good: the same one is refused again, others may
    pass."""
    if isinstance(error, OverQuota):
        return error.retry_after_s is None
    return isinstance(error, (InvalidInput, FailedPrecondition))


def first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that represents a group: the first that is no domain error, else the first.

    A bug takes precedence over the domain errors that it caused in other tasks. Use it with ``except
    BaseExceptionGroup``: before Python 3.11.4, a plain error that an ``except*`` block raises is wrapped in
    another group.
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
