"""The limits in a version's files. An engine never exceeds them, whatever its worker allows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fairway.formats.limits import LIMITS_NAME, EngineLimits, check_limits
from services.core.errors import FailedPrecondition
from services.worker.engine_protocol import EngineConfig


def read_limits(folder: Path) -> EngineLimits:
    """Return the version's limits, empty without the file. Blocks for I/O. Raises FailedPrecondition."""
    try:
        return check_limits((folder / LIMITS_NAME).read_bytes())
    except FileNotFoundError:
        return EngineLimits()
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"{LIMITS_NAME} of the version: {error}") from error


def limited(config: EngineConfig, limits: EngineLimits, *, max_context_tokens: int = 0) -> EngineConfig:
    """Return the configuration within the limits and the manifest's context size (0: unbounded).

    ``max_sequences`` is lowered to the token budget, so that a step still covers every sequence.
    """
    contexts = (config.max_model_len, limits.max_context_tokens, max_context_tokens)
    budget = min(config.token_budget, limits.token_budget or config.token_budget)
    return msgspec.structs.replace(
        config,
        token_budget=budget,
        max_sequences=min(config.max_sequences, limits.max_sequences or config.max_sequences, budget),
        max_model_len=min((size for size in contexts if size), default=0),
    )
