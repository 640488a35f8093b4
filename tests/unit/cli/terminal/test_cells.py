"""Spans and moments as people type and read them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.cli.terminal.cells import parse_moment, parse_span, show_bytes, show_span

NOW = datetime(2027, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("0.5", 0.5),
        ("30s", 30),
        ("1h30m", 5400),
        ("7d", 604800),
        ("250ms", 0.25),
        (" 2w ", 1209600),
    ],
)
def test_span_is_read(text: str, seconds: float) -> None:
    assert parse_span(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1y", "-5s", "5 s x", "1e3", "nan", "5m3", "99999w"])
def test_other_text_is_no_span(text: str) -> None:
    with pytest.raises(ValueError, match=r"time|hundred"):
        parse_span(text)


@pytest.mark.parametrize(
    ("text", "past", "found"),
    [
        ("24h", False, datetime(2027, 2, 1, 12, tzinfo=UTC)),
        ("24h", True, datetime(2027, 1, 30, 12, tzinfo=UTC)),
        ("2027-03-01", False, datetime(2027, 3, 1, tzinfo=UTC)),
        ("2027-03-01T10:00:00Z", True, datetime(2027, 3, 1, 10, tzinfo=UTC)),
        ("2027-03-01T10:00:00+02:00", True, datetime(2027, 3, 1, 8, tzinfo=UTC)),
        ("90w", True, datetime(2025, 5, 11, 12, tzinfo=UTC)),
    ],
)
def test_moment_is_read(text: str, past: bool, found: datetime) -> None:
    assert parse_moment(text, now=NOW, past=past) == found


@pytest.mark.parametrize("text", ["soon", "31.1.2027", "", "2027-13-01"])
def test_other_text_is_no_moment(text: str) -> None:
    with pytest.raises(ValueError, match="neither a span"):
        parse_moment(text, now=NOW, past=True)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-3, "0.0s"), (0.25, "0.2s"), (12, "12s"), (60, "1m"), (310, "5m10s"), (3605, "1h"), (97200, "1d3h")],
)
def test_span_is_shown(seconds: float, shown: str) -> None:
    assert show_span(seconds) == shown


@given(st.floats(min_value=10, max_value=1e9))
def test_what_is_shown_is_read_back_within_its_second_unit(seconds: float) -> None:
    shown = parse_span(show_span(seconds))
    assert shown <= seconds
    assert seconds - shown <= seconds / 10 + 1


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB"), (2**50, "1024.0 TiB")],
)
def test_bytes_are_shown(count: int, shown: str) -> None:
    assert show_bytes(count) == shown
