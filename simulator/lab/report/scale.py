"""Axes of plots: from values to pixels, with ticks at round values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """``log`` needs values above 0. ``least`` and ``most`` bound what is shown; None: the values do."""

    title: str
    log: bool = False
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``least`` to ``from_px`` and ``most`` to ``to_px``; what lies outside goes to the nearer end."""

    axis: Axis
    least: float
    most: float
    from_px: float
    to_px: float
    ticks: tuple[float, ...]

    def px(self, value: float) -> float:
        least, most = self.least, self.most
        if self.axis.log:
            value, least, most = (math.log10(max(each, 1e-12)) for each in (value, least, most))
        ratio = (min(max(value, least), most) - least) / (most - least)
        return round(self.from_px + ratio * (self.to_px - self.from_px), 1)


def scale_of(axis: Axis, values: Sequence[float], from_px: float, to_px: float) -> Scale:
    """Return the scale that shows ``values`` between two pixels; an upper end that is free is round."""
    least = axis.least if axis.least is not None else min(values)
    most = axis.most if axis.most is not None else max(values)
    if axis.log:
        least = max(least, 1e-9)
        most = max(most, least * 10)
        ticks = _log_ticks(least, most)
    else:
        most = most if most > least else least + 1.0
        ticks = _ticks(least, most)
    if axis.most is None and not axis.log and ticks[-1] < most:
        ticks = (*ticks, ticks[-1] + (ticks[1] - ticks[0] if len(ticks) > 1 else most))
        most = ticks[-1]
    return Scale(axis, least, most, from_px, to_px, ticks)


def _ticks(least: float, most: float) -> tuple[float, ...]:
    """Return four to eight round values from ``least`` to ``most``."""
    raw = (most - least) / 5
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(each * magnitude for each in (1, 2, 2.5, 5, 10) if each * magnitude >= raw * 0.999)
    first = math.ceil(least / step - 1e-9)
    last = math.floor(most / step + 1e-9)
    return tuple(index * step for index in range(first, last + 1)) or (least,)


def _log_ticks(least: float, most: float) -> tuple[float, ...]:
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    marks = (1, 2, 5) if last - first <= 4 else (1,)
    ticks = tuple(mark * 10.0**power for power in range(first, last + 1) for mark in marks)
    return tuple(tick for tick in ticks if least * 0.999 <= tick <= most * 1.001)


def number(value: float) -> str:
    """Return a value in at most four digits, large ones with k, M or G."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.3g}{unit}"
    if value == round(value) and abs(value) < 1e4:
        return str(round(value))
    return f"{value:.3g}"
