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
from services.gateway.faces.openai.errors import PARAMS, field_and_message, status_of

# Fields of chat completions and of fairway.v1 with another name in this dialect; the first that fits.
NAMES: Final = (
    ("chat.tools", "tools"),
    ("max_output_tokens", "max_tokens"),
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    ("sampling.constraint", "output_config.format"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("chat_template_kwargs", "thinking"),
    ("chat.template_variables", "thinking"),
    ("user", "metadata.user_id"),
    ("session_key", "metadata.user_id"),
    *PARAMS,
)
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
    field, message = field_and_message(error, NAMES)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if isinstance(error, BudgetExceeded):
        kind = "billing_error"
    details = MessagesErrorDetails(error.reason.lower(), field or UNSET)
    return _encode(MessagesErrorBody(MessagesErrorDetail(kind, message, details)))
