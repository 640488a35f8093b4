"""The rotary embedding of a config, from ``rope_scaling`` (older) or ``rope_parameters`` (newer)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fairway.formats.config_fields import MAX_SIZE, UnsupportedModel, number, positive_int

DEFAULT_THETA: Final = 10000.0

# The keys of each kind. An unlisted key would have no effect, so it is rejected.
KEYS: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        | {"original_max_position_embeddings"}
    ),
    "longrope": frozenset(
        {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"}
    ),
}
COMMON_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding. A field that its kind ignores has its default."""

    kind: str  # a key of ``KEYS``
    dim: int  # width of a head
    theta: float  # base of the frequencies
    max_positions: int  # ``max_position_embeddings`` of the config
    # The context of pre-training.
    original_positions: int
    # Scaling factor of the context.
    factor: float = 1.0
    # Llama 3.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0  # Llama 3
    # None: derived as in the kind's paper.
    attention_factor: float | None = None
    # YaRN.
    beta_fast: float = 32.0
    beta_slow: float = 1.0  # YaRN
    mscale: float | None = None  # YaRN
    mscale_all_dim: float | None = None  # YaRN
    truncate: bool = True  # YaRN
    # LongRoPE.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()  # LongRoPE, beyond ``original_positions``

    @property
    def max_context(self) -> int:
        """The longest context that the scaling supports, at least ``max_positions``.

        Checkpoints of Llama 3 and LongRoPE give the scaled context as ``max_positions``.
        """
        # max_positions equals original_positions for linear and dynamic scaling.
        scaled = self.kind in ("linear", "dynamic", "yarn")
        reached = int(self.original_positions * self.factor) if scaled else 0
        return min(max(self.max_positions, reached), MAX_SIZE)

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's frequencies depend on the length of its sequence, besides its position."""
        return self.kind in ("dynamic", "longrope")


def parse_rope(fields: Mapping[str, Any], *, head_dim: int, max_positions: int) -> RopeConfig:
    """Return the rotary embedding. Raises UnsupportedModel for an unsupported kind, key or value."""
    rope = _section(fields)
    kind = _kind(rope)
    for name in rope:
        if name not in COMMON_KEYS | KEYS[kind] and rope[name] is not None:
            raise UnsupportedModel(f"rope_parameters.{name}", rope[name])
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel("partial_rotary_factor", partial)
    plain = _reach(fields, rope, kind, head_dim, max_positions)
    match kind:
        case "dynamic" if head_dim <= 2:  # its exponent divides by dim - 2
            raise UnsupportedModel("head_dim", head_dim)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case "longrope":
            return _longrope(rope, plain)
    return plain


def context_of(fields: Mapping[str, Any]) -> int:
    """Return the longest context of a config of any family: the scaled one, if its kind is supported.

    Raises UnsupportedModel without ``max_position_embeddings``.
    """
    positions = positive_int(fields, "max_position_embeddings")
    try:
        rope = _section(fields)
        return _reach(fields, rope, _kind(rope), 0, positions).max_context
    except UnsupportedModel:  # a model for another engine
        return positions


def _kind(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in KEYS:
        raise UnsupportedModel("rope_type", kind)
    return kind


def _reach(
    fields: Mapping[str, Any], rope: Mapping[str, Any], kind: str, head_dim: int, max_positions: int
) -> RopeConfig:
    """Return the parameters of the supported context, and the base."""
    theta = number(rope, "rope_theta", default=_top_level_theta(fields), above=0.0)
    original, factor = max_positions, 1.0
    if kind in ("llama3", "yarn", "longrope"):
        original = _original_positions(fields, rope, max_positions)
    if kind in ("linear", "dynamic", "llama3"):
        factor = number(rope, "factor", above=0.0)
    elif kind in ("yarn", "longrope"):
        factor = number(rope, "factor", default=max_positions / original, above=0.0)
    return RopeConfig(kind, head_dim, theta, max_positions, original, factor)


def _llama3(rope: Mapping[str, Any], plain: RopeConfig) -> RopeConfig:
    low = number(rope, "low_freq_factor", above=0.0)
    return replace(
        plain,
        low_freq_factor=low,
        high_freq_factor=number(rope, "high_freq_factor", above=low),
    )


def _yarn(rope: Mapping[str, Any], plain: RopeConfig) -> RopeConfig:
    truncate = rope.get("truncate", True)
    if truncate is not None and not isinstance(truncate, bool):
        raise UnsupportedModel("truncate", truncate)
    if plain.theta == 1.0:  # all dimensions have one frequency: there is no range to interpolate
        raise UnsupportedModel("rope_theta", plain.theta)
    return replace(
        plain,
        attention_factor=_optional(rope, "attention_factor"),
        beta_fast=_optional(rope, "beta_fast") or 32.0,
        beta_slow=_optional(rope, "beta_slow") or 1.0,
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
        truncate=bool(truncate),  # null is false, as in transformers
    )


def _longrope(rope: Mapping[str, Any], plain: RopeConfig) -> RopeConfig:
    if plain.original_positions == 1:  # its attention factor divides by the logarithm
        raise UnsupportedModel("original_max_position_embeddings", 1)
    return replace(
        plain,
        attention_factor=_optional(rope, "attention_factor"),
        short_factor=_factors(rope, "short_factor", plain.dim // 2),
        long_factor=_factors(rope, "long_factor", plain.dim // 2),
    )


def _section(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the effective section: the older key has priority, as in transformers."""
    for name in ("rope_scaling", "rope_parameters"):
        section = fields.get(name)
        if section:
            if not isinstance(section, dict) or any(isinstance(value, dict) for value in section.values()):
                raise UnsupportedModel(name, section)  # per layer type, or not an object
            return section
    return {}


def _top_level_theta(fields: Mapping[str, Any]) -> float:
    return number(fields, "rope_theta", default=DEFAULT_THETA, above=0.0)


def _original_positions(fields: Mapping[str, Any], rope: Mapping[str, Any], max_positions: int) -> int:
    name = "original_max_position_embeddings"
    if fields.get(name) is not None:
        return positive_int(fields, name)
    return max_positions if rope.get(name) is None else positive_int(rope, name)


def _optional(rope: Mapping[str, Any], name: str) -> float | None:
    return None if rope.get(name) is None else number(rope, name, above=0.0)


def _factors(rope: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    values = rope.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise UnsupportedModel(name, values)
    return tuple(number({name: value}, name, above=0.0) for value in values)
