"""Non-negative least squares with few unknowns and exponential forgetting, in information form.

The decayed normal equations give the same estimate as recursive least squares (Ljung, System Identification,
1999). Residuals are relative to the measured value, so that a stall has little weight. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import sqrt
from typing import Final

_RIDGE: Final = 1e-9


@dataclass(slots=True)
class NormalEquations:
    """Decayed weighted normal equations; ``xx`` is the upper triangle, row by row."""

    xx: list[float]
    xy: list[float]
    keep_ratio: float  # part of the earlier samples' weight that each sample leaves
    yy: float = 0.0

    @staticmethod
    def zero(size: int, keep_ratio: float) -> NormalEquations:
        """Return the equations of ``size`` unknowns without a sample."""
        return NormalEquations([0.0] * (size * (size + 1) // 2), [0.0] * size, keep_ratio)

    def add(self, x: Sequence[float], y: float) -> None:
        """Add a sample: work ``x`` that took ``y``, above 0."""
        weight = 1.0 / (y * y)
        keep = self.keep_ratio
        index = 0
        for i, first in enumerate(x):
            scaled = weight * first
            for second in x[i:]:
                self.xx[index] = self.xx[index] * keep + scaled * second
                index += 1
            self.xy[i] = self.xy[i] * keep + scaled * y
        self.yy = self.yy * keep + 1.0


@dataclass(frozen=True, slots=True)
class Solution:
    """``values`` are None where no sample had any of that work.

    ``samples``: their effective number. ``error_ratio``: typical residual over the measured value.
    """

    values: tuple[float | None, ...]
    samples: float
    error_ratio: float


def non_negative(equations: Sequence[NormalEquations]) -> Solution:
    """Return the non-negative least squares solution over the sum of the equations, at least one.

    Every subset of the unknowns is tried, so that the minimum is exact; this suits about five unknowns at
    most.
    """
    xx = [sum(column) for column in zip(*(each.xx for each in equations), strict=True)]
    xy = [sum(column) for column in zip(*(each.xy for each in equations), strict=True)]
    yy = sum(each.yy for each in equations)
    size = len(xy)
    diagonal = [xx[_at(i, i, size)] for i in range(size)]
    scale = [1.0 / sqrt(value) if value > 0 else 0.0 for value in diagonal]
    best_gain, best = 0.0, [0.0] * size
    for subset in _subsets(size):
        if not all(scale[i] for i in subset):
            continue
        matrix = [[xx[_at(i, j, size)] * scale[i] * scale[j] for j in subset] for i in subset]
        right = [xy[i] * scale[i] for i in subset]
        found = _linear(matrix, right)
        gain = sum(value * known for value, known in zip(found, right, strict=True))
        if min(found) >= 0.0 and gain > best_gain:
            best_gain, best = gain, [0.0] * size
            for i, value in zip(subset, found, strict=True):
                best[i] = value * scale[i]
    values = tuple(value if scale[i] else None for i, value in enumerate(best))
    return Solution(values, yy, sqrt(max(0.0, 1.0 - best_gain / yy)) if yy > 0 else 1.0)


@cache
def _subsets(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(subset for count in range(size, 0, -1) for subset in combinations(range(size), count))


def _at(i: int, j: int, size: int) -> int:
    """Return the index of the element in the upper triangle, row by row."""
    low, high = (i, j) if i <= j else (j, i)
    return low * size - low * (low - 1) // 2 + high - low


def _linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small positive definite system, ridged so that it is not singular, by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        rows[i][i] += _RIDGE
    for i in range(size):
        pivot = rows[i][i] or _RIDGE
        for j in range(i + 1, size):
            factor = rows[j][i] / pivot
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / (rows[i][i] or _RIDGE)
    return found
