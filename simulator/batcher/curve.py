"""Throughput and latency of closed loops of more and more clients, by kind of batching, as a picture.

Batches cost what was measured for the MLP (``costs.json``); time is virtual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.worker.batcher.policy.start import BatchLimits
from services.worker.batcher.policy.window import DerivedWindow, FixedWindow, Window
from simulator.batcher.costs import BatchCosts
from simulator.batcher.world import BatcherSpec, BatcherWorld, ClosedLoop

CLIENTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STATIC_S: Final = 0.1  # how long a static batch waits for its last row
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _RIGHT, _TOP = 560, 300, 52, 40, 12, 14
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#5b6875")
_TICKS_MS: Final = (1, 3, 10, 30, 100)


@dataclass(frozen=True, slots=True)
class Point:
    clients: int
    per_s: float
    p99_ms: float


def kinds() -> Mapping[str, tuple[Window, BatchLimits]]:
    """Return what is compared: the window, and the most rows of a batch."""
    whole = BatchLimits()
    return {
        "derived window": (DerivedWindow(), whole),
        "fixed window of 8 ms": (FixedWindow(8e-3), whole),
        "static batches of 32": (FixedWindow(STATIC_S), BatchLimits(rows=32)),
        "no batches": (FixedWindow(0.0), BatchLimits(rows=1)),
    }


def curves(rows: int, clients: Sequence[int] = CLIENTS) -> dict[str, list[Point]]:
    """Return a point per number of clients, by kind."""
    costs = BatchCosts.measured("mlp")
    found: dict[str, list[Point]] = {}
    for name, (window, limits) in kinds().items():
        found[name] = []
        for count in clients:
            outcome = BatcherWorld(
                BatcherSpec(ClosedLoop(count), costs, window, rows=rows, limits=limits)
            ).run()
            found[name].append(Point(count, outcome.per_s, outcome.p99_s * 1e3))
    return found


def picture(found: Mapping[str, Sequence[Point]]) -> str:
    """Return an SVG: rows per second from left to right, p99 on a logarithmic scale."""
    most = max(point.per_s for points in found.values() for point in points) * 1.05
    low, high = math.log(_TICKS_MS[0] / 2), math.log(_TICKS_MS[-1] * 1.6)

    def x(per_s: float) -> float:
        return _LEFT + per_s / most * (_WIDTH - _LEFT - _RIGHT)

    def y(ms: float) -> float:
        return _TOP + (high - math.log(ms)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg" '
        'aria-label="p99 latency by rows per second, by kind of batching">',
        "<style>svg{background:#fff}text{font:11px sans-serif;fill:#5b6875}path{fill:none}</style>",
    ]
    for tick in _TICKS_MS:
        parts.append(f'<path stroke="#e3e8ed" d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick} ms</text>')
    step = 10 ** math.floor(math.log10(most))
    for number in range(int(most // step) + 1):
        at = f'x="{x(number * step):.1f}" y="{_HEIGHT - _BOTTOM + 16}"'
        parts.append(f'<text {at} text-anchor="middle">{number * step:,.0f}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">rows/s</text>')
    for index, (name, points) in enumerate(found.items()):
        colour = _COLOURS[index]
        line = "L".join(f"{x(point.per_s):.1f} {y(point.p99_ms):.1f}" for point in points)
        parts.append(f'<path stroke="{colour}" stroke-width="1.6" d="M{line}"/>')
        for point in points:
            parts.append(
                f'<circle cx="{x(point.per_s):.1f}" cy="{y(point.p99_ms):.1f}" r="2.2" fill="{colour}"/>'
            )
        key_y = _TOP + 12 + 15 * index
        parts.append(f'<path stroke="{colour}" stroke-width="3" d="M{_WIDTH - 160} {key_y - 4}h16"/>')
        parts.append(f'<text x="{_WIDTH - 138}" y="{key_y}">{name}</text>')
    return "".join([*parts, "</svg>\n"])
