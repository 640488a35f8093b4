"""Recorded traces, read line by line: the Azure LLM CSV and the Mooncake JSONL formats, by path.

A reader holds one line at a time, whatever the size of the file. Every line is checked, and one that is
not in the format raises TraceError with the file, the line and what is wrong with it. Instants are
seconds from the first row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Final, TextIO

AZURE_HEADER: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK_TOKENS: Final = 512
MAX_LINE_CHARS: Final = 1 << 20
MAX_TOKENS: Final = 1 << 24
_INSTANT: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|\+00:00)?")
_NUMBER: Final = re.compile(r"\d{1,9}")


class TraceError(Exception):
    """A trace that cannot be read. ``line`` counts from 1; 0 where the whole file is meant."""

    def __init__(self, path: Path, line: int, what: str) -> None:
        super().__init__(path, line, what)  # all arguments, so that it can be sent between processes
        self.path = path
        self.line = line
        self.what = what

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.what}" if self.line else f"{self.path}: {self.what}"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. ``blocks`` name its prompt's blocks of ``block_tokens``: equal names, equal tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class TraceCut:
    """Which part of a trace is taken and how it is scaled.

    Rows from ``from_s`` on, for ``for_s``, at most ``rows``. ``speed`` is how many times as fast it is
    replayed. ``length_ratio`` scales prompts and outputs; rows longer than ``most_prompt_tokens`` are left
    out.
    """

    from_s: float = 0.0
    for_s: float | None = None
    rows: int | None = None
    speed: float = 1.0
    length_ratio: float = 1.0
    most_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.from_s < 0 or self.speed <= 0 or self.length_ratio <= 0:
            raise ValueError("from_s must not be negative; speed and length_ratio must be above 0")
        if any(
            limit is not None and limit <= 0 for limit in (self.for_s, self.rows, self.most_prompt_tokens)
        ):
            raise ValueError("for_s, rows and most_prompt_tokens must be above 0")


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a trace; its first line decides the format. Raises TraceError."""
    with _lines(path) as lines:
        first = next(lines, (1, ""))[1].lstrip("\ufeff")
    if first.startswith("{"):
        return read_mooncake(path)
    if first.split(",")[0].strip() == AZURE_HEADER[0]:
        return read_azure(path)
    what = f"neither a JSON object nor the header {','.join(AZURE_HEADER)}, but {_quoted(first)}"
    raise TraceError(path, 1, what)


def read_azure(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a CSV of TIMESTAMP,ContextTokens,GeneratedTokens. Raises TraceError."""
    with _lines(path) as lines:
        _, header = next(lines, (1, ""))
        names = tuple(name.strip() for name in header.lstrip("\ufeff").split(","))
        if names != AZURE_HEADER:
            raise TraceError(
                path, 1, f"the header is {_quoted(header)}, and must be {','.join(AZURE_HEADER)}"
            )
        order = _Order(path)
        for number, line in lines:
            if line:
                yield _azure_row(line, _Place(path, number), order)
        order.must_have_rows()


def read_mooncake(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a JSONL of timestamp (ms), input_length, output_length and hash_ids.

    Raises TraceError.
    """
    with _lines(path) as lines:
        order = _Order(path)
        for number, line in lines:
            if line:
                yield _mooncake_row(line, _Place(path, number), order)
        order.must_have_rows()


def cut(rows: Iterator[TraceRow], part: TraceCut) -> Iterator[TraceRow]:
    """Yield the rows of ``part``, scaled; instants count from ``part.from_s``, at its speed."""
    taken = 0
    for row in rows:
        at_s = row.arrival_s - part.from_s
        if at_s < 0:
            continue
        if (part.for_s is not None and at_s >= part.for_s) or (part.rows is not None and taken >= part.rows):
            return
        prompt_tokens = max(1, round(row.prompt_tokens * part.length_ratio))
        if part.most_prompt_tokens is not None and prompt_tokens > part.most_prompt_tokens:
            continue
        taken += 1
        yield TraceRow(
            at_s / part.speed,
            prompt_tokens,
            max(1, round(row.output_tokens * part.length_ratio)),
            row.blocks,
            max(1, round(row.block_tokens * part.length_ratio)),
        )


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    line: int

    def error(self, what: str) -> TraceError:
        return TraceError(self.path, self.line, what)


class _Order:
    """Makes instants relative to the first row, and refuses one that goes back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first_s: float | None = None
        self._last_s = 0.0

    def relative(self, at_s: float, place: _Place) -> float:
        if self._first_s is None:
            self._first_s = self._last_s = at_s
        if at_s < self._last_s:
            raise place.error(f"its instant lies {self._last_s - at_s:.6g} s before that of the row above")
        self._last_s = at_s
        return at_s - self._first_s

    def must_have_rows(self) -> None:
        if self._first_s is None:
            raise TraceError(self._path, 0, "there is no row in it")


def _azure_row(line: str, place: _Place, order: _Order) -> TraceRow:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(AZURE_HEADER):
        raise place.error(f"{len(cells)} columns, and must be {len(AZURE_HEADER)}: {_quoted(line)}")
    at_s = order.relative(_instant_s(cells[0], place), place)
    return TraceRow(
        at_s, _cell_tokens(cells[1], AZURE_HEADER[1], place), _cell_tokens(cells[2], AZURE_HEADER[2], place)
    )


def _mooncake_row(line: str, place: _Place, order: _Order) -> TraceRow:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise place.error(f"no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise place.error(f"a JSON {type(fields).__name__}, and must be an object")
    instant = fields.get("timestamp")
    if isinstance(instant, bool) or not isinstance(instant, int | float) or not 0 <= instant < 1e15:
        raise place.error(f"timestamp is {_quoted(instant)}, and must be milliseconds, 0 or more")
    prompt_tokens = _field_tokens(fields, "input_length", place)
    blocks = fields.get("hash_ids", [])
    if not isinstance(blocks, list) or any(
        isinstance(each, bool) or not isinstance(each, int) for each in blocks
    ):
        raise place.error("hash_ids must be a list of whole numbers")
    most = -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(blocks) > most:
        what = f"{len(blocks)} hash_ids, and {prompt_tokens} tokens have at most {most} blocks"
        raise place.error(f"{what} of {MOONCAKE_BLOCK_TOKENS}")
    at_s = order.relative(instant / 1000, place)
    return TraceRow(at_s, prompt_tokens, _field_tokens(fields, "output_length", place), tuple(blocks))


def _instant_s(text: str, place: _Place) -> float:
    found = _INSTANT.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        whole = datetime.fromisoformat(f"{found[1]}T{found[2]}").replace(tzinfo=UTC)
    except ValueError:
        raise place.error(f"TIMESTAMP is {_quoted(text)}, and must be YYYY-MM-DD HH:MM:SS.fffffff") from None
    return whole.timestamp() + float(f"0.{found[3] or 0}")


def _cell_tokens(text: str, name: str, place: _Place) -> int:
    if not _NUMBER.fullmatch(text):
        raise place.error(f"{name} is {_quoted(text)}, and must be a whole number")
    return _tokens(int(text), name, place)


def _field_tokens(fields: dict[str, Any], name: str, place: _Place) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise place.error(f"{name} is {_quoted(value)}, and must be a whole number")
    return _tokens(value, name, place)


def _tokens(value: int, name: str, place: _Place) -> int:
    if not 1 <= value <= MAX_TOKENS:
        raise place.error(f"{name} is {value}, and must be 1 to {MAX_TOKENS}")
    return value


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[tuple[int, str]]]:
    """Open the file; the value yields its lines with their numbers, without line ends."""
    try:
        file = path.open(encoding="utf-8", newline="\n")
    except OSError as error:
        raise TraceError(path, 0, f"cannot be opened: {error.strerror}") from None
    with file:
        yield _numbered(file, path)


def _numbered(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    for number in count(1):
        try:
            line = file.readline(MAX_LINE_CHARS + 1)
        except UnicodeDecodeError as error:
            what = f"no UTF-8 text in it or soon after it: {error.reason}"
            raise TraceError(path, number, what) from None
        if not line:
            return
        if len(line) > MAX_LINE_CHARS:
            raise TraceError(path, number, f"longer than {MAX_LINE_CHARS} characters")
        yield number, line.strip()


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
