"""How many output tokens to expect of a sequence: a quantile of what its tenant's had, on this version.

Outputs are counted in buckets whose edges grow by 2^(1/4), so that a quantile is at most 19 % above the exact
one and never below it. Counts are halved when they reach ``window``, so that old ones fade (Cormode et al.,
Forward Decay, ICDE 2009, with steps for the exponential). A tenant with few samples uses the version's, a
version with few the configured default.

Correction: the level of the quantile follows what happens. Each output beyond its prediction and each
preemption raises it, each that stayed within lowers it a little, so that in the long run the share of those
beyond is what the level promises, whatever the counts say: Gibbs and Candes, Adaptive Conformal Inference
under Distribution Shift, NeurIPS 2021.

Pure: values only, no clock. Bounded: ``max_series`` histograms; the one not fed for longest goes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

_STEPS: Final = 4  # buckets per factor of two
_BUCKETS: Final = 1 + 20 * _STEPS  # up to 2^20 tokens
_REFRESH: Final = 8  # samples after which a remembered quantile is computed anew


@dataclass(frozen=True, slots=True)
class OutputPolicy:
    """``quantile`` is the level without correction, ``max_quantile`` the highest. ``gain``: how far one
    output beyond its prediction moves the level; a preemption counts as ``preemption_factor`` of them."""

    quantile: float = 0.8
    max_quantile: float = 0.99
    default_tokens: int = 256
    min_samples: int = 32
    window: int = 1024
    max_series: int = 4096
    gain: float = 0.01
    preemption_factor: float = 4.0

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
    """Output lengths of late, by bucket."""

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
        """Return the edge of the bucket that the quantile is in; it may lag by a few samples."""
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
    """Single writer. Keys are (tenant, version); the empty tenant stands for the version as a whole."""

    def __init__(self, policy: OutputPolicy) -> None:
        self.policy = policy
        self._series: dict[tuple[str, str], OutputHistogram] = {}
        self._levels: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._series)

    def level(self, digest: str) -> float:
        """Return the quantile that is predicted for the version now, with its correction."""
        return self._levels.get(digest, self.policy.quantile)

    def predict(self, tenant: str, digest: str) -> int:
        """Return the output tokens to reserve for a sequence, not yet cut to its own limit."""
        for key in ((tenant, digest), ("", digest)):
            series = self._series.get(key)
            if series is not None and series.samples >= self.policy.min_samples:
                return series.quantile(self.level(digest))
        return self.policy.default_tokens

    def note(
        self, tenant: str, digest: str, output_tokens: int, *, predicted_tokens: int | None = None
    ) -> None:
        """Count a sequence that came to its end. ``predicted_tokens``: what was reserved, where known."""
        for key in ((tenant, digest), ("", digest)):
            self._touch(key).note(output_tokens)
        if predicted_tokens is not None:
            self._move(digest, 1.0 if output_tokens > predicted_tokens else 0.0)

    def note_preempted(self, digest: str) -> None:
        """Count a sequence that had to leave its worker for want of blocks."""
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
