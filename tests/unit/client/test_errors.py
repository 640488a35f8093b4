from __future__ import annotations

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from fairway.client import errors
from fairway.v1 import common_pb2


def failed(
    code: grpc.StatusCode, *details: object, text: str = "as it happened", raw: bytes | None = None
) -> grpc.aio.AioRpcError:
    status = status_pb2.Status(code=code.value[0], message=text)
    for detail in details:
        status.details.add().Pack(detail)
    packed = status.SerializeToString() if raw is None else raw
    trailing = (
        grpc.aio.Metadata(("grpc-status-details-bin", packed)) if details or raw else grpc.aio.Metadata()
    )
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, text)


def info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="fairway", metadata=metadata)


def test_a_limit_of_grpc_is_no_quota() -> None:
    found = errors.from_rpc(failed(grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert type(found) is errors.Unavailable
    assert found.reason == "RESOURCE_EXHAUSTED"


def test_reason_metadata_and_retry_after_are_taken_from_the_details() -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    found = errors.from_rpc(failed(code, info("REQUEST_RATE_EXCEEDED", limit="60"), retry))
    assert isinstance(found, errors.OverQuota)
    assert (found.reason, found.metadata, found.retry_after_s) == (
        "REQUEST_RATE_EXCEEDED",
        {"limit": "60"},
        2.5,
    )
    assert str(found) == "REQUEST_RATE_EXCEEDED: as it happened"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDenied),
        (grpc.StatusCode.NOT_FOUND, errors.NotFound),
        (grpc.StatusCode.ABORTED, errors.Conflict),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.FailedPrecondition),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unimplemented),
        (grpc.StatusCode.INTERNAL, errors.ServerBug),
    ],
)
def test_class_follows_the_code_also_for_a_reason_of_a_newer_server(
    code: grpc.StatusCode, kind: type[errors.FairwayError]
) -> None:
    assert type(errors.from_rpc(failed(code, info("NEW_REASON")))) is kind
    message = common_pb2.Error(code=code.value[0], reason="NEW_REASON", message="m")
    assert type(errors.from_message(message)) is kind


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED"])
def test_a_status_without_details_is_a_broken_connection(code: str) -> None:
    found = errors.from_rpc(failed(grpc.StatusCode[code], text="Socket closed"))
    assert isinstance(found, errors.ConnectionLost)
    assert (found.reason, "Socket closed" in found.message) == ("CONNECTION_LOST", True)


def test_details_that_are_no_status_leave_the_code() -> None:
    found = errors.from_rpc(failed(grpc.StatusCode.NOT_FOUND, raw=b"\xff\xff\xff"))
    assert (type(found), found.reason) == (errors.NotFound, "NOT_FOUND")


def test_what_concerns_idempotency_has_classes_of_its_own() -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    refused = failed(code, info("UNSUPPORTED_FEATURE", field="generation.idempotency_key"))
    assert isinstance(errors.from_rpc(refused), errors.KeysUnsupported)
    other = failed(code, info("UNSUPPORTED_FEATURE", field="logprobs"))
    assert type(errors.from_rpc(other)) is errors.InvalidRequest
    gone = failed(grpc.StatusCode.FAILED_PRECONDITION, info("RESULT_EXPIRED"))
    assert isinstance(errors.from_rpc(gone), errors.ResultExpired)


def test_an_unknown_code_in_a_stream_is_a_bug_of_the_server() -> None:
    found = errors.from_message(common_pb2.Error(code=999, reason="X", message="m"))
    assert isinstance(found, errors.ServerBug)


def test_the_text_says_how_often_it_was_tried() -> None:
    error = errors.connection_lost("gone")
    error.attempts, error.gave_up = 3, "the retry budget is spent"
    assert str(error) == "CONNECTION_LOST: gone (sent 3 times; the retry budget is spent)"
