"""Rotary position embedding, with the scalings that ``rope_config`` accepts.

Frequencies follow transformers bit for bit in float32, so that long contexts do not drift from it.
Dynamic NTK and LongRoPE choose frequencies by the length of the sequence. Here the length that counts
for a token is the larger of the prompt and of the tokens up to it: what a run with a cache computes, and
independent of how the prefill was cut, of preemption and of a resume.
"""

from __future__ import annotations

import math

import torch

from fairway.formats.rope_config import RopeConfig


class Rope:
    """``cos_sin`` gives the rotation of each row; tables are built for ``max_model_len`` positions."""

    def __init__(
        self, config: RopeConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._scale = _attention_factor(config)
        positions = torch.arange(max_model_len, dtype=torch.float32)
        self._short = _frequencies(config)
        self._cos, self._sin = self._rotation(positions[:, None] * self._short)
        self._long = torch.tensor(config.long_factor, dtype=torch.float32)

    def cos_sin(
        self, positions: torch.Tensor, prompt_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each [rows, 1, dim], for int64 [rows] arguments on the CPU.

        The first half of sin is negated: with both halves swapped, a rotation is two products and a sum.
        """
        if self._config.depends_on_length:
            lengths = torch.maximum(positions + 1, prompt_tokens)
            if int(lengths.max()) > self._config.original_positions:
                return self._rotation(positions[:, None] * self._frequencies_at(lengths))
        on_device = positions.to(self._device, non_blocking=True)
        return self._cos.index_select(0, on_device), self._sin.index_select(0, on_device)

    def _rotation(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        cos, sin = cos.to(self._device, self._dtype), sin.to(self._device, self._dtype)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _frequencies_at(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the frequencies [rows, dim/2] of tokens in sequences of these lengths.

        Lengths are computed one by one: torch's power of an element can depend on how many there are.
        """
        distinct, rows = torch.unique(lengths, return_inverse=True)
        return torch.stack([self._frequencies_of(length) for length in distinct.tolist()])[rows]

    def _frequencies_of(self, length: int) -> torch.Tensor:
        """Return the frequencies [dim/2] of a token in a sequence of that length."""
        config = self._config
        exponents = _exponents(config.dim)
        if config.kind == "longrope" and length > config.original_positions:
            return 1.0 / (self._long * config.theta**exponents)
        if config.kind == "longrope" or length <= config.max_positions:
            return self._short
        # Dynamic NTK: the base grows with the length, so that the slowest frequency spans it.
        stretched = config.factor * torch.tensor(length) / config.max_positions
        base = config.theta * (stretched - (config.factor - 1)) ** (config.dim / (config.dim - 2))
        return 1.0 / base**exponents


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [rows, heads, dim] rotated by ``cos_sin``; dimension i pairs with i + dim/2."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


def _frequencies(config: RopeConfig) -> torch.Tensor:
    """Return the frequencies [dim/2] in float32 of a sequence no longer than pre-training's."""
    plain = 1.0 / (config.theta ** _exponents(config.dim))
    match config.kind:
        case "linear":
            return plain / config.factor
        case "llama3":
            return _llama3(config, plain)
        case "yarn":
            return _yarn(config)
        case "longrope":
            return 1.0 / (torch.tensor(config.short_factor) * config.theta ** _exponents(config.dim))
    return plain


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between are blended (Llama 3.1)."""
    low, high, original = config.low_freq_factor, config.high_freq_factor, config.original_positions
    waves = 2 * math.pi / plain
    stretched = torch.where(waves > original / low, plain / config.factor, plain)
    smooth = (original / waves - low) / (high - low)
    blended = (1 - smooth) * stretched / config.factor + smooth * stretched
    between = (waves >= original / high) & (waves <= original / low)
    return torch.where(between, blended, stretched)


def _yarn(config: RopeConfig) -> torch.Tensor:
    """Interpolate the dimensions that turn seldom within the original context, keep the others (YaRN)."""
    dim = config.dim

    def turning(rotations: float) -> float:
        turns = config.original_positions / (rotations * 2 * math.pi)
        return (dim * math.log(turns)) / (2 * math.log(config.theta))

    low, high = turning(config.beta_fast), turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = config.theta ** (torch.arange(0, dim, 2).float() / dim)
    extrapolated, interpolated = 1.0 / periods, 1.0 / (config.factor * periods)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep


def _attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "yarn":
        if config.mscale and config.mscale_all_dim:
            return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
        return _mscale(config.factor, 1.0)
    if config.kind == "longrope" and config.factor > 1.0:
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_positions))
    return 1.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
