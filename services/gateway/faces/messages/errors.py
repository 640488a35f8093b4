"""Errors in the shape that Anthropic's clients read."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET

from services.core.errors import BudgetExceeded, FairwayError
from services.gateway.faces.messages.types import (
    MessagesErrorBody,
    MessagesErrorDetail,
    MessagesErrorDetails,
)
from services.gateway.faces.openai.errors import field_and_message, status_of

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_encode: Final = msgspec.json.Encoder().encode


def messages_error(error: FairwayError) -> bytes:
    """Return the JSON of an error. It omits a bug's own text and contains only its incident id."""
    status = status_of(error)
    field, message = field_and_message(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if isinstance(error, BudgetExceeded):
        kind = "billing_error"
    details = MessagesErrorDetails(error.reason.lower(), field or UNSET)
    return _encode(MessagesErrorBody(MessagesErrorDetail(kind, message, details)))
