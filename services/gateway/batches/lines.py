"""The lines of a batch's input: split within bounds, and checked before anything runs. Pure.

A line that is no request of this batch makes the whole batch fail, with the numbers of such lines. What a
line's ``body`` contains is checked when it runs, as any request's is.
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from services.gateway.batches.records import MAX_LINES, MAX_PROBLEMS, BatchProblem

_SHOWN: Final = 200
_BLANK: Final = b" \t\r\n"


class LineBody(Struct, frozen=True):
    """One line of the input. Unknown fields are ignored, as OpenAI does."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: Raw


_decode: Final = msgspec.json.Decoder(LineBody).decode


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line that is not blank. ``number`` is its number in the file, from 1; ``end`` is the offset after
    it."""

    number: int
    end: int
    data: bytes


class LineTooLong(Exception):
    """A line has more bytes than a request may have. ``number`` is the line's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class TooManyLines(Exception):
    """The input has more lines than a batch may have, blank ones included. ``number`` is the first such
    line's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class LineSplitter:
    """Splits pieces of a file into lines. Holds at most one unfinished line of ``max_bytes``."""

    max_bytes: int
    offset: int = 0
    number: int = 0
    max_lines: int = MAX_LINES
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, piece: bytes) -> Iterator[InputLine]:
        """Yield the lines that end in a piece. Raises LineTooLong, TooManyLines."""
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            yield from self._line(piece[start : end + 1])
            start = end + 1
        self._hold(piece[start:])

    def finish(self) -> Iterator[InputLine]:
        """Yield the last line, if it has no end."""
        yield from self._line(b"")

    def _line(self, data: bytes) -> Iterator[InputLine]:
        self._hold(data)
        whole = bytes(self._rest)
        self._rest.clear()
        if not whole:
            return
        self.number += 1
        if self.number > self.max_lines:
            raise TooManyLines(self.number)
        self.offset += len(whole)
        if self.offset == len(whole):  # the first line of the file
            whole = whole.removeprefix(BOM_UTF8)
        if stripped := whole.strip(_BLANK):
            yield InputLine(self.number, self.offset, stripped)

    def _hold(self, data: bytes) -> None:
        if len(self._rest) + len(data) > self.max_bytes:
            raise LineTooLong(self.number + 1)
        self._rest += data


def parse_line(data: bytes) -> LineBody:
    """Return a line. Raises ValueError, with a text for its author."""
    try:
        return _decode(data)
    except UnicodeDecodeError:
        raise ValueError("the line is not UTF-8") from None
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ValueError(str(error)[:_SHOWN]) from None


@dataclass(slots=True)
class InputCheck:
    """Checks every line of an input. ``problems`` has the first of them, ``lines`` how many there are."""

    endpoint: str
    lines: int = 0
    problems: list[BatchProblem] = field(default_factory=list)
    # Hashes of the ids: their length is the client's choice.
    _ids: set[bytes] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Whether nothing more would be reported."""
        return len(self.problems) >= MAX_PROBLEMS

    def add(self, line: InputLine) -> None:
        self.lines += 1
        try:
            found = parse_line(line.data)
        except ValueError as error:
            self.report("invalid_json_line", str(error), line.number)
            return
        if found.method != "POST":
            self.report("invalid_method", "method must be POST", line.number)
        if found.url != self.endpoint:
            self.report("mismatched_url", f"url must be {self.endpoint}, the batch's endpoint", line.number)
        name = hashlib.blake2b(found.custom_id.encode(), digest_size=16).digest()
        if name in self._ids:
            self.report("duplicate_custom_id", "custom_id is used twice", line.number)
        self._ids.add(name)

    def report(self, code: str, message: str, number: int = 0) -> None:
        if not self.is_full:
            self.problems.append(BatchProblem(code, message, number))

    def finish(self) -> None:
        if not self.lines and not self.problems:
            self.report("empty_file", "the input has no requests")
