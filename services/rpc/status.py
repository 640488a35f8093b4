"""Maps domain errors to gRPC and HTTP statuses and back. No other module does."""

from __future__ import annotations

from typing import Final, cast

import grpc
import structlog
from google.protobuf.any_pb2 import Any as PackedAny
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from fairway.v1 import common_pb2
from services.core import errors

log = structlog.get_logger()
DOMAIN: Final = "fairway"

# Most specific first; the first match by isinstance counts.
_TABLE: Final[tuple[tuple[type[errors.FairwayError], grpc.StatusCode, int], ...]] = (
    (errors.InvalidInput, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED, 401),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED, 403),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND, 404),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS, 409),
    (errors.Conflict, grpc.StatusCode.ABORTED, 409),
    (errors.IntegrityError, grpc.StatusCode.DATA_LOSS, 422),
    (errors.FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION, 422),
    (errors.StoreReplaced, grpc.StatusCode.FAILED_PRECONDITION, 422),
    (errors.OverQuota, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    (errors.StorageFull, grpc.StatusCode.RESOURCE_EXHAUSTED, 507),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE, 503),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    (errors.RequestCancelled, grpc.StatusCode.CANCELLED, 499),
    (errors.Unimplemented, grpc.StatusCode.UNIMPLEMENTED, 501),
    (errors.FairwayError, grpc.StatusCode.INTERNAL, 500),
)


def _subclasses(base: type[errors.FairwayError]) -> list[type[errors.FairwayError]]:
    return [base, *(found for child in base.__subclasses__() for found in _subclasses(child))]


_BY_REASON: Final = {kind.reason: kind for kind in _subclasses(errors.FairwayError)[1:]}
_BY_CODE: Final[dict[grpc.StatusCode, type[errors.FairwayError]]] = {
    code: kind for kind, code, _ in reversed(_TABLE)
}


def grpc_code(error: errors.FairwayError) -> grpc.StatusCode:
    return next(code for kind, code, _ in _TABLE if isinstance(error, kind))


def http_status(error: errors.FairwayError) -> int:
    return next(status for kind, _, status in _TABLE if isinstance(error, kind))


def _packed(message: Message) -> PackedAny:
    box = PackedAny()
    box.Pack(message)
    return box


def _duration(seconds: float) -> Duration:
    delay = Duration()
    delay.FromMilliseconds(max(0, round(seconds * 1000)))
    return delay


def to_grpc_status(error: errors.FairwayError) -> grpc.Status:
    """Return a status with ErrorInfo and, where a retry helps, RetryInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    if error.retry_after_s is not None:
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_s))))
    status = status_pb2.Status(code=grpc_code(error).value[0], message=error.message, details=details)
    return rpc_status.to_status(status)


# What gRPC reports of a handshake that this side ended, most specific first. It reports no reason of one that
# the server ended: gRPC logs it there, at a level that is off, since strangers could fill the log.
_HANDSHAKES: Final = {
    "certificate has expired": "the peer's certificate has expired; `fairway certs rotate` renews it",
    "CERTIFICATE_VERIFY_FAILED": "no authority that is trusted here issued the peer's certificate",
    "Hostname Verification": "the peer's certificate is of another role",
    "Socket closed": "the peer closed the connection; GRPC_VERBOSITY=INFO there logs failed handshakes",
}


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.FairwayError:
    """Return the domain error that a peer raised; a status without ErrorInfo becomes the error of its code.

    Such a status comes from the transport: its text contains addresses, so it is logged and not returned.
    """
    kind = _BY_CODE.get(error.code(), errors.InternalError)
    found = kind(f"the peer ended the call with {error.code().name}")
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except (ValueError, DecodeError):
        status = None
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            retry_after_s = found.retry_after_s
            found = _BY_REASON.get(info.reason, kind)(error.details() or "", retry_after_s=retry_after_s)
            found.metadata = dict(info.metadata)
        elif detail.Unpack(retry):
            found.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    if status is None:
        log.info("rpc.peer_failed", code=error.code().name, details=error.details())
        for text, meaning in _HANDSHAKES.items():
            if text in (error.details() or ""):
                found.message += f": {meaning}"
                break
    return found


def to_proto(error: errors.FairwayError) -> common_pb2.Error:
    """Return the error as a message inside a stream."""
    found = common_pb2.Error(
        code=grpc_code(error).value[0], reason=error.reason, message=error.message, metadata=error.metadata
    )
    if error.retry_after_s is not None:
        found.retry_after.CopyFrom(_duration(error.retry_after_s))
    return found


def by_reason(reason: str, message: str, *, retry_after_s: float | None = None) -> errors.FairwayError:
    """Return the error class with this reason; for an unknown reason an InternalError."""
    return _BY_REASON.get(reason, errors.InternalError)(message, retry_after_s=retry_after_s)
