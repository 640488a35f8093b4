"""Trace readers take both formats, and say which line is wrong and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from simulator.lab.load import traces
from simulator.lab.load.traces import TraceCut, TraceError, TraceRow, cut, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = f"""{HEADER}
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-17 00:00:00,12,1
"""


def write(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def mooncake(**changes: Any) -> str:
    row = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3], **changes}
    return json.dumps({name: value for name, value in row.items() if value is not ...})


def test_azure_rows_are_read_relative_to_the_first(tmp_path: Path) -> None:
    rows = list(read_trace(write(tmp_path, AZURE)))
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109), (12, 1)]
    assert rows[0].arrival_s == 0.0
    assert rows[1].arrival_s == pytest.approx(4.314579, abs=1e-5)
    assert rows[2].arrival_s == pytest.approx(20653.31941, abs=1e-4)


@pytest.mark.parametrize(
    "change", [lambda text: text.replace("\n", "\r\n"), str.rstrip, lambda text: "\ufeff" + text]
)
def test_azure_line_ends_and_byte_order_mark_do_not_matter(tmp_path: Path, change: Any) -> None:
    assert len(list(read_trace(write(tmp_path, change(AZURE))))) == 3


def test_mooncake_rows_are_read_with_their_blocks(tmp_path: Path) -> None:
    text = f"{mooncake()}\n\n{mooncake(timestamp=1500, input_length=7, hash_ids=[9])}\n"
    rows = list(read_trace(write(tmp_path, text)))
    assert rows == [TraceRow(0.0, 1100, 5, (1, 2, 3), 512), TraceRow(1.5, 7, 5, (9,), 512)]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (f"{HEADER}\n2023-11-16 18:15:46,374\n", 2, "2 columns, and must be 3"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,2\nyesterday,1,2\n", 3, "TIMESTAMP is 'yesterday'"),
        (f"{HEADER}\n2023-13-16 18:15:46,1,2\n", 2, "TIMESTAMP is '2023-13-16 18:15:46'"),
        (f"{HEADER}\n2023-11-16 18:15:46,-4,2\n", 2, "ContextTokens is '-4', and must be a whole number"),
        (f"{HEADER}\n2023-11-16 18:15:46,0,2\n", 2, "ContextTokens is 0, and must be 1 to"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,2.5\n", 2, "GeneratedTokens is '2.5'"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,99999999\n", 2, "GeneratedTokens is 99999999, and must be 1 to"),
        (
            f"{HEADER}\n2023-11-16 18:15:46,1,2\n2023-11-16 18:15:44,1,2\n",
            3,
            "lies 2 s before that of the row above",
        ),
        ("TIMESTAMP,Context\n", 1, "the header is 'TIMESTAMP,Context'"),
        (f"{HEADER}\n", 0, "there is no row in it"),
        ("when,what\n1,2\n", 1, "neither a JSON object nor the header"),
        ("", 1, "neither a JSON object nor the header"),
        (f"{mooncake()}\n{{nonsense\n", 2, "no JSON"),
        (f"{mooncake()}\n[1]\n", 2, "a JSON list, and must be an object"),
        (f"{mooncake(timestamp='0')}\n", 1, "timestamp is '0', and must be milliseconds"),
        (f"{mooncake(timestamp=True)}\n", 1, "timestamp is True"),
        (f"{mooncake()}\n{mooncake(input_length=...)}\n", 2, "input_length is None"),
        (f"{mooncake(output_length=0)}\n", 1, "output_length is 0, and must be 1 to"),
        (f"{mooncake(hash_ids=[1, 'x', 3])}\n", 1, "hash_ids must be a list of whole numbers"),
        (
            f"{mooncake(hash_ids=[1, 2, 3, 4])}\n",
            1,
            "4 hash_ids, and 1100 tokens have at most 3 blocks of 512",
        ),
        (f"{mooncake(timestamp=9)}\n{mooncake(timestamp=8)}\n", 2, "lies 0.001 s before"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert (caught.value.path, caught.value.line) == (path, line)
    assert what in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_bytes_that_are_no_text_are_trace_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be opened: No such file"):
        read_trace(tmp_path / "absent")
    path = tmp_path / "binary"
    path.write_bytes(AZURE.encode() + b"\xff\xfe\n")
    with pytest.raises(TraceError, match="no UTF-8 text"):
        list(read_trace(path))


def test_a_line_without_end_is_refused_and_not_kept(tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEADER}\n" + "1" * (traces.MAX_LINE_CHARS + 1))
    with pytest.raises(TraceError, match=r"line 2: longer than \d+ characters"):
        list(read_trace(path))


def test_rows_come_before_the_file_is_read_to_its_end(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, AZURE + "nonsense\n"))
    assert len(list(islice(rows, 3))) == 3
    with pytest.raises(TraceError, match="line 5"):
        next(rows)


def many() -> Iterator[TraceRow]:
    return (TraceRow(float(at_s), 100 + at_s, 10, (1, at_s), 512) for at_s in range(100))


def test_a_cut_takes_its_part_and_scales_it() -> None:
    rows = list(cut(many(), TraceCut(from_s=10, for_s=20, speed=4.0, length_ratio=0.5)))
    assert [row.arrival_s for row in rows[:3]] == [0.0, 0.25, 0.5]
    assert (len(rows), rows[0].prompt_tokens, rows[0].output_tokens) == (20, 55, 5)
    assert (rows[0].blocks, rows[0].block_tokens) == ((1, 10), 256)


def test_a_cut_leaves_out_long_prompts_and_stops_at_its_count() -> None:
    assert len(list(cut(many(), TraceCut(rows=7)))) == 7
    assert max(row.prompt_tokens for row in cut(many(), TraceCut(most_prompt_tokens=120))) == 120


@pytest.mark.parametrize("wrong", [{"speed": 0.0}, {"from_s": -1.0}, {"rows": 0}, {"length_ratio": -2.0}])
def test_senseless_cuts_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        TraceCut(**wrong)
