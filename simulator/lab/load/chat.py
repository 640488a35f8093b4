"""The traffic that most scenarios are made of: a chat service with prompts and answers of varied length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from simulator.fleet.spec import TenantSpec
from simulator.lab.load.lengths import LogNormal

# Median and spread near those of the public Azure conversation trace of 2023.
PROMPT: Final = LogNormal(700.0, 0.9, least_tokens=16, most_tokens=8192)
OUTPUT: Final = LogNormal(140.0, 0.8, least_tokens=4, most_tokens=1024)


def mean_tokens(lengths: LogNormal) -> float:
    """Return the mean of a lognormal distribution, its cuts aside."""
    return lengths.median_tokens * math.exp(lengths.sigma**2 / 2)


PROMPT_MEAN: Final = mean_tokens(PROMPT)
OUTPUT_MEAN: Final = mean_tokens(OUTPUT)


def tenants(count: int, *, weights: Sequence[float] = (1.0,)) -> tuple[TenantSpec, ...]:
    """Return tenants without limits; weights are dealt out in turn."""
    return tuple(TenantSpec(f"tenant-{index}", weights[index % len(weights)]) for index in range(count))
