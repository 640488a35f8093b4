"""The picture of a recording: what appears, where, and when."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from scripts.record_recovery import COLUMNS, LINES, Line, Recording, picture, placed


def recording(pieces: list[tuple[float, str]]) -> Recording:
    return Recording(
        pieces, killed="worker-1", killed_s=1.0, tokens_before=2, gap_s=0.5, finished_s=2.0, tokens=3
    )


def test_text_keeps_its_place_and_what_follows_the_kill_is_marked() -> None:
    lines = placed(recording([(0.1, "a <b"), (0.5, "c\n  d"), (1.5, "e")]), first_row=3)
    assert lines == [
        Line(0.1, 0, 3, "a <b", "text"),
        Line(0.5, 4, 3, "c", "text"),
        Line(0.5, 0, 4, "  d", "text"),
        Line(1.5, 3, 4, "e", "late"),
    ]


def test_long_text_wraps_and_ends_with_the_picture() -> None:
    lines = placed(recording([(0.1, "x" * COLUMNS * (LINES + 5))]), first_row=0)
    assert [line.row for line in lines] == list(range(LINES))
    assert all(len(line.text) == COLUMNS for line in lines)


def test_each_text_appears_at_its_time() -> None:
    root = ET.fromstring(picture(recording([(0.6, "a < b"), (1.5, "c")])))
    style = "".join(root.find("{*}style").itertext())  # type: ignore[union-attr]
    texts = {"".join(element.itertext()): element.get("id") for element in root.findall("{*}text")}
    # The recording takes 2 s and its last picture stays for 4 s.
    assert f"@keyframes k{texts['a < b'][1:]}{{0%{{opacity:0}}10.00%,100%{{opacity:1}}}}" in style  # type: ignore[index]
    assert f"@keyframes k{texts['c'][1:]}{{0%{{opacity:0}}25.00%,100%{{opacity:1}}}}" in style  # type: ignore[index]
