"""Rows of other tenants between the layers of a long batch: how many. Pure.

A row that arrives while a batch of others runs would wait for its end. Run between two of its layers, it
waits for one layer, and delays the batch by what it takes itself.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from services.worker.batcher.policy.cost_curve import CostCurve


@dataclass(frozen=True, slots=True)
class LongBatch:
    """A batch that runs. ``whole_s`` is its predicted time without others, ``left_s`` what is left of it.

    ``lent_s``: what batches between its layers were predicted to take so far.
    """

    rows: int
    whole_s: float
    left_s: float
    lent_s: float

    @property
    def most_s(self) -> float:
        """What a batch between its layers may take; 0: there is no time for one.

        All of them take no longer than the batch itself, whose tenant keeps half of the device. One that
        takes longer than what is left would be answered earlier after the end.
        """
        return max(0.0, min(self.left_s, self.whole_s - self.lent_s))

    def rows_between(self, curve: CostCurve, *, width: int, rows: int) -> int:
        """Return how many of so many rows to run between its layers; 0: none, that does not pay.

        It pays where it lowers the sum of the latencies of these rows and those of the batch.
        """
        count = bisect_right(range(1, rows + 1), self.most_s, key=lambda size: curve.mean_s(width, size))
        if not count or self.rows * curve.mean_s(width, count) >= count * self.left_s:
            return 0
        return count
