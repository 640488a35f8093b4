"""Predicted output length of a sequence: a quantile of its tenant's recent outputs on this version.

Outputs are counted in buckets whose edges grow by 2^(1/4), so that a quantile is at most 19 % above the exact
one and never below it. Counts are halved when they reach ``window``, so that old ones decay (Cormode et al.,
Forward Decay, ICDE 2009, with steps for the exponential). A tenant with few samples uses the quantile of the
version, a version with few samples the configured default.

Correction: the level of the quantile adapts to the results. Each output beyond its prediction and each
preemption raises it, and each output within its prediction lowers it a little, so that in the long run the
share of outputs beyond the prediction matches the level, whatever the counts: Gibbs and Candes, Adaptive
Conformal Inference under Distribution Shift, NeurIPS 2021.

Pure: values only, no clock. Bounded: ``max_series`` histograms; the least recently updated one is removed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

_STEPS: Final = 4  # buckets per factor of two
_BUCKETS: Final = 1 + 20 * _STEPS  # up to 2^20 tokens
_REFRESH: Final = 8  # a cached quantile is computed again after so many samples


@dataclass(frozen=True, slots=True)
class OutputPolicy:
    """Settings of the prediction."""

    quantile: float = 0.8  # level without correction
    max_quantile: float = 0.99  # highest level
    default_tokens: int = 256
    min_samples: int = 32
    window: int = 1024
    max_series: int = 4096
    gain: float = 0.01  # how far one output beyond its prediction moves the level
    preemption_factor: float = 4.0  # a preemption counts as so many of them

    def __post_init__(self) -> None:
        if not 0.0 < self.quantile <= self.max_quantile < 1.0:
            raise ValueError("a quantile is above 0 and below 1")


def bucket_of(tokens: int) -> int:
    """Return the first bucket whose edge is not below ``tokens``."""
    return min(_BUCKETS - 1, math.ceil(_STEPS * math.log2(tokens) - 1e-9)) if tokens > 1 else 0


def edge_of(bucket: int) -> int:
    """Return the largest number of tokens of a bucket."""
    return math.floor(math.pow(2.0, bucket / _STEPS) + 1e-9)


@dataclass(slots=True)
class OutputHistogram:
    """Recent output lengths, by bucket."""

    window: int
    samples: float = 0.0
    _counts: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    _known: dict[float, int] = field(default_factory=dict)
    _since: int = 0

    def note(self, tokens: int) -> None:
        self._counts[bucket_of(tokens)] += 1.0
        self.samples += 1.0
        self._since += 1
        if self.samples >= self.window:
            self._counts = [count / 2.0 for count in self._counts]
            self.samples /= 2.0
        if self._since >= _REFRESH:
            self._since = 0
            self._known.clear()

    def quantile(self, level: float) -> int:
        """Return the edge of the bucket with the quantile; it may lag by a few samples."""
        level = round(level, 2)
        found = self._known.get(level)
        if found is None:
            found = self._known[level] = self._exact(level)
        return found

    def _exact(self, level: float) -> int:
        left = level * self.samples
        for bucket, count in enumerate(self._counts):
            left -= count
            if left <= 1e-9 and count:
                return edge_of(bucket)
        return edge_of(_BUCKETS - 1)


class OutputQuantiles:
    """Single writer. Keys are (tenant, version); the empty tenant stands for all tenants of the version."""

    def __init__(self, policy: OutputPolicy) -> None:
        self.policy = policy
        self._series: dict[tuple[str, str], OutputHistogram] = {}
        self._levels: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._series)

    def level(self, digest: str) -> float:
        """Return the corrected quantile level of the version."""
        return self._levels.get(digest, self.policy.quantile)

    def predict(self, tenant: str, digest: str) -> int:
        """Return the output tokens to reserve for a sequence, before its own limit is applied."""
        for key in ((tenant, digest), ("", digest)):
            series = self._series.get(key)
            if series is not None and series.samples >= self.policy.min_samples:
                return series.quantile(self.level(digest))
        return self.policy.default_tokens

    def note(
        self, tenant: str, digest: str, output_tokens: int, *, predicted_tokens: int | None = None
    ) -> None:
        """Count a finished sequence. ``predicted_tokens``: the reserved output, if known."""
        for key in ((tenant, digest), ("", digest)):
            self._touch(key).note(output_tokens)
        if predicted_tokens is not None:
            self._move(digest, 1.0 if output_tokens > predicted_tokens else 0.0)

    def note_preempted(self, digest: str) -> None:
        """Count a sequence that was preempted for lack of blocks."""
        self._move(digest, self.policy.preemption_factor)

    def _move(self, digest: str, beyond: float) -> None:
        level = self.level(digest) + self.policy.gain * (beyond - (1.0 - self.policy.quantile))
        self._levels.pop(digest, None)
        self._levels[digest] = min(self.policy.max_quantile, max(self.policy.quantile, level))
        if len(self._levels) > self.policy.max_series:
            del self._levels[next(iter(self._levels))]

    def _touch(self, key: tuple[str, str]) -> OutputHistogram:
        series = self._series.pop(key, None)
        if series is None:
            series = OutputHistogram(self.policy.window)
            while len(self._series) >= self.policy.max_series:
                del self._series[next(iter(self._series))]
        self._series[key] = series
        return series
