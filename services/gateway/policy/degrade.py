"""Degraded service, for tenants that prefer it to a rejection. Pure.

Outputs end earlier from ``cap_from_ratio`` of pressure on; from ``smaller_from_ratio`` on, a smaller model
answers. A request that depends on one vocabulary keeps its model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.core.generation import GenerationSpec
from services.core.records import Degrade


class DegradationKind(StrEnum):
    OUTPUT_CAPPED = "output_capped"
    SMALLER_MODEL = "smaller_model"


@dataclass(frozen=True, slots=True)
class Degradation:
    """The requested and the served value, tokens or a model. ``pressure_ratio`` is the requested model's."""

    kind: DegradationKind
    original: str
    applied: str
    pressure_ratio: float


@dataclass(frozen=True, slots=True)
class DegradeLevels:
    """Pressure, 0..1, from which each measure applies where a tenant allows it."""

    cap_from_ratio: float = 0.6
    smaller_from_ratio: float = 0.85

    def __post_init__(self) -> None:
        if not 0.0 < self.cap_from_ratio <= self.smaller_from_ratio:
            raise ValueError("outputs are capped before smaller models answer")


def smaller_model(
    spec: GenerationSpec, policy: Degrade, pressure_ratio: float, levels: DegradeLevels, *, by_ids: bool
) -> str | None:
    """Return the smaller model that is to answer, None for the requested model.

    ``by_ids``: the prompt consists of token ids.
    """
    if pressure_ratio < levels.smaller_from_ratio:
        return None
    sampling = spec.sampling
    # They name tokens of one vocabulary.
    if by_ids or spec.limits.stop_token_ids or sampling.logit_bias or sampling.prompt_logprobs is not None:
        return None
    found = policy.smaller_models.get(spec.model)
    return found if found != spec.model else None


def output_cap(
    spec: GenerationSpec, policy: Degrade, pressure_ratio: float, levels: DegradeLevels
) -> int | None:
    """Return after how many tokens the output ends, None where that changes nothing.

    Never less than the requested minimum.
    """
    if pressure_ratio < levels.cap_from_ratio or not policy.max_output_tokens:
        return None
    cap = max(policy.max_output_tokens, spec.limits.min_tokens, 1)
    return cap if cap < spec.limits.max_tokens else None


def header_value(degradations: Sequence[Degradation]) -> str:
    """Return the degradations as one header value: kind, original and applied of each."""
    return ", ".join(f"{one.kind}; original={one.original}; applied={one.applied}" for one in degradations)
