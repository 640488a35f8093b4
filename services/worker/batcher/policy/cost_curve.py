"""What a batch takes, measured: seconds by width and number of rows, with quantiles. Pure.

Sizes fall into classes. Each class of a width keeps a mean and a sketch of its seconds; between the classes
the mean is interpolated and never falls. Where nothing was measured, ``seconds = batch + rows * a + tokens *
b`` is fitted to all batches, and the quantile is the mean times the quantile of measured over predicted
time.

Bounded: ``MOST_WIDTHS`` widths, the least recently used goes first. Curves of equal versions and devices
merge.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from services.core.estimates.least_squares import NormalEquations, non_negative
from services.core.estimates.sketch import Sketch

SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100, 160, 256, 512, 1024)
MOST_WIDTHS: Final = 16
MIN_SAMPLES: Final = 3.0  # fewest samples of a class before its mean counts
MIN_QUANTILE_SAMPLES: Final = 20.0  # fewest samples of a class before its own quantile counts
WINDOW: Final = 256.0  # samples of a class, after which they weigh half
FIT_SAMPLES: Final = 8.0
LIMIT_FACTOR: Final = 8.0  # a run that takes so many times its 99th percentile hangs
LEAST_LIMIT_S: Final = 2.0
_KEEP_RATIO: Final = 0.998
_REFRESH: Final = 16  # samples after which means are computed again
_LEAST_S: Final = 1e-7
UNMEASURED_RATIO: Final = 1.5  # ratio of a high quantile to the mean while nothing is measured


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Assumed seconds before anything is measured: per batch, per additional row, per additional token or
    tile."""

    batch_s: float = 2e-3
    row_s: float = 1e-4
    token_s: float = 1e-6


def _sketch() -> Sketch:
    return Sketch(error_ratio=0.02, floor=_LEAST_S, max_buckets=128)


@dataclass(slots=True)
class _SizeClass:
    seconds: Sketch = field(default_factory=_sketch)
    rows: float = 0.0

    def note(self, size: int, seconds: float) -> None:
        self.seconds.add(seconds)
        self.rows += size
        self._forget()

    def merge(self, other: _SizeClass) -> None:
        self.seconds.merge(other.seconds)
        self.rows += other.rows
        self._forget()

    def _forget(self) -> None:
        while self.seconds.count > WINDOW:
            self.seconds.keep(0.5)
            self.rows *= 0.5


class CostCurve:
    """Single writer."""

    def __init__(self, prior: CostPrior | None = None) -> None:
        self._prior = prior if prior is not None else CostPrior()
        self._widths: dict[int, dict[int, _SizeClass]] = {}  # measurements by width and place in SIZES
        self._ratios = _sketch()  # measured over predicted
        self._equations = NormalEquations.zero(3, _KEEP_RATIO)
        self._fit = (self._prior.batch_s, self._prior.row_s, self._prior.token_s)
        self._points: dict[int, list[tuple[float, float]]] = {}
        self._unrefreshed = 0

    @property
    def widths(self) -> int:
        return len(self._widths)

    def note(self, width: int, size: int, seconds: float) -> None:
        """Count a batch of ``size`` rows of ``width`` tokens, at least 1, that took ``seconds``."""
        seconds = max(seconds, _LEAST_S)
        self._ratios.add(seconds / self.mean_s(width, size))
        if self._ratios.count > WINDOW:
            self._ratios.keep(0.5)
        self._classes(width).setdefault(_class_of(size), _SizeClass()).note(size, seconds)
        self._equations.add((1.0, float(size), float(size * width)), seconds)
        self._unrefreshed += 1
        if self._unrefreshed >= _REFRESH:
            self._refresh()

    def merge(self, other: CostCurve) -> None:
        """Count all that ``other`` counted."""
        for width, classes in other._widths.items():
            own = self._classes(width)
            for place, size_class in classes.items():
                own.setdefault(place, _SizeClass()).merge(size_class)
        self._ratios.merge(other._ratios)
        equations, added = self._equations, other._equations
        equations.xx = [sum(pair) for pair in zip(equations.xx, added.xx, strict=True)]
        equations.xy = [sum(pair) for pair in zip(equations.xy, added.xy, strict=True)]
        equations.yy += added.yy
        self._refresh()

    def mean_s(self, width: int, size: float) -> float:
        """Return the expected seconds of a batch; never less for more rows."""
        points = self._points_of(width)
        if not points:
            return self._fitted_s(width, size)
        (first, first_s), (last, last_s) = points[0], points[-1]
        if size >= last:
            return last_s + (size - last) * self._row_s(width)
        if size <= first:
            return max(_LEAST_S, first_s - (first - size) * min(self._row_s(width), first_s / first))
        index = bisect_left(points, (size, 0.0))
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return low_s + (high_s - low_s) * (size - low) / (high - low)

    def quantile_s(self, width: int, size: float, level: float) -> float:
        """Return the seconds within which a batch ends with probability ``level``."""
        mean_s = self.mean_s(width, size)
        found = self._widths.get(width, {}).get(_class_of(size))
        if found is not None and found.seconds.count >= MIN_QUANTILE_SAMPLES:
            return mean_s * max(1.0, (found.seconds.quantile(level) or 0.0) / (found.seconds.mean or 1.0))
        if self._ratios.count >= MIN_QUANTILE_SAMPLES:
            return mean_s * max(1.0, self._ratios.quantile(level) or 0.0)
        return mean_s * UNMEASURED_RATIO

    def limit_s(self, width: int, size: int) -> float:
        """Return after how long a run hangs and is ended.

        Where nothing was measured the prior counts too: a fit to one width does not show what others take.
        """
        expected_s = self.quantile_s(width, size, 0.99)
        found = self._widths.get(width, {}).get(_class_of(size))
        if found is None or found.seconds.count < MIN_SAMPLES:
            prior = self._prior
            prior_s = prior.batch_s + size * (prior.row_s + width * prior.token_s)
            expected_s = max(expected_s, UNMEASURED_RATIO * prior_s)
        return max(LEAST_LIMIT_S, LIMIT_FACTOR * expected_s)

    def _classes(self, width: int) -> dict[int, _SizeClass]:
        classes = self._widths.pop(width, None)
        if classes is None:
            classes = {}
            while len(self._widths) >= MOST_WIDTHS:
                del self._widths[next(iter(self._widths))]
        self._widths[width] = classes
        return classes

    def _fitted_s(self, width: int, size: float) -> float:
        batch_s, row_s, token_s = self._fit
        return max(_LEAST_S, batch_s + size * (row_s + width * token_s))

    def _row_s(self, width: int) -> float:
        return self._fit[1] + width * self._fit[2]

    def _refresh(self) -> None:
        self._unrefreshed = 0
        self._points.clear()
        solution = non_negative([self._equations])
        if solution.samples >= FIT_SAMPLES:
            batch_s, row_s, token_s = (value or 0.0 for value in solution.values)
            self._fit = (batch_s, row_s, token_s)

    def _points_of(self, width: int) -> list[tuple[float, float]]:
        """Return (rows, seconds) of the measured classes, ascending in both."""
        if (known := self._points.get(width)) is not None:
            return known
        points, floor_s = [], 0.0
        for _, found in sorted(self._widths.get(width, {}).items()):
            if found.seconds.count >= MIN_SAMPLES:
                floor_s = max(floor_s, found.seconds.mean or 0.0)
                points.append((found.rows / found.seconds.count, floor_s))
        self._points[width] = [
            point for point, later in pairwise([*points, (float("inf"), 0.0)]) if point[0] < later[0]
        ]
        while len(self._points) > MOST_WIDTHS:
            del self._points[next(iter(self._points))]
        return self._points[width]


def _class_of(size: float) -> int:
    return min(len(SIZES) - 1, bisect_left(SIZES, size))
