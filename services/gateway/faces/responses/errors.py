"""Errors of the Responses API: OpenAI's shape, with the names of its fields."""

from __future__ import annotations

from typing import Final

from services.core.errors import FairwayError
from services.gateway.faces.openai.errors import PARAMS, error_body

# Fields of chat completions and of fairway.v1 with another name in this dialect; the first that fits.
NAMES: Final = (
    ("chat.messages", "input"),
    ("messages", "input"),
    ("chat.tools", "tools"),
    ("max_output_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("sampling.constraint", "text.format"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    *PARAMS,
)


def responses_error(error: FairwayError) -> bytes:
    """Return the JSON of an error."""
    return error_body(error, NAMES)
