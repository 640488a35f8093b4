"""Widths to which rows are padded, chosen from the lengths that occur. Pure.

Lengths are counted in bins whose edges grow by an eighth at most, so that the histogram is bounded. Of all
sets of ``k`` edges that end with the longest, dynamic programming finds the one with the fewest padded
tokens in ``O(k * bins ** 2)``: the padding of the rows between two edges does not depend on the other edges.

More widths pad less but share out the traffic: the choice is the fewest widths whose padding is at most
``MOST_PADDING_RATIO`` of all computed tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

MOST_WIDTHS: Final = 8
MOST_PADDING_RATIO: Final = 0.1
WINDOW: Final = 4096  # rows, after which all counts are halved


def bin_edges(longest: int) -> tuple[int, ...]:
    """Return ascending lengths up to ``longest``; at most an eighth between two, or one token."""
    edges = [1]
    while edges[-1] < longest:
        edges.append(min(longest, max(edges[-1] + 1, edges[-1] * 9 // 8)))
    return tuple(edges)


class LengthHistogram:
    """How often each length occurred lately. Bounded."""

    def __init__(self, longest: int) -> None:
        self.edges: Final = bin_edges(longest)
        self.rows = [0.0] * len(self.edges)
        self.tokens = [0.0] * len(self.edges)
        self._count = 0.0

    def note(self, length: int) -> None:
        """Count a row of a length within ``longest``."""
        index = bisect_left(self.edges, length)
        self.rows[index] += 1.0
        self.tokens[index] += length
        self._count += 1.0
        if self._count >= WINDOW:
            self.rows = [rows / 2.0 for rows in self.rows]
            self.tokens = [tokens / 2.0 for tokens in self.tokens]
            self._count /= 2.0


def padding_ratio(histogram: LengthHistogram, widths: Sequence[int]) -> float:
    """Return the share of padding among the tokens computed at these widths; 0 without rows."""
    computed = sum(
        rows * width_of(widths, edge) for rows, edge in zip(histogram.rows, histogram.edges, strict=True)
    )
    return 1.0 - sum(histogram.tokens) / computed if computed else 0.0


def width_of(widths: Sequence[int], length: int) -> int:
    """Return the least width that a row of this length fits into."""
    return widths[bisect_left(widths, length)]


def mixed_width(mean: float) -> int:
    """Return the width that stands for rows of different widths of this mean: the nearest power of two."""
    return int(2 ** round(math.log2(mean)))


def choose_widths(histogram: LengthHistogram, most: int = MOST_WIDTHS) -> tuple[int, ...]:
    """Return ascending widths; the last is the longest length, so that every row has one."""
    table = _Padding(histogram)
    widths: tuple[int, ...] = (histogram.edges[-1],)
    for count in range(1, min(most, len(histogram.edges)) + 1):
        widths = table.best(count)
        if padding_ratio(histogram, widths) <= MOST_PADDING_RATIO:
            break
    return widths


class _Padding:
    """The least padding of the bins up to each, by the number of widths; one row more per call."""

    def __init__(self, histogram: LengthHistogram) -> None:
        self._edges = histogram.edges
        self._rows = [0.0, *accumulate(histogram.rows)]
        self._tokens = [0.0, *accumulate(histogram.tokens)]
        bins = len(self._edges)
        self._least = [self._cost(0, last) for last in range(bins)]
        self._before: list[list[int]] = [[-1] * bins]  # the bin of the next smaller width, for each width

    def best(self, count: int) -> tuple[int, ...]:
        """Return the best ``count`` widths; called with 1, 2, and so on."""
        if count > len(self._before):
            self._extend()
        index, widths = len(self._edges) - 1, []
        for row in range(count - 1, -1, -1):
            widths.append(self._edges[index])
            index = self._before[row][index]
        return tuple(reversed(widths))

    def _extend(self) -> None:
        least, before = self._least, []
        found = []
        for last in range(len(self._edges)):
            options = [least[split] + self._cost(split + 1, last) for split in range(last)]
            chosen = min(range(last), key=options.__getitem__, default=0)
            found.append(min(options[chosen], least[last]) if options else least[last])
            before.append(chosen)
        self._least = found
        self._before.append(before)

    def _cost(self, first: int, last: int) -> float:
        """Return the padding of the bins ``first`` to ``last`` at the width of the last."""
        rows = self._rows[last + 1] - self._rows[first]
        return rows * self._edges[last] - (self._tokens[last + 1] - self._tokens[first])
