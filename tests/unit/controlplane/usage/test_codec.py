"""A checkpoint and the objects of hours hold the whole state."""

from __future__ import annotations

from msgspec.structs import replace

from services.controlplane.usage.codec import (
    book_from_bytes,
    checkpoint_to_bytes,
    hour_from_bytes,
    hour_to_bytes,
    segment_from_bytes,
    segment_to_bytes,
)
from services.controlplane.usage.policy.book import Charge, LedgerBook, Segment, SourceEvents
from services.controlplane.usage.policy.lines import Source
from services.core.generation import Usage
from services.core.usage import DeviceInterval, Residence, implausible
from tests.support.usage_ledgers import HOUR, UNIX_S, request_usage, sequence_use

REQUEST = replace(request_usage("r1"), user="ann", labels={"b": "2", "a": "1"})
INTERVAL = DeviceInterval("w1", "cpu", 3.6, UNIX_S - 60, UNIX_S, busy_s=20.0, attributed_s=15.0)
SEGMENT = Segment(
    1,
    "writer",
    UNIX_S,
    (
        SourceEvents("gateway", 1, (REQUEST,)),
        SourceEvents("worker", 4, (sequence_use("r1"), sequence_use("r2"), sequence_use("r3"), INTERVAL)),
    ),
    (Charge("r3", Usage(100, 20, 40), 7),),
)


def test_segments_come_back() -> None:
    read = segment_from_bytes(segment_to_bytes(SEGMENT), 1)
    assert (read.value, read.damage) == (SEGMENT, "")


def test_a_state_comes_back_from_its_checkpoint() -> None:
    book = LedgerBook()
    book.apply(SEGMENT)
    sealed = book.seal()
    read = book_from_bytes(checkpoint_to_bytes(sealed, {HOUR: 1}), 1).value
    assert (read.number, read.booked_s, read.sources) == (1, UNIX_S, book.sources)
    assert read.hours == {HOUR: 1}
    assert read.requests.settled == book.requests.settled
    assert read.requests.waiting == book.requests.waiting
    assert [one.request_id for one in read.requests.unmatched(UNIX_S + 60, 30)] == ["r2"]
    (lines,) = sealed.sums.hours.values()
    assert hour_from_bytes(hour_to_bytes(lines)).value == lines


def test_idle_and_unattributed_time_have_lines_of_their_own() -> None:
    book = LedgerBook()
    added = book.apply(Segment(1, "w", UNIX_S, (SourceEvents("worker", 1, (INTERVAL,)),)))
    assert {line.source: amounts.device_us for line, amounts in added.items()} == {
        Source.IDLE: 40_000_000,
        Source.UNATTRIBUTED: 5_000_000,
    }
    assert all(not line.tenant for line in added)


def test_sealing_leaves_later_segments_out() -> None:
    book = LedgerBook()
    book.apply(SEGMENT)
    sealed = book.seal()
    book.apply(Segment(2, "writer", UNIX_S, (SourceEvents("gateway", 2, (request_usage("r9"),)),)))
    assert sealed.number == 1
    assert sealed.last_of("gateway") == 1
    assert "r9" not in sealed.requests.settled
    assert sum(amounts.requests for amounts in book.sums.hours[HOUR].values()) == 1


def test_idle_time_is_booked_to_what_is_loaded_by_its_memory_and_owner() -> None:
    residents = (Residence("a", "legal", 0.5), Residence("b", "", 0.25))
    event = DeviceInterval("w1", "cpu", 3.6, UNIX_S - 60, UNIX_S, 20.0, 20.0, residents)
    segment = Segment(1, "w", UNIX_S, (SourceEvents("worker", 1, (event,)),))
    assert segment_from_bytes(segment_to_bytes(segment), 1).value == segment
    added = LedgerBook().apply(segment)
    found = {
        (line.model, line.labels): amounts.device_us
        for line, amounts in added.items()
        if line.source is Source.IDLE
    }
    assert found == {
        ("a", (("owner", "legal"),)): 20_000_000,
        ("b", ()): 10_000_000,
        ("", ()): 10_000_000,
    }
    assert implausible(event) is None
    assert implausible(replace(event, residents=(*residents, Residence("c", "", 0.5)))) == (
        "residents",
        "have 1.25 of the device's memory",
    )
