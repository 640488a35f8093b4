"""Which requests for log-probabilities of a prompt are valid: checked before anything runs."""

from __future__ import annotations

from typing import Final

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput

# Log-probabilities of prompts in one answer: tokens, each with its alternatives, of all choices. As protobuf
# they are about 1 MB of a message's 16 MB, and half of what the record of an idempotency key retains.
MAX_PROMPT_SCORES: Final = 65_536


def check_scoring(generation: inference_pb2.Generation) -> None:
    """Raise InvalidInput for a generation that requests no token and nothing of its prompt."""
    if generation.HasField("prompt_logprobs") or not generation.HasField("max_output_tokens"):
        return
    if not generation.max_output_tokens:
        raise InvalidInput(
            "max_output_tokens 0 is for log-probabilities of the prompt alone: ask for these, or for a token",
            field="max_output_tokens",
        )


def check_scores(generation: inference_pb2.Generation, prompt_tokens: int) -> None:
    """Raise InvalidInput for a prompt with more log-probabilities than an answer may have."""
    if not generation.HasField("prompt_logprobs"):
        return
    choices = generation.choices if generation.HasField("choices") else 1
    scores = prompt_tokens * (1 + generation.prompt_logprobs) * choices
    if scores > MAX_PROMPT_SCORES:
        raise InvalidInput(
            f"{prompt_tokens} prompt tokens with {generation.prompt_logprobs} alternatives each in {choices} "
            f"choices are {scores} log-probabilities; an answer has at most {MAX_PROMPT_SCORES}: ask for "
            "fewer alternatives or choices, or send a shorter prompt",
            field="prompt_logprobs",
            prompt_tokens=prompt_tokens,
            prompt_logprobs=generation.prompt_logprobs,
            choices=choices,
            limit=MAX_PROMPT_SCORES,
        )
