"""How long prompts and outputs are, in tokens: distributions as frozen values, drawn with a given source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Protocol


class Lengths(Protocol):
    """A distribution of lengths; every draw is at least 1."""

    def draw(self, rng: Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a length of {self.tokens} tokens; the least is 1")

    def draw(self, rng: Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Half of the draws are below ``median_tokens``; ``sigma`` is the deviation of the logarithm.

    Draws are cut to ``least_tokens`` and ``most_tokens``.
    """

    median_tokens: float
    sigma: float
    least_tokens: int = 1
    most_tokens: int = 131_072

    def __post_init__(self) -> None:
        if self.median_tokens < 1 or self.sigma < 0 or not 1 <= self.least_tokens <= self.most_tokens:
            raise ValueError(f"{self} is no distribution of lengths")

    def draw(self, rng: Random) -> int:
        drawn = rng.lognormvariate(math.log(self.median_tokens), self.sigma)
        return min(max(round(drawn), self.least_tokens), self.most_tokens)
