"""Calls of the client libraries, with their errors as errors of the command line."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import grpc

from fairway.cli.errors import CliError, ExitCode
from fairway.client import AdminClient, ClientOptions, RetryPolicy, tls_credentials
from fairway.client import errors as client_errors
from fairway.client.errors import FairwayError
from fairway.client.publish.publish import Base, Published, PublishProgress, PublishRefused
from fairway.formats.servable import Kind
from fairway.tls import CERTIFICATE, CertificateProblem, read_folder

T = TypeVar("T")
PHASE_VERBS: Final = {"hash": "hashing", "upload": "uploading", "create": "registering", "done": "registered"}
CALL_TIMEOUT_S: Final = 15.0
CONNECT_S: Final = 5.0
# An interactive user waits: a server that does not answer soon is reported.
RETRY: Final = RetryPolicy(max_attempts=3)


def credentials_of(tls_dir: Path | None) -> grpc.ChannelCredentials | None:
    """Return the credentials in a folder, None without one. Raises CliError."""
    try:
        return None if tls_dir is None else tls_credentials(tls_dir)
    except OSError as exc:
        raise CliError(
            "NO_CERTIFICATE",
            f"cannot read {exc.filename}: {exc.strerror}",
            next_step="`fairway certs issue operator` makes a certificate; FAIRWAY_TLS_DIR names its folder",
            exit_code=ExitCode.UNAUTHENTICATED,
        ) from exc


def certificate_problem(tls_dir: Path | None) -> str:
    """Return why servers refuse the certificate in a folder, as far as it shows; empty without a reason."""
    if tls_dir is None or not (tls_dir / CERTIFICATE).exists():
        return ""
    try:
        identity = read_folder(tls_dir)
    except CertificateProblem as exc:
        return str(exc)
    return identity.leaf.problem(time.time()) or identity.issuer_problem()


def admin_client(
    controlplane: str = "",
    registry: str = "",
    *,
    admin_key: str,
    call_s: float = CALL_TIMEOUT_S,
    tls_dir: Path | None = None,
) -> AdminClient:
    """Return a client, not yet entered, for one host:port or several separated by commas.

    ``tls_dir``: the folder of its certificate; None: the servers are without TLS. Raises CliError.
    """
    credentials_of(tls_dir)  # The client would raise OSError, without a next step.
    try:
        return AdminClient(
            _addresses(controlplane),
            admin_key=admin_key,
            registry=_addresses(registry),
            credentials=tls_dir,
            options=ClientOptions(
                timeout_s=call_s, connect_timeout_s=CONNECT_S, wait_for_ready=False, retry=RETRY
            ),
        )
    except ValueError as exc:
        raise CliError(
            "NO_ADDRESS",
            str(exc),
            next_step="name servers as HOST:PORT, with commas between them",
            exit_code=ExitCode.UNAVAILABLE,
        ) from exc


def _addresses(several: str) -> Sequence[str]:
    return list(dict.fromkeys(address.strip() for address in several.split(",") if address.strip()))


async def checked(call: Awaitable[T], *, what: str) -> T:
    """Return the call's result. Raises CliError with ``what`` and the cause."""
    try:
        return await call
    except FairwayError as exc:
        raise admin_error(exc, what=what) from exc


def admin_error(error: FairwayError, *, what: str) -> CliError:
    """Return the error of an operator's call; no server and a broken connection have the same reason."""
    found = client_error(error, what=what)
    if isinstance(error, client_errors.NoGateway | client_errors.ConnectionLost):
        found.reason = "UNAVAILABLE"
    return found


def client_error(error: FairwayError, *, what: str) -> CliError:
    """Convert an error of the client library into one of the command line."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)
    exit_code, next_step = _advice(code, error.reason)
    if error.retry_after_s is not None:
        next_step = f"try again in {math.ceil(error.retry_after_s)} s"
    return CliError(error.reason, f"{what}: {error.message}", next_step=next_step, exit_code=exit_code)


def _advice(code: grpc.StatusCode, reason: str) -> tuple[ExitCode, str]:
    step = _STEPS.get(reason)
    match code:
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return (
                ExitCode.UNAUTHENTICATED,
                step
                or "use a key that may do this: --api-key or --admin-key; .fairway/endpoints.json has both",
            )
        case grpc.StatusCode.UNAVAILABLE:
            return ExitCode.UNAVAILABLE, step or "see `fairway status`; start it with `fairway up`"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return (
                ExitCode.UNAVAILABLE,
                "try again, or with a longer --timeout; `fairway status` shows whether every part answers",
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ExitCode.UNAVAILABLE, "wait a little and try again"
        case grpc.StatusCode.UNIMPLEMENTED:
            return ExitCode.REFUSED, "this server does not offer it"
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN:
            return ExitCode.FAILED, "search the incident in the logs under .fairway/logs"
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

# Suggested next steps, by the server's reason.
_STEPS: Final = {
    "NOT_FOUND": "`list` of the same command shows what is there",
    "MODEL_NOT_FOUND": "`fairway deployments list` and `fairway models list` show what is there",
    "ALREADY_EXISTS": "choose another name, or change the one that is there with `update`",
    "FAILED_PRECONDITION": "do first what the message requires, then try again",
    "ETAG_MISMATCH": "read it with `show`, and repeat the change with its present etag",
    "NO_WORKER_AVAILABLE": "`fairway nodes list` and `fairway deployments list` show what is missing",
    "LOGIN_ENDED": "log in again with `fairway login`, or pass a key",
    "NO_LEADER": "a new leader is elected within seconds; `fairway status` shows whether a scheduler runs",
}


async def publish_folder(
    admin: AdminClient,
    folder: Path,
    model: str,
    tag: str,
    *,
    report: Callable[[PublishProgress], None],
    base: Base | None = None,
    for_another_engine: bool = False,
    kind: Kind | None = None,
) -> Published:
    """Publish a checkpoint folder, point ``tag`` at it unless empty, and return the result.

    Of ``kind`` safety-pack the folder is the pack's file.
    Raises CliError.
    """
    try:
        return await admin.models.publish(
            folder, model, tag, base=base, progress=report, for_another_engine=for_another_engine, kind=kind
        )
    except FairwayError as exc:
        raise admin_error(exc, what=f"cannot publish {folder}") from exc
    except PublishRefused as exc:
        raise CliError("FOLDER_REFUSED", f"cannot publish {folder}: {exc}", next_step=exc.next_step) from exc
    except OSError as exc:
        raise CliError(
            "FOLDER_UNREADABLE",
            f"cannot publish {folder}: {exc}",
            next_step="name a folder whose files you may read",
        ) from exc
