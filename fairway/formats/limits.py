"""The behaviour file ``engine_limits.json``, and the name of the other that Fairway defines."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

LIMITS_NAME: Final = "engine_limits.json"
POLICY_NAME: Final = "safety_policy.json"


class EngineLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits and settings of every engine of this version, whatever its worker has.

    0, None and an empty string: those of the worker.
    """

    max_context_tokens: Annotated[int, msgspec.Meta(ge=0, le=16_777_216)] = 0
    max_sequences: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    token_budget: Annotated[int, msgspec.Meta(ge=0, le=1_048_576)] = 0
    # A draft model is used where the worker's setting asks for it, and none of these is set.
    speculation: Literal["", "off", "prompt_lookup"] = ""
    prefix_cache: bool | None = None


def check_limits(data: bytes) -> EngineLimits:
    """Return the limits of an ``engine_limits.json``. Raises ValueError for an unknown or impossible one."""
    try:
        return msgspec.json.decode(data, type=EngineLimits)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ValueError(f"invalid engine limits: {exc}") from exc
