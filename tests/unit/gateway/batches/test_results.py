"""Accounting of lines: with any order of ends and any kills, each line is in the files once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.batches import BatchRecord, FilePart
from services.core.errors import IntegrityError
from services.gateway.batches.lines import (
    LineResult,
    OpenFile,
    ResultWindow,
    advanced,
    early_bytes,
    early_results,
)

RECORD = BatchRecord("batch_1", "acme", "k", "/v1/completions", "file-1", "file-2", "file-3", "24h", 1.0, 2.0)


@dataclass
class Disk:
    """Parts by digest, and the record that names them."""

    record: BatchRecord
    blobs: dict[str, bytes] = field(default_factory=dict)
    # Lines whose result the record names.
    stored: set[int] = field(default_factory=set)

    def put(self, data: bytes) -> FilePart:
        digest = f"sha256:{len(self.blobs)}"
        self.blobs[digest] = data
        return FilePart(digest, len(data))

    def lines_of(self, parts: tuple[FilePart, ...]) -> list[int]:
        return [int(line) for line in b"".join(self.blobs[part.digest] for part in parts).split()]


class Killed(Exception):
    pass


def own(disk: Disk, rng: Random, kills: float) -> None:
    """Run the lines that are left as one owner does, until the end or a kill between any two steps."""

    def step() -> None:
        if rng.random() < kills:
            raise Killed

    record = disk.record
    window = ResultWindow(record.next_line)
    files = {
        False: OpenFile(record.output, part_bytes=16),
        True: OpenFile(record.errors, part_bytes=16),
    }
    for file in files.values():
        if file.tail_part is not None:
            file.tail = disk.blobs[file.tail_part.digest]
    early = b"".join(disk.blobs[part.digest] for part in record.early)
    window.restore(early_results(early) if early else {})
    left = [index for index in range(record.next_line, record.lines) if not window.has(index)]
    while left or window.ready:
        for _ in range(rng.randrange(4)):
            if left:  # a few lines ahead end in any order
                index = left.pop(rng.randrange(min(5, len(left))))
                step()
                assert index not in disk.stored, "its result is stored: it runs twice"
                window.add(index, LineResult(index + 1, b"%d\n" % index, failed=index % 7 == 3), 0.0)
        if window.has_unstored and rng.random() < 0.3:
            results = window.held()
            parts = tuple(map(disk.put, OpenFile(part_bytes=16).plan(early_bytes(results))[1]))
            step()
            disk.record = record = replace(record, early=parts)
            window.stored(results)
            disk.stored.update(results)
        taken = window.take(rng.randrange(1, 30))
        written = dict(files)
        for failed, file in files.items():
            data = b"".join(result.data for result in taken if result.failed is failed)
            if data:
                kept, contents = file.plan(data)
                step()
                written[failed] = file.after((*kept, *map(disk.put, contents)), contents[-1])
        step()
        record = advanced(record, taken, written[False].parts, written[True].parts)
        disk.record = record = record if window.has_stored else replace(record, early=())
        disk.stored.update(range(record.next_line))
        files = written
        step()


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([0.0, 0.02, 0.1]))
def test_every_line_is_in_one_file_once(seed: int, lines: int, kills: float) -> None:
    rng = Random(seed)
    disk = Disk(replace(RECORD, lines=lines))
    while disk.record.next_line < lines:
        try:
            own(disk, rng, kills)
        except Killed:
            continue
    record = disk.record
    assert disk.lines_of(record.output) == [index for index in range(lines) if index % 7 != 3]
    assert disk.lines_of(record.errors) == [index for index in range(lines) if index % 7 == 3]
    assert (record.completed, record.failed) == (
        len(disk.lines_of(record.output)),
        len(disk.lines_of(record.errors)),
    )
    assert record.next_offset == lines
    assert all(part.size_bytes == 16 for part in record.output[:-1])


def test_a_line_cannot_have_two_results() -> None:
    window, result = ResultWindow(3), LineResult(1, b"", failed=False)
    window.add(4, result, 0.0)
    with pytest.raises(AssertionError, match="two results"):
        window.add(4, result, 0.0)
    with pytest.raises(AssertionError, match="already"):
        window.add(2, result, 0.0)


def test_results_that_are_stored_apart_are_dropped_with_the_last_of_them() -> None:
    window, result = ResultWindow(0), LineResult(1, b"xy", failed=True)
    for index, now_s in ((2, 1.0), (3, 2.0)):
        window.add(index, result, now_s)
    assert window.waits_s(9.0) == 8.0
    window.stored({2: result})
    assert (window.waits_s(9.0), window.has_stored) == (7.0, True)
    other = ResultWindow(3)
    assert other.restore(early_results(early_bytes(window.held()))) == 2, "line 2 is in a file"
    assert (other.has(2), other.ready, other.waits_s(9.0), other.has_stored) == (True, True, 0.0, True)
    assert other.take(1) == [result]
    assert not other.has_stored
    with pytest.raises(IntegrityError):
        early_results(b"\x81\x01\x90")


def test_a_gap_holds_back_what_follows() -> None:
    window = ResultWindow(0)
    for index in (1, 2):
        window.add(index, LineResult(index, b"x", failed=False), 0.0)
    assert window.take(100) == []
    window.add(0, LineResult(0, b"x", failed=False), 0.0)
    assert [result.end for result in window.take(2)] == [0, 1]
    assert [result.end for result in window.take(2)] == [2]
