"""Domain errors survive the way over the wire and back."""

import grpc
import pytest

from services.core import errors
from services.rpc import status


def all_errors() -> list[type[errors.FairwayError]]:
    """The tree of ``services/core/errors.py``; a face may add to it what never crosses a wire."""
    found, queue = [], [errors.FairwayError]
    while queue:
        kind = queue.pop()
        queue += kind.__subclasses__()
        if kind.__module__ == errors.__name__:
            found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def over_the_wire(error: errors.FairwayError) -> errors.FairwayError:
    sent = status.to_grpc_status(error)
    received = grpc.aio.AioRpcError(
        code=sent.code,
        initial_metadata=grpc.aio.Metadata(),
        trailing_metadata=grpc.aio.Metadata(*sent.trailing_metadata),
        details=sent.details,
    )
    return status.from_rpc_error(received)


@pytest.mark.parametrize("kind", all_errors())
def test_an_error_comes_back_as_itself(kind: type[errors.FairwayError]) -> None:
    error = kind("what happened and what to do", retry_after_s=1.5, field="x", count=3)
    back = over_the_wire(error)
    assert back.reason == error.reason
    assert isinstance(back, kind) or kind is errors.FairwayError
    assert back.message == error.message
    assert back.metadata == {"field": "x", "count": "3"}
    assert back.retry_after_s == pytest.approx(1.5)


@pytest.mark.parametrize("kind", all_errors())
def test_an_error_inside_a_stream_says_the_same(kind: type[errors.FairwayError]) -> None:
    error = kind("what happened and what to do", retry_after_s=1.5, field="x", count=3)
    said = status.to_proto(error)
    assert (said.reason, said.message) == (error.reason, error.message)
    assert said.code == status.to_grpc_status(error).code.value[0]
    assert said.metadata == {"field": "x", "count": "3"}
    assert said.retry_after.ToTimedelta().total_seconds() == pytest.approx(1.5)


def test_reasons_are_unique() -> None:
    reasons = [kind.reason for kind in all_errors() if kind is not errors.FairwayError]
    assert len(reasons) == len(set(reasons))


@pytest.mark.parametrize(
    ("error", "code", "http"),
    [
        (errors.PromptTooLong("x"), grpc.StatusCode.INVALID_ARGUMENT, 400),
        (errors.RequestRateExceeded("x"), grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (errors.QueueFull("x"), grpc.StatusCode.UNAVAILABLE, 503),
        (errors.AlreadyExists("x"), grpc.StatusCode.ALREADY_EXISTS, 409),
        (errors.EtagMismatch("x"), grpc.StatusCode.ABORTED, 409),
        (errors.IntegrityError("x"), grpc.StatusCode.DATA_LOSS, 422),
        (errors.InternalError("x"), grpc.StatusCode.INTERNAL, 500),
    ],
)
def test_the_most_specific_row_counts(error: errors.FairwayError, code: grpc.StatusCode, http: int) -> None:
    assert status.grpc_code(error) is code
    assert status.http_status(error) == http


def test_a_foreign_status_takes_its_codes_class() -> None:
    foreign = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="ipv4:10.1.2.3:9091: connection refused",
    )
    back = status.from_rpc_error(foreign)
    assert type(back) is errors.Unavailable
    assert "10.1.2.3" not in back.message  # the transport's text is for the log: errors reach clients
