"""Plots as SVG text: lines, steps, areas and bars, drawn from values alone.

Colours are CSS variables of the page (``--s0`` to ``--s9``, ``--ink``, ``--grid``), so that a plot follows
its page's light or dark look. Every text that comes from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from simulator.lab.report.scale import Axis, Scale, number, scale_of

WIDTH: Final = 560
HEIGHT: Final = 250
LEFT: Final = 62
RIGHT: Final = 14
TOP: Final = 14
BOTTOM: Final = 40
COLOURS: Final = 10
NAMED_BARS: Final = 12


@dataclass(frozen=True, slots=True)
class Line:
    """A series of (x, y), ascending in x; it breaks where y is None. ``colour`` counts from 0."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A time that is marked behind the lines, such as a fault's."""

    name: str
    from_x: float
    to_x: float


def line_plot(
    lines: Sequence[Line], x: Axis, y: Axis, *, label: str, spans: Sequence[Span] = (), filled: bool = False
) -> str:
    """Return an SVG of ``lines`` over common axes; ``label`` is the text for screen readers.

    ``filled``: each line is the upper edge of an area, the first line at the back.
    """
    shown = [line for line in lines if any(value is not None for _, value in line.points)]
    if not shown:
        return _nothing(label)
    xs = [at for line in shown for at, _ in line.points]
    ys = [value for line in shown for _, value in line.points if value is not None]
    across = scale_of(x, xs, LEFT, WIDTH - RIGHT)
    up = scale_of(y, ys, HEIGHT - BOTTOM, TOP)
    parts = [_marked(span, across) for span in spans]
    parts += _frame(across, up)
    parts += [_area(line, across, up) if filled else _line(line, across, up) for line in shown]
    return _svg(parts, label)


def bar_plot(bars: Sequence[tuple[str, float]], y: Axis, *, label: str, mark: float | None = None) -> str:
    """Return an SVG of one bar per (name, value), named where there is room; a dashed line at ``mark``."""
    if not bars:
        return _nothing(label)
    values = [0.0, *(value for _, value in bars), *((mark,) if mark is not None else ())]
    up = scale_of(y, values, HEIGHT - BOTTOM, TOP)
    width = (WIDTH - LEFT - RIGHT) / len(bars)
    gap = min(4.0, width * 0.2)
    parts = _frame(None, up)
    for index, (name, value) in enumerate(bars):
        left, top = LEFT + index * width + gap / 2, up.px(value)
        size = f'width="{max(width - gap, 0.8):.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
        said = f"<title>{escape(name)}: {number(value)}</title>"
        parts.append(f'<rect class="bar" x="{left:.1f}" y="{top}" {size}>{said}</rect>')
        if len(bars) <= NAMED_BARS:
            parts.append(_text("tick", left + (width - gap) / 2, HEIGHT - 24, name))
    if mark is not None:
        parts.append(f'<path class="mark" d="M{LEFT} {up.px(mark)}H{WIDTH - RIGHT}"/>')
    return _svg(parts, label)


def _frame(across: Scale | None, up: Scale) -> list[str]:
    """Return the grid, the ticks and the titles of the axes."""
    parts = []
    for tick in up.ticks:
        at = up.px(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(_text("tick", LEFT - 7, at + 3.5, number(tick), anchor="end"))
    parts.append(_text("title", 14, (TOP + HEIGHT - BOTTOM) / 2, up.axis.title, turned=True))
    if across is not None:
        for tick in across.ticks:
            at = across.px(tick)
            parts.append(f'<path class="grid" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>')
            parts.append(_text("tick", at, HEIGHT - 24, number(tick)))
        parts.append(_text("title", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, across.axis.title))
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    return parts


def _text(kind: str, x: float, y: float, text: str, *, anchor: str = "middle", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _line(line: Line, across: Scale, up: Scale) -> str:
    kind = f"line c{line.colour % COLOURS}{' dashed' if line.dashed else ''}"
    return f'<path class="{kind}" d="{_path(line, across, up)}">{_named(line)}</path>'


def _area(line: Line, across: Scale, up: Scale) -> str:
    points = [(across.px(at), up.px(value)) for at, value in line.points if value is not None]
    base = HEIGHT - BOTTOM
    edge = "L".join(f"{x} {y}" for x, y in points)
    closed = f"M{points[0][0]} {base}L{edge}L{points[-1][0]} {base}Z"
    return f'<path class="area c{line.colour % COLOURS}" d="{closed}">{_named(line)}</path>'


def _path(line: Line, across: Scale, up: Scale) -> str:
    parts, broken = [], True
    for at, value in line.points:
        if value is None:
            broken = True
            continue
        parts.append(f"{'M' if broken else 'L'}{across.px(at)} {up.px(value)}")
        broken = False
    return "".join(parts)


def _named(line: Line) -> str:
    return f"<title>{escape(line.name)}</title>"


def _marked(span: Span, across: Scale) -> str:
    left, right = across.px(span.from_x), across.px(span.to_x)
    box = f'x="{left}" y="{TOP}" width="{max(right - left, 1.5):.1f}" height="{HEIGHT - TOP - BOTTOM}"'
    return f'<rect class="span" {box}><title>{escape(span.name)}</title></rect>'


def _nothing(label: str) -> str:
    return _svg([_text("title", WIDTH / 2, HEIGHT / 2, "nothing to show")], label)


def _svg(parts: Sequence[str], label: str) -> str:
    opening = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    return f"{opening}{''.join(parts)}</svg>"
