"""A series of a figure as an SVG picture: the value of each record, its range, and where it changes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import chain
from typing import Final

from bench.store.records import BenchRecord, values_of

WIDTH: Final = 900
HEIGHT: Final = 320
LEFT: Final = 80
RIGHT: Final = 20
TOP: Final = 40
BOTTOM: Final = 50
TICKS: Final = 4
DATES: Final = 6
STYLE: Final = (
    "text{font:12px sans-serif;fill:#333}.grid{stroke:#ddd}.range{stroke:#7aa6d8;stroke-width:2}"
    ".line{fill:none;stroke:#1f5fa8;stroke-width:1.5}.point{fill:#1f5fa8}"
    ".change{stroke:#c0392b;stroke-dasharray:5 4}"
)


def picture(figure: str, records: Sequence[BenchRecord], changes: Sequence[int]) -> str:
    """Return the picture. A bar is from the least to the largest value of a record, a dashed line a change.

    ``records`` have raw values of the figure and are sorted by time; there is at least one.
    """
    values = [record.figure(figure) or 0.0 for record in records]
    every = [[*chain.from_iterable(values_of(record, figure))] for record in records]
    ranges = [(min(values), max(values)) for values in every]
    least, most = min(low for low, _ in ranges), max(high for _, high in ranges)
    margin = 0.05 * (most - least) or abs(most) * 0.05 or 1.0
    least, most = least - margin, most + margin

    def x(index: float) -> float:
        return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / len(records)

    def y(value: float) -> float:
        return TOP + (most - value) * (HEIGHT - TOP - BOTTOM) / (most - least)

    about = f"{len(records)} records of {records[0].suite}, {len(changes)} changes"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' aria-labelledby="t d">',
        f'<title id="t">{escape(figure)}</title><desc id="d">{escape(about)}</desc><style>{STYLE}</style>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22">{escape(figure)}: {escape(about)}</text>',
    ]
    for step in range(TICKS + 1):
        value = least + step * (most - least) / TICKS
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for index in range(0, len(records), max(1, -(-len(records) // DATES))):
        date = f"{records[index].began:%Y-%m-%d}"
        parts.append(f'<text x="{x(index):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{date}</text>')
    for index in changes:
        at = f"{x(index - 0.5):.1f}"
        parts.append(f'<line class="change" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for index, (low, high) in enumerate(ranges):
        at = f"{x(index):.1f}"
        parts.append(f'<line class="range" x1="{at}" x2="{at}" y1="{y(low):.1f}" y2="{y(high):.1f}"/>')
    points = [f"{x(index):.1f},{y(value):.1f}" for index, value in enumerate(values)]
    parts.append(f'<polyline class="line" points="{" ".join(points)}"/>')
    for record, value, point in zip(records, values, points, strict=True):
        cx, cy = point.split(",")
        label = f"{record.id} {record.versions.get('fairway', '')}: {value:.6g}"
        circle = f'<circle class="point" cx="{cx}" cy="{cy}" r="3">'
        parts.append(f"{circle}<title>{escape(label)}</title></circle>")
    return "\n".join([*parts, "</svg>", ""])
