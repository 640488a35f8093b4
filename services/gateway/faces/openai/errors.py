"""Errors in the shape that OpenAI's clients read: status, headers and ``{"error": {...}}``."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Iterable
from typing import Final, TypeVar

import msgspec

from services.core.errors import (
    BudgetExceeded,
    ContentFiltered,
    FairwayError,
    IdempotencyConflict,
    InternalError,
    ModelNotFound,
    OverQuota,
    PromptTooLong,
    RequestRateExceeded,
    TokenRateExceeded,
    Unauthenticated,
    whole_seconds,
)
from services.rpc.status import http_status

Header = tuple[bytes, bytes]
# Names of fields, each with the name that replaces it.
Names = Iterable[tuple[str, str]]


class HttpProblem(FairwayError):
    """An error of the HTTP request itself, before its content is read."""

    reason = "HTTP_PROBLEM"

    def __init__(
        self, status: int, message: str, *, close: bool = False, retry_after_s: float | None = None
    ) -> None:
        """``close``: the connection cannot be reused, since bytes of the request are unread."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status
        self.close = close


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


T = TypeVar("T")


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "service_unavailable",
    504: "timeout_error",
}
_CODES: Final[tuple[tuple[type[FairwayError], str], ...]] = (
    (PromptTooLong, "context_length_exceeded"),
    (ContentFiltered, "content_filter"),
    (ModelNotFound, "model_not_found"),
    (Unauthenticated, "invalid_api_key"),
    (BudgetExceeded, "insufficient_quota"),
    (RequestRateExceeded, "rate_limit_exceeded"),
    (TokenRateExceeded, "rate_limit_exceeded"),
)
# Fields of fairway.v1 with another name in this dialect; longest first.
PARAMS: Final = (
    ("token_ids.ids", "prompt"),
    ("chat.template_variables", "chat_template_kwargs"),
    ("chat.messages", "messages"),
    ("max_output_tokens", "max_tokens"),
    ("min_output_tokens", "min_tokens"),
    ("sampling.constraint", "response_format"),
    ("session_key", "user"),
    ("version", "x-model-version"),
    ("quality", "x-fairway-quality"),
    ("token_ids", "prompt"),
    ("sampling.", ""),
    ("choices", "n"),
)
# LangChain and LiteLLM recognise a prompt to shorten by these words, not by the code.
_TOO_LONG: Final = "prompt is too long: {}; this exceeds the maximum number of tokens allowed"
NOT_PRINTABLE: Final = re.compile(r"[^\x20-\x7e]")
_encode: Final = msgspec.json.Encoder().encode


def status_of(error: FairwayError) -> int:
    return error.status if isinstance(error, HttpProblem) else http_status(error)


def error_headers(error: FairwayError) -> list[Header]:
    """Return retry-after where a retry helps, and the headers that a 401 must carry."""
    headers: list[Header] = []
    if error.retry_after_s is not None:
        wait_s = max(0.0, error.retry_after_s)
        headers.append((b"retry-after", str(whole_seconds(wait_s)).encode()))
        headers.append((b"retry-after-ms", str(math.ceil(wait_s * 1000)).encode()))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, IdempotencyConflict | BudgetExceeded):
        # OpenAI's clients retry after a 409 or a 429 unless this header forbids it.
        headers.append((b"x-should-retry", b"false"))
    if isinstance(error, HttpProblem) and error.close:
        headers.append((b"connection", b"close"))
    return headers


def public_message(error: FairwayError) -> str:
    """Return the text for the client; a bug's is only its incident id."""
    if not isinstance(error, InternalError) and status_of(error) != 500:
        return error.message
    incident = error.metadata.get("incident")
    return "internal error" + (f"; quote incident {incident} to the operator" if incident else "")


def error_body(error: FairwayError, names: Names = PARAMS) -> bytes:
    """Return the JSON of an error. It omits a bug's own text and contains only its incident id.

    ``names``: fields of fairway.v1 by their names in the dialect; the first that fits.
    """
    status = status_of(error)
    param, message = field_and_message(error, names)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if isinstance(error, BudgetExceeded):
        kind = "insufficient_quota"
    return _encode(ErrorBody(ErrorDetail(message, kind, param, _code(error, status))))


def field_and_message(error: FairwayError, names: Names = PARAMS) -> tuple[str | None, str]:
    """Return the field by its name in the dialect, None without one, and the text for the client."""
    field = error.metadata.get("field")
    param = _param(field, names) if field else None
    message = public_message(error)
    if field and param and param != field:
        message = message.replace(field, param)
    return param, _TOO_LONG.format(message) if isinstance(error, PromptTooLong) else message


async def named(names: Names, work: Awaitable[T]) -> T:
    """Return the result of ``work``. An error names its field as the client sent it: the first that fits."""
    try:
        return await work
    except FairwayError as error:
        field = error.metadata.get("field", "")
        if (theirs := _by_prefix(field, names)) is not None:
            error.metadata["field"] = theirs
            error.message = error.message.replace(field, theirs)
            error.args = (error.message,)
        raise


def _code(error: FairwayError, status: int) -> str | None:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, HttpProblem):
        return None
    if isinstance(error, OverQuota) or status != 500:
        return error.reason.lower()
    return "internal"


def _param(field: str, names: Names) -> str:
    found = _by_prefix(field, names)
    return NOT_PRINTABLE.sub("?", field) if found is None else found


def _by_prefix(field: str, names: Names) -> str | None:
    for ours, theirs in names:
        if field.startswith(ours):
            return theirs + field[len(ours) :]
    return None
