"""Calls to the services: a channel, the caller's key, and errors in the command line's own words."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from fairway.cli.errors import CliError, ExitCode
from fairway.client import errors as client_errors
from fairway.client.errors import FairwayError

T = TypeVar("T")
CALL_TIMEOUT_S: Final = 15.0

_MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
)
_DETAILS_KEY: Final = "grpc-status-details-bin"


@asynccontextmanager
async def open_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Yield a channel to host:port, or to the first of several between commas that answers.

    It is closed afterwards.
    """
    loopback = address.startswith(("127.", "localhost:", "[::1]"))
    options = (*_OPTIONS, *((("grpc.enable_http_proxy", 0),) if loopback else ()))
    target = await _resolved(address) if "," in address else address
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield channel


async def _resolved(addresses: str) -> str:
    """Return gRPC's form of several addresses, for which it resolves no names itself. Raises CliError."""
    found: list[str] = []
    for address in addresses.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            known = await asyncio.get_running_loop().getaddrinfo(host, port, family=socket.AF_INET)
        except OSError:
            continue  # another of them may answer
        found += [f"{entry[4][0]!s}:{port}" for entry in known[:1]]
    if not found:
        raise CliError(
            "NO_ADDRESS",
            f"none of {addresses} can be resolved",
            next_step="name servers as HOST:PORT, with commas between them",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return "ipv4:" + ",".join(found)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """Return the call metadata that carries a key."""
    return (("authorization", f"Bearer {key}"),)


async def checked(call: Awaitable[T], *, what: str) -> T:
    """Return the call's answer. Raises CliError, which says that ``what`` failed, and why."""
    try:
        return await call
    except grpc.aio.AioRpcError as exc:
        raise to_cli_error(exc, what=what) from exc


def to_cli_error(error: grpc.aio.AioRpcError, *, what: str) -> CliError:
    """Return the error with the server's reason and text, and what to do about it."""
    code = error.code()
    reason, retry_after_s = _details(error)
    exit_code, next_step = _advice(code, reason)
    if retry_after_s is not None:
        next_step = f"try again in {retry_after_s:.1f} s"
    return CliError(
        reason or code.name,
        f"{what}: {error.details() or code.name}",
        next_step=next_step,
        exit_code=exit_code,
    )


def client_error(error: FairwayError, *, what: str) -> CliError:
    """Return an error of the client library as the command line's."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)
    exit_code, next_step = _advice(code, error.reason)
    if error.retry_after_s is not None:
        next_step = f"try again in {error.retry_after_s:.1f} s"
    return CliError(error.reason, f"{what}: {error.message}", next_step=next_step, exit_code=exit_code)


def _details(error: grpc.aio.AioRpcError) -> tuple[str, float | None]:
    """Return the ErrorInfo's reason and RetryInfo's delay of a status, "" and None where they are absent."""
    reason, delay_s = "", None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            continue
        for detail in status.details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(retry):
                delay_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return reason, delay_s


def _advice(code: grpc.StatusCode, reason: str) -> tuple[ExitCode, str]:
    step = _STEPS.get(reason)
    match code:
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return (
                ExitCode.UNAUTHENTICATED,
                "use a key that may do this: --api-key or --admin-key; both are in .fairway/endpoints.json",
            )
        case grpc.StatusCode.UNAVAILABLE:
            return ExitCode.UNAVAILABLE, step or "see `fairway status`; start it with `fairway up`"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return (
                ExitCode.UNAVAILABLE,
                "try again, or with a longer --timeout; `fairway status` tells whether every part answers",
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ExitCode.UNAVAILABLE, "wait a little and try again"
        case grpc.StatusCode.UNIMPLEMENTED:
            return ExitCode.REFUSED, "this server does not offer it"
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN:
            return ExitCode.FAILED, "look for the incident in the logs under .fairway/logs"
        case _:
            return ExitCode.REFUSED, step or "change the request and try again"


# Most specific first.
_CODES: Final[dict[type[FairwayError], grpc.StatusCode]] = {
    client_errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    client_errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    client_errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    client_errors.NotFound: grpc.StatusCode.NOT_FOUND,
    client_errors.Conflict: grpc.StatusCode.ABORTED,
    client_errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    client_errors.OverQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    client_errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    client_errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    client_errors.Cancelled: grpc.StatusCode.CANCELLED,
    client_errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    client_errors.ServerBug: grpc.StatusCode.INTERNAL,
}

# What helps, by the server's reason.
_STEPS: Final = {
    "NOT_FOUND": "`list` of the same command shows what is there",
    "MODEL_NOT_FOUND": "`fairway deployments list` and `fairway models list` show what is there",
    "ALREADY_EXISTS": "choose another name, or change the one that is there with `update`",
    "FAILED_PRECONDITION": "do first what the message asks for, then try again",
    "ETAG_MISMATCH": "look at it with `show`, and repeat the change with the etag that it has now",
    "NO_WORKER_AVAILABLE": "`fairway nodes list` and `fairway deployments list` tell what is missing",
    "NO_LEADER": "a scheduler leads again within seconds; `fairway status` tells whether one runs",
}
