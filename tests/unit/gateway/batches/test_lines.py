"""Lines of a batch's input: the same whatever the pieces, bounded, and checked with a reason per line."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.batches.lines import (
    InputCheck,
    InputLine,
    LineSplitter,
    LineTooLong,
    TooManyLines,
    parse_line,
)

URL = "/v1/completions"


def line_of(**changes: Any) -> bytes:
    found = {"custom_id": "a", "method": "POST", "url": URL, "body": {"model": "m"}, **changes}
    return json.dumps(found).encode()


def split(data: bytes, cuts: list[int], max_bytes: int = 1000, offset: int = 0) -> list[InputLine]:
    splitter = LineSplitter(max_bytes, offset)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    found = [each for begin, end in pairwise(edges) for each in splitter.feed(data[begin:end])]
    return [*found, *splitter.finish()]


def checked(*found: bytes, endpoint: str = URL) -> InputCheck:
    check = InputCheck(endpoint)
    for number, data in enumerate(found, start=1):
        check.add(InputLine(number, 0, data))
    check.finish()
    return check


@given(st.lists(st.binary(max_size=12), max_size=8), st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_lines_do_not_depend_on_the_pieces(parts: list[bytes], cuts: list[int], ended: bool) -> None:
    data = b"\n".join(parts) + (b"\n" if ended else b"")
    found = split(data, cuts)
    expected = [part.strip(b" \t\r\n") for part in data.split(b"\n")]
    assert [line.data for line in found] == [part for part in expected if part]
    for line in found:  # a reader that starts there finds the rest
        rest = split(data[line.end :], cuts, offset=line.end)
        assert rest == [
            InputLine(each.number - line.number, each.end, each.data) for each in found if each.end > line.end
        ]


def test_a_byte_order_mark_is_left_out_at_the_start_alone() -> None:
    bom = b"\xef\xbb\xbf"
    found = split(bom + b"{}\r\n" + bom + b"{}\r\n", [1, 4])
    assert [(line.data, line.end) for line in found] == [(b"{}", 7), (bom + b"{}", 14)]
    assert split(bom, []) == []
    assert split(bom + b"{}", [], offset=7) == [InputLine(1, 12, bom + b"{}")]


@pytest.mark.parametrize("size", [9, 10, 11])
def test_a_line_has_a_bound(size: int) -> None:
    data = b"x\n" + b"a" * (size - 1) + b"\n"
    if size <= 10:
        assert len(split(data, [], max_bytes=10)) == 2
        return
    for cuts in ([], [5], [8]):
        with pytest.raises(LineTooLong) as caught:
            split(data, cuts, max_bytes=10)
        assert caught.value.number == 2


def test_a_line_is_refused_before_it_is_held() -> None:
    splitter = LineSplitter(10)
    with pytest.raises(LineTooLong):
        list(splitter.feed(b"a" * 1_000_000))
    assert len(splitter._rest) <= 10


def test_good_lines_have_no_problems() -> None:
    check = checked(*(line_of(custom_id=str(number), other=1) for number in range(5)))
    assert (check.lines, check.problems) == (5, [])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b'{"custom_id": "\xff"}', "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (
            b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + b"[" * 100_000,
            "invalid_json_line",
        ),
        (line_of(custom_id=""), "invalid_json_line"),
        (line_of(custom_id="x" * 513), "invalid_json_line"),
        (line_of(custom_id=7), "invalid_json_line"),
        (b'{"custom_id":"\\ud800","method":"POST","url":"/v1/completions","body":{}}', "invalid_json_line"),
        (line_of(method="GET"), "invalid_method"),
        (line_of(url="/v1/chat/completions"), "mismatched_url"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/completions"}', "invalid_json_line"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_line_is_named(data: bytes, code: str) -> None:
    check = checked(line_of(custom_id="first"), data)
    assert [(problem.code, problem.line) for problem in check.problems] == [(code, 2)]


def test_an_id_that_is_used_twice_is_named() -> None:
    check = checked(line_of(custom_id="a"), line_of(custom_id="b"), line_of(custom_id="a"))
    assert [(problem.code, problem.line) for problem in check.problems] == [("duplicate_custom_id", 3)]


def test_an_empty_input_fails() -> None:
    assert [problem.code for problem in checked().problems] == ["empty_file"]


@pytest.mark.parametrize("data", [b"a\nb\nc", b"a\n\nc\n", b"\n\n\n"])
def test_lines_up_to_the_bound_are_split(data: bytes) -> None:
    splitter = LineSplitter(10, max_lines=3)
    assert len([*splitter.feed(data), *splitter.finish()]) == len(data.split())


@pytest.mark.parametrize("data", [b"a\nb\nc\nd", b"a\n\n \n\n\n", b"\n" * 100])
def test_lines_have_a_bound_and_blank_ones_count(data: bytes) -> None:
    splitter = LineSplitter(10, max_lines=3)
    with pytest.raises(TooManyLines) as caught:
        assert [*splitter.feed(data), *splitter.finish()]
    assert caught.value.number == 4


def test_problems_are_bounded() -> None:
    check = checked(*[b"{"] * 500)
    assert len(check.problems) == 100
    assert check.is_full


def test_a_body_is_kept_as_it_is() -> None:
    body = b'{"model":  "m", "x": 1e5}'
    found = parse_line(b'{"custom_id":"a","method":"POST","url":"/u","body":' + body + b"}")
    assert bytes(found.body) == body
