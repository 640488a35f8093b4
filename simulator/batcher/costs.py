"""What a batch takes in the simulation: measured means, interpolated, with a drawn spread."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

MEASURED: Final = Path(__file__).with_name("costs.json")  # written by bench/batch_costs.py
SPREAD: Final = 0.08  # standard deviation of the logarithm of a run's time


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """Points (rows, seconds) by width, ascending. A width costs as the next measured one."""

    points: Mapping[int, tuple[tuple[int, float], ...]]

    @staticmethod
    def measured(model: str, path: Path = MEASURED) -> BatchCosts:
        """Return the measured costs of a model."""
        found = json.loads(path.read_text("utf-8"))[model]
        return BatchCosts(
            {
                int(width): tuple((int(rows), ms / 1e3) for rows, ms in sorted(costs.items(), key=_rows))
                for width, costs in found.items()
            }
        )

    @staticmethod
    def linear(batch_s: float, row_s: float, most_rows: int = 100) -> BatchCosts:
        """Return ``batch_s + rows * row_s`` at any width."""
        return BatchCosts({0: ((1, batch_s + row_s), (most_rows, batch_s + most_rows * row_s))})

    def mean_s(self, width: int, rows: int) -> float:
        """Return the mean seconds of a batch."""
        widths = sorted(self.points)
        points = self.points[widths[min(len(widths) - 1, bisect_left(widths, width))]]
        index = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)

    def draw_s(self, width: int, rows: int, rng: Random) -> float:
        """Return the seconds of one run."""
        return self.mean_s(width, rows) * math.exp(rng.gauss(-SPREAD * SPREAD / 2, SPREAD))


def _rows(entry: tuple[str, float]) -> int:
    return int(entry[0])
