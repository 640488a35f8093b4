"""Keyed random numbers: a draw is a function of (seed, choice, position) and of nothing else.

SplitMix64 (Steele, Lea and Flood, OOPSLA'14) used as a counter: the state is never advanced, it is
computed from the position, so a stream that continues on another worker draws the same numbers.
"""

from __future__ import annotations

from typing import Final

MASK64: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
MULTIPLIER_1: Final = 0xBF58476D1CE4E5B9
MULTIPLIER_2: Final = 0x94D049BB133111EB
UNIFORM_BITS: Final = 53  # what a double holds


def mix64(word: int) -> int:
    """Return the SplitMix64 finaliser of a 64-bit word; it is a bijection."""
    word = (word ^ (word >> 30)) * MULTIPLIER_1 & MASK64
    word = (word ^ (word >> 27)) * MULTIPLIER_2 & MASK64
    return word ^ (word >> 31)


def sequence_key(seed: int, choice: int) -> int:
    """Return the 64-bit key of one choice of one request; any two pairs differ but by chance of 2**-64."""
    return mix64((mix64((seed + GOLDEN) & MASK64) + choice * GOLDEN) & MASK64)


def uniform(key: int, position: int) -> float:
    """Return the draw in [0, 1) at an output position. The sampler has the same function over a batch."""
    return float(mix64((key + (position + 1) * GOLDEN) & MASK64) >> (64 - UNIFORM_BITS)) * 2.0**-UNIFORM_BITS
