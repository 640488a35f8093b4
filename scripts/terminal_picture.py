"""Animated pictures of a terminal, as SVG: each text appears at its time, and the end stays a while."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

COLUMNS: Final = 84
LINE_PX: Final = 17
COLUMN_PX: Final = 8.4
STYLE: Final = (
    "text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#d8dee9}"
    ".dim{fill:#88c0d0}.red{fill:#ff6b6b}.green{fill:#a3be8c}.late{fill:#ebcb8b}"
)
HOLD_S: Final = 4.0  # the last picture stays, then the recording starts again


@dataclass(frozen=True)
class Piece:
    """Text as it was received, with its line breaks."""

    at_s: float  # time from the start of the recording
    text: str
    style: str  # class in the style sheet


@dataclass(frozen=True)
class Line:
    """Text at its place in the picture."""

    at_s: float  # time from the start of the recording
    column: int
    row: int
    text: str
    style: str  # class in the style sheet


def placed(pieces: Iterable[Piece], first_row: int, rows: int) -> list[Line]:
    """Lay out the pieces one behind the other; what does not fit into ``rows`` is left out."""
    lines: list[Line] = []
    row = column = 0
    for piece in pieces:
        for number, part in enumerate(piece.text.split("\n")):
            if number:
                row, column = row + 1, 0
            while part and row < rows:
                shown, part = part[: COLUMNS - column], part[COLUMNS - column :]
                if shown.strip():
                    lines.append(Line(piece.at_s, column, first_row + row, shown, piece.style))
                column += len(shown)
                if column == COLUMNS:
                    row, column = row + 1, 0
    return lines


def picture(lines: Sequence[Line], *, rows: int, end_s: float) -> str:
    """Return an SVG that plays the lines and repeats them."""
    total_s = end_s + HOLD_S
    styles = "".join(
        _animation(number, 100 * line.at_s / total_s, total_s) for number, line in enumerate(lines)
    )
    texts = [
        f'<text id="t{number}" class="{line.style}" x="{14 + line.column * COLUMN_PX:.1f}" '
        f'y="{26 + line.row * LINE_PX}" xml:space="preserve">{html.escape(line.text)}</text>'
        for number, line in enumerate(lines)
    ]
    width, height = 28 + COLUMNS * COLUMN_PX, 26 + rows * LINE_PX
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">',
            f"<style>{STYLE}{styles}</style>",
            '<rect width="100%" height="100%" rx="8" fill="#1e222a"/>',
            *texts,
            "</svg>",
            "",
        ]
    )


def _animation(number: int, percent: float, total_s: float) -> str:
    """Return the style that shows text ``number`` from ``percent`` of the recording on."""
    frames = f"0%{{opacity:0}}{percent:.2f}%,100%{{opacity:1}}" if percent else "0%,100%{opacity:1}"
    return (
        f"@keyframes k{number}{{{frames}}}#t{number}{{animation:k{number} {total_s:.2f}s step-end infinite}}"
    )
