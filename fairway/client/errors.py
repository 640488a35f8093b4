"""Errors of the client.

    FairwayError
    ├── InvalidRequest          KeysUnsupported
    ├── Unauthenticated
    ├── PermissionDenied
    ├── NotFound
    ├── Conflict
    ├── FailedPrecondition      ResultExpired
    ├── OverQuota
    ├── Unavailable             ConnectionLost, NoGateway
    ├── DeadlineExceeded
    ├── Cancelled
    ├── Unimplemented
    ├── ServerBug
    ├── WaitFailed              the awaited state cannot be reached
    ├── StreamDiverged          a replay differs from what was delivered before
    └── Closed                  the client, session or stream was closed during the call

Switch on the class, or on ``reason``, which is stable; the message is for users.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from fairway.v1 import common_pb2

_DETAILS_KEY: Final = "grpc-status-details-bin"
KEY_FIELD: Final = "idempotency_key"
# grpc.aio's message when a write failed before the server's status was read: the status is lost.
STATUS_LOST: Final = "Internal error from Core"


class FairwayError(Exception):
    """Base of the client's errors, except ValueError, TypeError and RuntimeError for wrong use.

    ``reason``: upper-case, stable. ``metadata``: every value in the message. ``retry_after_s``: the
    server's delay before a retry, if any. ``attempts``: how often the call was sent, and ``gave_up`` why it
    was not sent again. ``delivered_tokens``: tokens of a stream before it failed.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.attempts = 0
        self.gave_up = ""
        self.delivered_tokens = 0

    def __str__(self) -> str:
        tried = f" (sent {self.attempts} times; {self.gave_up})" if self.attempts > 1 else ""
        return f"{self.reason}: {self.message}{tried}"


class InvalidRequest(FairwayError):
    """The request can never succeed unchanged; ``metadata["field"]`` names the field to change."""


class KeysUnsupported(InvalidRequest):
    """The server offers no idempotency keys: open the client with ``ClientOptions(idempotency=False)``."""


class Unauthenticated(FairwayError):
    pass


class PermissionDenied(FairwayError):
    pass


class NotFound(FairwayError):
    pass


class Conflict(FairwayError):
    """It exists already, was changed meanwhile, or an idempotency key was used for another request."""


class FailedPrecondition(FairwayError):
    pass


class ResultExpired(FailedPrecondition):
    """The generation ran, but its record has expired: the result is lost, and it is not run again."""


class OverQuota(FairwayError):
    pass


class Unavailable(FairwayError):
    pass


class ConnectionLost(Unavailable):
    """The connection to a gateway broke, or no message arrived. The state of the call is unknown."""


class NoGateway(Unavailable):
    """None of the endpoints could be reached; nothing was sent."""


class DeadlineExceeded(FairwayError):
    pass


class Cancelled(FairwayError):
    """The server ended the request: by a SessionCancel, or because its reader was too slow."""


class Unimplemented(FairwayError):
    pass


class ServerBug(FairwayError):
    """``metadata["incident"]`` identifies the entry in the operator's log."""


class WaitFailed(FairwayError):
    """The awaited state cannot be reached without a change; ``reason`` is the cause, such as DOES_NOT_FIT."""


class StreamDiverged(FairwayError):
    """The continued stream differs from what was delivered before, so the two cannot be joined."""


class Closed(FairwayError):
    pass


_BY_CODE: Final[dict[grpc.StatusCode, type[FairwayError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: Conflict,
    grpc.StatusCode.ABORTED: Conflict,
    grpc.StatusCode.DATA_LOSS: FailedPrecondition,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverQuota,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
}
# Without ErrorInfo these come from the transport or from a server that was stopped, never from a handler.
_BROKEN: Final = frozenset(
    (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    )
)
_CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}
_Detail = TypeVar("_Detail", error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)


def connection_lost(message: str) -> ConnectionLost:
    return ConnectionLost(message, reason="CONNECTION_LOST")


def deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the answer was complete", reason="DEADLINE_EXCEEDED")


def from_rpc(error: grpc.aio.AioRpcError) -> FairwayError:
    """Convert a failed RPC: by the server's ErrorInfo and RetryInfo, else by its status code."""
    code, text = error.code(), error.details() or error.code().name
    details = _details(error.trailing_metadata() or ())
    info = _first(error_details_pb2.ErrorInfo, details)
    if info is None:
        if code in _BROKEN:
            return connection_lost(f"the connection to the server broke: {text}")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # a limit of gRPC, not a tenant's quota
            return Unavailable(f"a limit of the connection refused it: {text}", reason=code.name)
        return _BY_CODE.get(code, ServerBug)(text, reason=code.name)
    retry = _first(error_details_pb2.RetryInfo, details)
    retry_after_s = retry.retry_delay.ToTimedelta().total_seconds() if retry is not None else None
    return _of(code, info.reason, text, dict(info.metadata), retry_after_s)


def from_message(error: common_pb2.Error) -> FairwayError:
    """Convert an error message inside a stream."""
    retry_after_s = error.retry_after.ToTimedelta().total_seconds() if error.HasField("retry_after") else None
    code = _CODES.get(error.code, grpc.StatusCode.INTERNAL)
    return _of(code, error.reason, error.message, dict(error.metadata), retry_after_s)


def _of(
    code: grpc.StatusCode, reason: str, message: str, metadata: dict[str, str], retry_after_s: float | None
) -> FairwayError:
    kind = _BY_CODE.get(code, ServerBug)
    if reason == "RESULT_EXPIRED":
        kind = ResultExpired
    elif reason == "UNSUPPORTED_FEATURE" and metadata.get("field", "").endswith(KEY_FIELD):
        kind = KeysUnsupported
        message = f"{message}; use ClientOptions(idempotency=False)"
    return kind(message, reason=reason or code.name, metadata=metadata, retry_after_s=retry_after_s)


def _details(trailing: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status:
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:  # not sent by Fairway: only the status code is used
                break
    return status_pb2.Status()


def _first(kind: type[_Detail], status: status_pb2.Status) -> _Detail | None:
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            return detail
    return None
