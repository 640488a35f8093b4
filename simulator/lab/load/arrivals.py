"""When requests arrive: point processes as endless iterators of instants in seconds, ascending from 0.

Each process is a frozen value; ``times(rng)`` starts it anew and needs constant memory. The same process
and the same state of ``rng`` give the same instants.

A rate that changes with time is a time change: instants of a process with rate 1 are mapped through the
inverse of the cumulative rate. Unlike thinning, that keeps the burstiness of the process underneath.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Protocol


class Arrivals(Protocol):
    """A point process."""

    def times(self, rng: Random) -> Iterator[float]: ...


class RateProfile(Protocol):
    """A rate over time. ``cumulative`` is its integral from 0, strictly ascending."""

    def cumulative(self, at_s: float) -> float: ...

    def inverse(self, count: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: gaps are exponential."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive(rate_per_s=self.rate_per_s)

    def times(self, rng: Random) -> Iterator[float]:
        now_s = 0.0
        while True:
            now_s += rng.expovariate(self.rate_per_s)
            yield now_s


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps are gamma-distributed with coefficient of variation ``cv``: 1 is Poisson, above it is bursty."""

    rate_per_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _positive(rate_per_s=self.rate_per_s, cv=self.cv)

    def times(self, rng: Random) -> Iterator[float]:
        shape = 1.0 / self.cv**2
        scale_s = 1.0 / (self.rate_per_s * shape)
        now_s = 0.0
        while True:
            now_s += rng.gammavariate(shape, scale_s)
            yield now_s


@dataclass(frozen=True, slots=True)
class OnOff:
    """A Poisson process whose rate jumps between two values, each held for an exponential time (MMPP-2)."""

    on_rate_per_s: float
    off_rate_per_s: float
    mean_on_s: float
    mean_off_s: float

    def __post_init__(self) -> None:
        _positive(on_rate_per_s=self.on_rate_per_s, mean_on_s=self.mean_on_s, mean_off_s=self.mean_off_s)
        if not 0 <= self.off_rate_per_s < math.inf:
            raise ValueError(f"off_rate_per_s is {self.off_rate_per_s}, and must be 0 or more")

    @property
    def mean_rate_per_s(self) -> float:
        on = self.on_rate_per_s * self.mean_on_s
        off = self.off_rate_per_s * self.mean_off_s
        return (on + off) / (self.mean_on_s + self.mean_off_s)

    def times(self, rng: Random) -> Iterator[float]:
        began_s, is_on = 0.0, True
        while True:
            ends_s = began_s + rng.expovariate(1.0 / (self.mean_on_s if is_on else self.mean_off_s))
            rate_per_s = self.on_rate_per_s if is_on else self.off_rate_per_s
            now_s = began_s
            while rate_per_s > 0:
                now_s += rng.expovariate(rate_per_s)
                if now_s >= ends_s:
                    break
                yield now_s
            began_s, is_on = ends_s, not is_on


@dataclass(frozen=True, slots=True)
class Modulated:
    """A process whose rate follows ``profile``, with the burstiness that ``cv`` states."""

    profile: RateProfile
    cv: float = 1.0

    def __post_init__(self) -> None:
        _positive(cv=self.cv)

    def times(self, rng: Random) -> Iterator[float]:
        unit: Arrivals = Gamma(1.0, self.cv) if self.cv != 1.0 else Poisson(1.0)
        for count in unit.times(rng):
            yield self.profile.inverse(count)


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A sine around the mean: least at ``phase_s``, most half a period later.

    ``swing_ratio`` is how far the rate leaves the mean, 0 to below 1.
    """

    mean_rate_per_s: float
    swing_ratio: float = 0.6
    period_s: float = 86_400.0
    phase_s: float = 0.0

    def __post_init__(self) -> None:
        _positive(mean_rate_per_s=self.mean_rate_per_s, period_s=self.period_s)
        if not 0 <= self.swing_ratio < 1:
            raise ValueError(f"swing_ratio is {self.swing_ratio}, and must be 0 to below 1")

    def cumulative(self, at_s: float) -> float:
        turn = 2 * math.pi / self.period_s
        swing = math.sin(turn * (at_s - self.phase_s)) + math.sin(turn * self.phase_s)
        return self.mean_rate_per_s * (at_s - self.swing_ratio * swing / turn)

    def inverse(self, count: float) -> float:
        """Return the instant by which ``count`` are due, to within a microsecond."""
        middle_s = count / self.mean_rate_per_s
        reach_s = self.swing_ratio * self.period_s / math.pi
        low_s, high_s = max(0.0, middle_s - reach_s), middle_s + reach_s
        while high_s - low_s > 1e-6:
            at_s = (low_s + high_s) / 2
            if self.cumulative(at_s) < count:
                low_s = at_s
            else:
                high_s = at_s
        return high_s


@dataclass(frozen=True, slots=True)
class Steps:
    """A rate that is constant between the instants of ``steps`` (from_s, rate_per_s); the last one stays."""

    steps: tuple[tuple[float, float], ...]
    _counts: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.steps or self.steps[0][0] != 0:
            raise ValueError("the first step must begin at 0 s")
        counts = [0.0]
        for (from_s, rate_per_s), (to_s, _) in pairwise(self.steps):
            if to_s <= from_s:
                raise ValueError(f"steps must ascend: {to_s} s stands after {from_s} s")
            counts.append(counts[-1] + (to_s - from_s) * rate_per_s)
        for _, rate_per_s in self.steps:
            _positive(rate_per_s=rate_per_s)
        object.__setattr__(self, "_counts", tuple(counts))

    @classmethod
    def burst(cls, rate_per_s: float, *, factor: float = 10.0, from_s: float, for_s: float) -> Steps:
        """Return a constant rate that is ``factor`` times as high during one interval."""
        return cls(((0.0, rate_per_s), (from_s, rate_per_s * factor), (from_s + for_s, rate_per_s)))

    def cumulative(self, at_s: float) -> float:
        index = max(index for index, (from_s, _) in enumerate(self.steps) if from_s <= at_s)
        from_s, rate_per_s = self.steps[index]
        return self._counts[index] + (at_s - from_s) * rate_per_s

    def inverse(self, count: float) -> float:
        index = max(index for index, due in enumerate(self._counts) if due <= count)
        from_s, rate_per_s = self.steps[index]
        return from_s + (count - self._counts[index]) / rate_per_s


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}, and must be above 0")
