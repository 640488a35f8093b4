"""Quantiles of a stream in bounded memory, with a stated relative error.

Values fall into buckets whose bounds grow by a constant ratio (Masson, Rim, Lee: DDSketch, VLDB'19). Any
quantile above the floor is within ``error_ratio`` of a value of that rank. Values up to ``floor`` share
one bucket that reads as 0. When there are more than ``max_buckets``, the lowest are merged: upper
quantiles keep their error. Sketches of equal parameters merge without loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping


class Sketch:
    """Counts by bucket. 2,048 buckets at 1 % span a factor of 6e17, so nothing is merged in practice."""

    __slots__ = (
        "_buckets",
        "_log_ratio",
        "_low",
        "count",
        "error_ratio",
        "floor",
        "max_buckets",
        "most",
        "total",
    )

    def __init__(self, *, error_ratio: float = 0.01, floor: float = 1e-6, max_buckets: int = 2048) -> None:
        if not 0 < error_ratio < 1 or floor <= 0 or max_buckets < 2:
            raise ValueError("a sketch needs an error between 0 and 1, a floor above 0 and two buckets")
        self.error_ratio = error_ratio
        self.floor = floor
        self.max_buckets = max_buckets
        self._log_ratio = math.log((1 + error_ratio) / (1 - error_ratio))
        self._buckets: dict[int, float] = {}
        self._low = 0.0
        self.count = 0.0
        self.total = 0.0
        self.most = 0.0

    def __len__(self) -> int:
        """Return how many buckets are in use."""
        return len(self._buckets)

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count ``value`` ``weight`` times. ValueError for a negative value or one that is no number."""
        if not 0 <= value < math.inf or not 0 < weight < math.inf:
            raise ValueError(f"cannot count {value} {weight} times")
        self.count += weight
        self.total += value * weight
        self.most = max(self.most, value)
        if value <= self.floor:
            self._low += weight
            return
        index = self._index(value)
        self._buckets[index] = self._buckets.get(index, 0.0) + weight
        if len(self._buckets) > self.max_buckets:
            self._merge_lowest()

    def merge(self, other: Sketch) -> None:
        """Count all that ``other`` counted. ValueError if it was made otherwise."""
        if (self.error_ratio, self.floor) != (other.error_ratio, other.floor):
            raise ValueError("sketches of different errors or floors do not merge")
        self.add_parts(other._low, other._buckets, other.total, other.most)

    def keep(self, ratio: float) -> None:
        """Weigh everything counted so far by ``ratio`` (0..1): what is counted from now on weighs more."""
        for index in self._buckets:
            self._buckets[index] *= ratio
        self._low *= ratio
        self.count *= ratio
        self.total *= ratio

    def quantile(self, ratio: float) -> float | None:
        """Return the value of rank ``ratio`` (0..1) within ``error_ratio``; None if nothing was counted."""
        if not 0 <= ratio <= 1:
            raise ValueError(f"{ratio} is no quantile: 0 to 1")
        if not self.count:
            return None
        if self._low >= ratio * self.count and self._low:
            return 0.0
        index = self.bucket_of(ratio)
        return self.most if index is None else min(self._middle(index), self.most)

    def bucket_of(self, ratio: float) -> int | None:
        """Return the bucket that the quantile lies in; None if nothing was counted or it is at the floor."""
        rank = ratio * self.count
        seen = self._low
        if not self.count or (self._low and seen >= rank):
            return None
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            if seen >= rank - 1e-9 * self.count:
                return index
        return None

    def above(self, index: int) -> float:
        """Return the weight in the buckets above ``index``."""
        return sum(weight for at, weight in self._buckets.items() if at > index)

    def above_value(self, value: float) -> float:
        """Return the weight of values above ``value``; those in its bucket count as not above."""
        return self.count - self._low if value <= self.floor else self.above(self._index(value))

    def steps(self, factor: float) -> int:
        """Return by how many buckets a value moves that is multiplied by ``factor``."""
        return round(math.log(factor) / self._log_ratio)

    @property
    def parts(self) -> tuple[float, dict[int, float]]:
        """The weight at the floor, and by bucket, as ``add_parts`` takes them."""
        return self._low, dict(self._buckets)

    def add_parts(self, low: float, buckets: Mapping[int, float], total: float, most: float) -> None:
        """Count the parts of a sketch that was made with the same error and floor."""
        for index, weight in buckets.items():
            self._buckets[index] = self._buckets.get(index, 0.0) + weight
        while len(self._buckets) > self.max_buckets:
            self._merge_lowest()
        self._low += low
        self.count += low + sum(buckets.values())
        self.total += total
        self.most = max(self.most, most)

    def values(self) -> Iterator[tuple[float, float]]:
        """Yield a value of each bucket and its weight."""
        if self._low:
            yield 0.0, self._low
        for index, weight in self._buckets.items():
            yield min(self._middle(index), self.most), weight

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def cdf(self) -> Iterator[tuple[float, float]]:
        """Yield (value, share of the counted up to it), ascending."""
        seen = self._low
        if self._low:
            yield 0.0, seen / self.count
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            yield min(self._middle(index), self.most), seen / self.count

    def _index(self, value: float) -> int:
        return math.ceil(math.log(value) / self._log_ratio)

    def _middle(self, index: int) -> float:
        upper = math.exp(index * self._log_ratio)
        return upper * (1 - self.error_ratio)

    def _merge_lowest(self) -> None:
        lowest, second = sorted(self._buckets)[:2]
        self._buckets[second] += self._buckets.pop(lowest)


def merged(sketches: Iterable[Sketch]) -> Sketch:
    """Return one sketch that counts what all of them do; an empty one for none."""
    whole: Sketch | None = None
    for sketch in sketches:
        if whole is None:
            whole = Sketch(error_ratio=sketch.error_ratio, floor=sketch.floor, max_buckets=sketch.max_buckets)
        whole.merge(sketch)
    return whole or Sketch()
