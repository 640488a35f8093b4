"""The lines of a batch: of its input, of its answers, and of the files that these become. Pure.

A line that is no request of this batch makes the whole batch fail, with the numbers of such lines. What a
line's ``body`` contains is checked when it runs, as any request's is.

Lines end in any order. Results leave the window as a prefix without a gap, so that one number states which
lines are in the files. Results behind a gap are stored separately. A gateway that takes the batch over
continues with both.
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from services.core.batches import (
    MAX_LINES,
    MAX_MODEL_CHARS,
    MAX_MODELS,
    MAX_PARTS,
    MAX_PROBLEMS,
    OUTPUT_PART_BYTES,
    BatchProblem,
    BatchRecord,
    BatchStatus,
    FilePart,
)
from services.core.errors import IntegrityError

_encode: Final = msgspec.json.Encoder().encode
_SHOWN: Final = 200
_BLANK: Final = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What the HTTP API answers to a line's body: status and JSON."""

    status: int
    body: bytes
    request_id: str
    waited_s: float = 0.0  # the part of its run in the scheduler's queue and in waits for the engine
    work: float = 0.0  # tokens of its prompt and output, or its rows

    @property
    def failed(self) -> bool:
        return self.status != 200


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Why the lines that are left do not run, and the batch's status at its end."""

    status: BatchStatus
    code: str
    message: str


class LineResponse(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class LineError(Struct, frozen=True):
    code: str
    message: str


class OutputLine(Struct, frozen=True):
    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


def output_line(name: str, custom_id: str, outcome: LineAnswer | EarlyEnd) -> bytes:
    """Return the line, with its end. ``name`` is unique in the batch."""
    if isinstance(outcome, EarlyEnd):
        line = OutputLine(name, custom_id, None, LineError(outcome.code, outcome.message))
    else:
        response = LineResponse(outcome.status, outcome.request_id, Raw(outcome.body))
        line = OutputLine(name, custom_id, response, None)
    return _encode(line) + b"\n"


class LineBody(Struct, frozen=True):
    """One line of the input. Unknown fields are ignored, as OpenAI does."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: Raw


class NamedModel(Struct, frozen=True):
    """The part of a line's body that names a model."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]


_decode: Final = msgspec.json.Decoder(LineBody).decode
_decode_model: Final = msgspec.json.Decoder(NamedModel).decode


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
    models: Counter[str] = field(default_factory=Counter)  # lines by the model that they name
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
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # it is refused when it runs
            model = _decode_model(found.body).model
            if model in self.models or len(self.models) < MAX_MODELS:
                self.models[model] += 1

    def report(self, code: str, message: str, number: int = 0) -> None:
        if not self.is_full:
            self.problems.append(BatchProblem(code, message, number))

    def finish(self) -> None:
        if not self.lines and not self.problems:
            self.report("empty_file", "the input has no requests")


@dataclass(frozen=True, slots=True)
class LineResult:
    """The line of a file that answers a line. ``end``: where the input line ends, in bytes."""

    end: int
    data: bytes
    failed: bool
    work: float = 0.0


_encode_results: Final = msgspec.msgpack.Encoder().encode
_decode_results: Final = msgspec.msgpack.Decoder(dict[int, LineResult]).decode


@dataclass(slots=True)
class ResultWindow:
    """Results of the lines from ``first`` on."""

    first: int
    _held: dict[int, LineResult] = field(default_factory=dict)
    # Time of each result that is stored nowhere, in monotonic seconds, the oldest first.
    _came_s: dict[int, float] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self.first in self._held

    @property
    def has_unstored(self) -> bool:
        return bool(self._came_s)

    @property
    def has_stored(self) -> bool:
        """Whether a result that is held is stored separately."""
        return len(self._held) > len(self._came_s)

    def has(self, index: int) -> bool:
        """Whether a line has its result."""
        return index < self.first or index in self._held

    def waits_s(self, now_s: float) -> float:
        """Return how long the oldest result waits that is stored nowhere."""
        return now_s - next(iter(self._came_s.values()), now_s)

    def add(self, index: int, result: LineResult, now_s: float) -> None:
        assert index >= self.first, f"line {index} has its result already"
        assert index not in self._held, f"line {index} has two results"
        self._held[index] = result
        self._came_s[index] = now_s

    def held(self) -> dict[int, LineResult]:
        return dict(self._held)

    def stored(self, lines: Iterable[int]) -> None:
        """Record that the results of these lines are stored separately."""
        for index in lines:
            self._came_s.pop(index, None)

    def restore(self, results: Mapping[int, LineResult]) -> int:
        """Hold results that are stored separately, except those in the files; return their bytes."""
        self._held |= {index: result for index, result in results.items() if index >= self.first}
        return sum(len(result.data) for result in self._held.values())

    def take(self, most_bytes: int) -> list[LineResult]:
        """Return the results without a gap, at least one if it is there, and move past them."""
        taken: list[LineResult] = []
        size = 0
        while self.ready and (not taken or size < most_bytes):
            taken.append(self._held.pop(self.first))
            self._came_s.pop(self.first, None)
            size += len(taken[-1].data)
            self.first += 1
        return taken


@dataclass(slots=True)
class OpenFile:
    """A file that is being written: its parts, and the content of the last one while that is not full."""

    parts: tuple[FilePart, ...] = ()
    tail: bytes = b""
    part_bytes: int = OUTPUT_PART_BYTES

    @property
    def is_full(self) -> bool:
        """Whether no more results are added, except those that are under way."""
        return len(self.parts) >= MAX_PARTS

    @property
    def tail_part(self) -> FilePart | None:
        """The last part if it still grows."""
        return self.parts[-1] if self.parts and self.parts[-1].size_bytes < self.part_bytes else None

    def plan(self, data: bytes) -> tuple[tuple[FilePart, ...], list[bytes]]:
        """Return the parts that stay, and the contents of those that follow them when ``data`` is added."""
        kept = self.parts[:-1] if self.tail_part is not None else self.parts
        whole = self.tail + data
        starts = range(0, len(whole), self.part_bytes)
        return kept, [whole[start : start + self.part_bytes] for start in starts]

    def after(self, parts: tuple[FilePart, ...], last: bytes) -> OpenFile:
        """Return the file with these parts. ``last``: the content of the last one."""
        return replace(self, parts=parts, tail=last if len(last) < self.part_bytes else b"")


def early_bytes(results: Mapping[int, LineResult]) -> bytes:
    """Return results by line in the form in which they are stored separately."""
    return _encode_results(results)


def early_results(data: bytes) -> dict[int, LineResult]:
    """Return what ``early_bytes`` encoded. Raises IntegrityError."""
    try:
        return _decode_results(data)
    except msgspec.DecodeError as error:
        raise IntegrityError("the results that were stored apart cannot be read") from error


def advanced(
    record: BatchRecord,
    taken: Sequence[LineResult],
    output: tuple[FilePart, ...],
    errors: tuple[FilePart, ...],
) -> BatchRecord:
    """Return the record after these results, which its files have."""
    failed = sum(result.failed for result in taken)
    return replace(
        record,
        next_line=record.next_line + len(taken),
        next_offset=taken[-1].end if taken else record.next_offset,
        completed=record.completed + len(taken) - failed,
        failed=record.failed + failed,
        work=record.work + sum(result.work for result in taken),
        output=output,
        errors=errors,
    )
