"""Amounts over time in a bounded number of bins: when the time outgrows them, neighbours are merged."""

from __future__ import annotations

from typing import Final

MAX_BINS: Final = 600


class Bins:
    """Sums per bin of ``width_s``, which doubles whenever an instant lies beyond the last possible bin."""

    __slots__ = ("sums", "width_s")

    def __init__(self, width_s: float = 1.0) -> None:
        self.width_s = width_s
        self.sums: list[float] = []

    def add(self, at_s: float, amount: float = 1.0) -> None:
        """Count ``amount`` at an instant of 0 or later."""
        while at_s >= self.width_s * MAX_BINS:
            self._double()
        index = int(at_s / self.width_s)
        if index >= len(self.sums):
            self.sums.extend([0.0] * (index + 1 - len(self.sums)))
        self.sums[index] += amount

    def cover(self, from_s: float, to_s: float) -> None:
        """Count every second from ``from_s`` to ``to_s`` in the bin that it lies in."""
        self.add(to_s, 0.0)  # makes room first, so that the width stays below
        at_s = from_s
        while at_s < to_s:
            edge_s = min((int(at_s / self.width_s) + 1) * self.width_s, to_s)
            if edge_s <= at_s:  # a step below the resolution of a float
                return
            self.add(at_s, edge_s - at_s)
            at_s = edge_s

    def widened(self, width_s: float) -> list[float]:
        """Return the sums per bin of ``width_s``, a width of ours doubled any number of times."""
        factor = round(width_s / self.width_s)
        return [sum(self.sums[index : index + factor]) for index in range(0, len(self.sums), factor)]

    def _double(self) -> None:
        self.width_s *= 2
        self.sums = [sum(self.sums[index : index + 2]) for index in range(0, len(self.sums), 2)]
