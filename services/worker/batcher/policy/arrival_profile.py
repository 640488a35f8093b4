"""When the next rows come: their rate, and how many come back soon after a batch was answered. Pure.

Open arrivals do not depend on what is answered. Closed-loop clients send their next row when they receive an
answer, so arrivals crowd after the end of a batch. Both are found from arrivals by the time since the last
end: the density of the quieter bins is the open part, and what a bin has above it comes back, per answered
row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from math import exp
from typing import Final

FIRST_S: Final = 100e-6  # width of the first bin after the end of a batch
GROWTH: Final = 1.4
BINS: Final = 20  # the last one ends after 0.2 s
EDGES: Final = tuple([0.0] + [FIRST_S * (GROWTH ** (index + 1) - 1) / (GROWTH - 1) for index in range(BINS)])
LEAST_WAIT_S: Final = 20e-6  # a shorter wait costs more than it can bring
WINDOW: Final = 2048.0  # arrivals, after which all counts are halved
MEMORY_S: Final = 0.25  # time constant of the rate's mean
QUIET_RATIO: Final = 0.25  # the open density is this quantile of the bins by time
MIN_ARRIVALS: Final = 64.0  # fewest arrivals before rows are assumed to return


class ArrivalProfile:
    """Single writer. ``now_s`` never falls."""

    def __init__(self) -> None:
        self._counts = [0.0] * BINS
        self._seconds = [0.0] * BINS  # how long each bin was observed
        self._answered = [0.0] * BINS  # rows that were answered before it
        self._ended_s: float | None = None
        self._rows = 0  # size of the batch that ended last
        self._weight, self._weighed_s = 0.0, 0.0
        self._began_s: float | None = None
        self._open_ratio, self._returning = 1.0, [0.0] * BINS
        self._total = 0.0

    def arrived(self, now_s: float) -> None:
        """Count a row."""
        self._began_s = now_s if self._began_s is None else self._began_s
        self._weight = self._weight * self._decay(now_s) + 1.0
        self._weighed_s = now_s
        if self._ended_s is None:
            return
        index = bisect_right(EDGES, now_s - self._ended_s) - 1
        if index < BINS:
            self._counts[index] += 1.0
            self._total += 1.0

    def ended(self, rows: int, now_s: float) -> None:
        """Count a batch whose answers are on their way."""
        if self._ended_s is not None:
            self._observe(now_s - self._ended_s)
        self._ended_s, self._rows = now_s, rows

    def rate_per_s(self, now_s: float) -> float:
        """Return the rate of open arrivals; it falls while none come."""
        if self._began_s is None:
            return 0.0
        observed_s = MEMORY_S * (1.0 - exp(-(now_s - self._began_s) / MEMORY_S))
        rate = self._weight * self._decay(now_s) / max(observed_s, FIRST_S)
        return rate * self._open_ratio if self._total >= MIN_ARRIVALS else rate

    def returning(self, now_s: float) -> Iterator[tuple[float, float]]:
        """Yield (seconds from now, rows expected back by then), ascending; nothing when none are expected."""
        if self._ended_s is None or self._total < MIN_ARRIVALS:
            return
        since_s, back = now_s - self._ended_s, 0.0
        for index in range(max(0, bisect_right(EDGES, since_s) - 1), BINS):
            begin, end = EDGES[index], EDGES[index + 1]
            back += self._rows * self._returning[index] * (end - max(begin, since_s)) / (end - begin)
            if end - since_s >= LEAST_WAIT_S and self._returning[index]:
                yield end - since_s, back

    def _decay(self, now_s: float) -> float:
        return exp(-max(0.0, now_s - self._weighed_s) / MEMORY_S)

    def _observe(self, elapsed_s: float) -> None:
        for index in range(BINS):
            begin, end = EDGES[index], EDGES[index + 1]
            if elapsed_s <= begin:
                break
            observed_s = min(end, elapsed_s) - begin
            self._seconds[index] += observed_s
            self._answered[index] += self._rows * observed_s / (end - begin)
        self._split()
        if self._total >= WINDOW:
            for counts in (self._counts, self._seconds, self._answered):
                counts[:] = [count / 2.0 for count in counts]
            self._total /= 2.0

    def _split(self) -> None:
        """Split the counts into open arrivals and rows that came back."""
        observed_s = sum(self._seconds)
        densities = sorted(
            (count / seconds, seconds)
            for count, seconds in zip(self._counts, self._seconds, strict=True)
            if seconds > 0.0
        )
        upto_s = accumulate(seconds for _, seconds in densities)
        quiet_s = QUIET_RATIO * observed_s
        quiet = next((index for index, sum_s in enumerate(upto_s) if sum_s >= quiet_s), 0)
        open_per_s = densities[quiet][0] if densities else 0.0
        self._open_ratio = min(1.0, open_per_s * observed_s / self._total) if self._total else 1.0
        self._returning = [
            max(0.0, count - open_per_s * seconds) / answered if answered else 0.0
            for count, seconds, answered in zip(self._counts, self._seconds, self._answered, strict=True)
        ]
