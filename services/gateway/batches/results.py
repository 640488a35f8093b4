"""Which lines of a batch have their result, and how results become parts of its files. Pure.

Lines end in any order. Results leave the window as a prefix without a gap, so that one number states which
lines are in the files. Results behind a gap are stored separately. A gateway that takes the batch over
continues with both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from services.core.errors import IntegrityError
from services.gateway.batches.records import MAX_PARTS, OUTPUT_PART_BYTES, BatchRecord, FilePart


@dataclass(frozen=True, slots=True)
class LineResult:
    """The line of a file that answers a line. ``end``: where the input line ends, in bytes."""

    end: int
    data: bytes
    failed: bool


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[int, LineResult]).decode


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
    return _encode(results)


def early_results(data: bytes) -> dict[int, LineResult]:
    """Return what ``early_bytes`` encoded. Raises IntegrityError."""
    try:
        return _decode(data)
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
        output=output,
        errors=errors,
    )
