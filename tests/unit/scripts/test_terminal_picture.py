"""The picture of a recording: what appears, where, and when."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from scripts.record_recovery import LINES, Recording, picture
from scripts.terminal_picture import COLUMNS, Line, Piece, placed


def test_text_keeps_its_place_and_style() -> None:
    pieces = [Piece(0.1, "a <b", "text"), Piece(0.5, "c\n  d", "text"), Piece(1.5, "e", "late")]
    assert placed(pieces, first_row=3, rows=LINES) == [
        Line(0.1, 0, 3, "a <b", "text"),
        Line(0.5, 4, 3, "c", "text"),
        Line(0.5, 0, 4, "  d", "text"),
        Line(1.5, 3, 4, "e", "late"),
    ]


def test_long_text_wraps_and_ends_with_the_picture() -> None:
    lines = placed([Piece(0.1, "x" * COLUMNS * (LINES + 5), "text")], first_row=0, rows=LINES)
    assert [line.row for line in lines] == list(range(LINES))
    assert all(len(line.text) == COLUMNS for line in lines)


def test_each_text_appears_at_its_time_and_what_follows_the_kill_is_marked() -> None:
    recording = Recording(
        [(0.6, "a < b"), (1.5, "c")],
        killed="worker-1",
        killed_s=1.0,
        tokens_before=2,
        finished_s=2.0,
        tokens=3,
    )
    root = ET.fromstring(picture(recording))
    style = "".join(root.find("{*}style").itertext())  # type: ignore[union-attr]
    texts = {
        "".join(element.itertext()): (element.get("id", ""), element.get("class"))
        for element in root.findall("{*}text")
    }
    # The recording takes 2 s and its last picture stays for 4 s.
    for text, percent, marked in (("a < b", "10.00", "text"), ("c", "25.00", "late")):
        name, found = texts[text]
        assert f"@keyframes k{name[1:]}{{0%{{opacity:0}}{percent}%,100%{{opacity:1}}}}" in style
        assert found == marked
