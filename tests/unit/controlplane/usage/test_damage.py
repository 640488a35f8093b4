"""Flipped bits, cuts and impossible amounts in stored objects: each is named, and the rest is read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from fairway.v1 import slis_pb2
from fairway.v1 import usage_pb2 as pb
from services.adapters.frames import opened, read_frames, sealed
from services.controlplane.objectives.policy.book import SliBook
from services.controlplane.objectives.store import (
    book_from_bytes as slis_from_bytes,
)
from services.controlplane.objectives.store import book_to_message, snapshot_to_bytes
from services.controlplane.usage.codec import (
    book_from_bytes,
    checkpoint_to_bytes,
    hour_from_bytes,
    hour_to_bytes,
    segment_from_bytes,
    segment_to_bytes,
)
from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.policy.book import (
    Charge,
    LedgerBook,
    Segment,
    SourceEvents,
    UsageReport,
)
from services.core.arms import ArmKey, SliKey, SliReport, SliSums
from services.core.errors import IntegrityError
from services.core.generation import Usage
from services.core.records import Priority
from services.core.usage import DeviceInterval, UsageEvent
from tests.support.clocks import QuickClock
from tests.support.election import StaticElection
from tests.support.memory_ledger import MemoryLedger
from tests.support.usage_ledgers import (
    HOUR,
    UNIX_S,
    CountedLoss,
    booked,
    ledger_of,
    request_usage,
    sequence_use,
    until_leading,
)
from tests.support.waiting import until

FLIPS, CUTS = 300, 60
INTERVAL = DeviceInterval("w1", "cpu", 3.6, UNIX_S - 60, UNIX_S, busy_s=20.0, attributed_s=15.0)
SEGMENT = Segment(
    1,
    "writer",
    UNIX_S,
    (
        SourceEvents("gateway", 150, tuple(request_usage(f"r{number}") for number in range(150))),
        SourceEvents("worker", 3, (sequence_use("r1"), sequence_use("x"), INTERVAL)),
    ),
    (Charge("x", Usage(100, 20, 40), 7),),
)


SEGMENT_READ = segment_from_bytes(segment_to_bytes(SEGMENT), 1).value


def checkpoint() -> bytes:
    book = LedgerBook()
    book.apply(SEGMENT)
    return checkpoint_to_bytes(book.seal(), {HOUR: 1})


def hour() -> bytes:
    book = LedgerBook()
    book.apply(SEGMENT)
    return hour_to_bytes(book.sums.hours[HOUR])


def slis() -> bytes:
    book = SliBook()
    series = {
        SliKey(ArmKey("chat", "sha256:1"), f"t{number}", Priority.STANDARD): SliSums(requests=number)
        for number in range(50)
    }
    book.apply("src", 1, 1, [SliReport(UNIX_S, series, {})], {}, now_s=UNIX_S)
    return snapshot_to_bytes(book_to_message(book, 1))


def damaged(data: bytes, rng: random.Random) -> list[bytes]:
    """Return copies with one flipped bit, and cut ones."""
    copies = []
    for _ in range(FLIPS):
        copy = bytearray(data)
        copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
        copies.append(bytes(copy))
    return copies + [data[: rng.randrange(len(data))] for _ in range(CUTS)]


KINDS: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any], Callable[[Any], set[Any]]]] = {
    "segment": (
        lambda: segment_to_bytes(SEGMENT),
        lambda data: segment_from_bytes(data, 1),
        lambda segment: {repr(event) for batch in segment.batches for event in batch.events},
    ),
    "checkpoint": (
        checkpoint,
        lambda data: book_from_bytes(data, 1),
        lambda book: {*map(repr, book.requests.settled.items()), *map(repr, book.sources.items())},
    ),
    "hour": (hour, hour_from_bytes, lambda lines: set(map(repr, lines.items()))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_and_nothing_is_read_as_other_content(kind: str) -> None:
    write, read, parts_of = KINDS[kind]
    data, rng = write(), random.Random(kind)
    whole = parts_of(read(data).value)
    assert read(data).damage == ""
    kept = []
    for number, copy in enumerate(damaged(data, rng)):
        found = read(copy)
        assert found.damage, f"copy {number}"
        parts = parts_of(found.value)
        assert parts <= whole, f"copy {number}"
        if number < FLIPS:
            kept.append(len(parts) / len(whole))
    assert min(kept) > 0.4  # a flipped bit costs a block: 16 events, or 4 KiB


def test_a_cut_between_two_blocks_is_named() -> None:
    data = segment_to_bytes(SEGMENT)
    last = read_frames(data, 8).starts[-1]
    found = segment_from_bytes(data[:last], 1)
    assert "1 of 14 blocks are missing" in found.damage, found.damage
    assert found.value == SEGMENT_READ, "what describes it is there twice"
    assert found.lost == 0


def test_a_damaged_snapshot_of_indicators_is_refused() -> None:
    data = slis()
    assert slis_from_bytes(data).intervals
    for copy in damaged(data, random.Random(1)):
        with pytest.raises(IntegrityError):
            slis_from_bytes(copy)


@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_earlier_versions_are_read(kind: str) -> None:
    write, read, parts_of = KINDS[kind]
    data = write()
    found = read(b"".join(opened(data).blocks))
    assert found.damage == ""
    assert parts_of(found.value) == parts_of(read(data).value)
    message = slis_pb2.SliSnapshot(number=3, shapes_number=2)
    assert slis_from_bytes(message.SerializeToString()).shapes_number == 2


def test_a_malformed_object_of_an_earlier_version_is_empty_and_named() -> None:
    for _, read, parts_of in KINDS.values():
        found = read(b"\xff\xff\xff")
        assert "malformed" in found.damage
        assert not parts_of(found.value)


def test_a_segment_under_another_number_is_not_booked() -> None:
    found = segment_from_bytes(segment_to_bytes(SEGMENT), 2)
    assert "it is segment 1" in found.damage
    assert (found.value.number, found.value.batches) == (2, ())


# --- a ledger over a damaged store ---------------------------------------------------------------


class CountedSleeps(QuickClock):
    def __init__(self, unix_s: float) -> None:
        super().__init__(unix_s)
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await super().sleep(seconds)


class Leader:
    """A ledger on a store, which leads until it is closed. ``loss``: its metric of lost events."""

    def __init__(self, store: MemoryLedger, clock: QuickClock) -> None:
        self.loss = CountedLoss()
        self.ledger: UsageLedger = ledger_of(store, clock, StaticElection(1), telemetry=self.loss)
        self._task = asyncio.ensure_future(self.ledger.run())

    async def __aenter__(self) -> UsageLedger:
        await until_leading(self.ledger)
        return self.ledger

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def written(store: MemoryLedger, clock: QuickClock, segments: int, *, checkpoint_at: int = 0) -> None:
    async with Leader(store, clock) as ledger:
        for number in range(1, segments + 1):
            await ledger.report(UsageReport("src", number, (request_usage(f"r{number}"),)))
            if number == checkpoint_at:
                await ledger.checkpoint()


@pytest.mark.parametrize("seed", range(12))
async def test_a_ledger_leads_over_a_damaged_store_and_counts_what_is_missing(seed: int) -> None:
    rng = random.Random(seed)
    store, clock = MemoryLedger(), QuickClock(UNIX_S)
    await written(store, clock, 8, checkpoint_at=rng.choice((0, 3)))
    name = rng.choice([name for name in sorted(store.objects) if name.startswith("segments/")][-5:])
    data = bytearray(store.objects[name])
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    store.objects[name] = bytes(data)
    async with Leader(store, clock) as ledger:
        assert ledger.damaged == 1
        assert "set apart" in ledger.problem()
        assert len(await booked(ledger)) in (7, 8)
        assert store.objects[f"damaged/1-{name.rpartition('/')[2]}"] == bytes(data)
        sent = await ledger.report(UsageReport("src", 9, (request_usage("r9"),), lost_until=8))
        assert sent == 9
        await ledger.checkpoint()
    async with Leader(store, clock) as ledger:  # from the checkpoint; the copy is still there to be looked at
        assert len(await booked(ledger)) in (8, 9)
        assert ledger.damaged == 1


async def in_segments(
    store: MemoryLedger, clock: QuickClock, sources: dict[str, int], segments: int
) -> dict[str, int]:
    """Write segments with so many events of each source; return the last number of each."""
    last = dict.fromkeys(sources, 0)
    async with Leader(store, clock) as ledger:
        for _ in range(segments):
            reports = [
                UsageReport(
                    name,
                    last[name] + 1,
                    tuple(request_usage(f"{name}-{last[name] + each + 1}") for each in range(count)),
                )
                for name, count in sources.items()
            ]
            for report in reports:
                last[report.source] += len(report.events)
            assert await asyncio.gather(*map(ledger.report, reports)) == list(last.values())
    return last


@pytest.mark.parametrize("seed", range(40))
async def test_what_a_damaged_segment_lost_is_counted_exactly_and_once(seed: int) -> None:
    rng = random.Random(seed)
    store, clock = MemoryLedger(), QuickClock(UNIX_S)
    sources = {f"src-{number}": rng.choice((1, 3, 16, 17, 40)) for number in range(rng.randint(1, 4))}
    last = await in_segments(store, clock, sources, 3)
    segments = sorted(name for name in store.objects if name.startswith("segments/"))
    for name in rng.sample(segments, rng.randint(1, len(segments))):
        data = bytearray(store.objects[name])
        starts = read_frames(bytes(data), 8).starts
        if seed % 4 == 3:  # as a disk that stored a part
            del data[rng.choice(starts[2:]) :]
        else:
            data[rng.randrange(starts[0], len(data))] ^= 1 << rng.randrange(8)
        store.objects[name] = bytes(data)
    leader = Leader(store, clock)
    async with leader as ledger:
        lost = sum(last.values()) - len(await booked(ledger))
        assert leader.loss.events == lost
        # No source is asked for what was lost, which would count it again.
        for name, number in last.items():
            assert (
                await ledger.report(UsageReport(name, number + 1, (request_usage(f"{name}+"),))) == number + 1
            )
        assert leader.loss.events == lost
    for _ in range(2):
        later = Leader(store, clock)
        async with later:
            assert later.loss.events == 0


@pytest.mark.parametrize("cut", ["one of several", "the last", "all"])
async def test_what_a_segment_without_its_number_of_events_lost_is_counted_at_least(cut: str) -> None:
    """One of an earlier version; a gap shows in it, or in the next one that has an event of the source."""
    store, clock = MemoryLedger(), QuickClock(UNIX_S)
    await in_segments(store, clock, {"src": 40, "other": 5}, 3)
    for name in [name for name in store.objects if name.startswith("segments/")]:
        blocks = []
        for block in opened(store.objects[name]).blocks:
            message = pb.UsageSegment.FromString(block)
            message.ClearField("events")
            message.ClearField("lasts")
            if block not in blocks:
                blocks.append(message.SerializeToString(deterministic=True))
        store.objects[name] = sealed(blocks)
    name = "segments/0000000000000002"
    blocks = list(opened(store.objects[name]).blocks)
    of_source = [block for block in blocks if b"src" in block]
    assert len(of_source) == 3
    gone = {"one of several": of_source[1:2], "the last": of_source[2:], "all": of_source}[cut]
    data = store.objects[name]
    for block in gone:
        data = data.replace(block, b"\1" * len(block))
    store.objects[name] = data
    leader = Leader(store, clock)
    with capture_logs() as logs:
        async with leader as ledger:
            lost = {"one of several": 16, "the last": 8, "all": 40}[cut]
            assert 135 - len(await booked(ledger)) == lost
            assert leader.loss.events == lost
    (entry,) = [each for each in logs if each["event"] == "usage.events_lost"]
    assert (entry["events"], entry["at_least"]) == (lost, True)
    again = Leader(store, clock)
    async with again:
        assert again.loss.events == 0


async def test_copies_that_an_operator_deleted_are_named_no_more_after_a_checkpoint() -> None:
    store, clock = MemoryLedger(), QuickClock(UNIX_S)
    await written(store, clock, 3)
    store.objects["segments/0000000000000002"] = store.objects["segments/0000000000000002"][:-9]
    async with Leader(store, clock) as ledger:
        assert ledger.damaged == 1
        del store.objects["damaged/1-0000000000000002"]
        await ledger.checkpoint()
        assert (ledger.damaged, ledger.problem()) == (0, "")


async def test_what_a_source_set_apart_is_not_counted_as_lost() -> None:
    store, clock = MemoryLedger(), QuickClock(UNIX_S)
    leader = Leader(store, clock)
    async with leader as ledger:
        events = (request_usage("r"),)
        assert await ledger.report(UsageReport("s", 1, events)) == 1
        assert await ledger.report(UsageReport("s", 4, events, lost_until=3, apart=2)) == 4
        assert leader.loss.events == 0
        assert await ledger.report(UsageReport("s", 9, events, lost_until=8, apart=1)) == 9
        assert leader.loss.events == 3


@pytest.mark.parametrize("seed", range(12))
async def test_a_damaged_checkpoint_costs_nothing_while_the_one_before_is_there(seed: int) -> None:
    rng = random.Random(seed)
    store, clock = MemoryLedger(), QuickClock(UNIX_S)
    async with Leader(store, clock) as ledger:
        for number in range(1, 9):
            await ledger.report(UsageReport("src", number, (request_usage(f"r{number}"),)))
            if number in (3, 6 + rng.choice((0, 2))):
                await ledger.checkpoint()
    newest = max(name for name in store.objects if name.startswith("checkpoints/"))
    data = bytearray(store.objects[newest])
    place = data.find(b"src") if seed % 2 else rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    store.objects[newest] = bytes(data)
    async with Leader(store, clock) as ledger:
        assert len(await booked(ledger)) == 8
        assert ledger.damaged == 1
        assert await ledger.report(UsageReport("src", 9, (request_usage("r9"),))) == 9
        await ledger.checkpoint()
    async with Leader(store, clock) as ledger:
        assert len(await booked(ledger)) == 9


async def test_the_only_checkpoint_is_read_as_far_as_it_can_be() -> None:
    store, clock = MemoryLedger(), QuickClock(UNIX_S)
    await written(store, clock, 4, checkpoint_at=4)
    for name in [name for name in store.objects if name.startswith("segments/")]:
        del store.objects[name]
    (name,) = [name for name in store.objects if name.startswith("checkpoints/")]
    store.objects[name] = store.objects[name][:-3]
    async with Leader(store, clock) as ledger:
        assert await ledger.report(UsageReport("src", 5, (request_usage("r5"),), lost_until=4)) == 5
        assert ledger.damaged == 1


def poisoned(store: MemoryLedger, *events: UsageEvent) -> None:
    """Append a segment as an earlier version would have, without checksums and bounds."""
    number = len([name for name in store.objects if name.startswith("segments/")]) + 1
    message = pb.UsageSegment(number=number, booked_unix_ms=round(UNIX_S * 1000))
    segment = Segment(number, "old", UNIX_S, (SourceEvents("bad", len(events), events),))
    for block in opened(segment_to_bytes(segment)).blocks:
        message.MergeFromString(block)
    store.objects[f"segments/{number:016d}"] = message.SerializeToString(deterministic=True)


@pytest.mark.parametrize("amount", [2**63 - 1, 2**64 - 1, 2**62, 10**15])
async def test_impossible_events_in_the_log_are_set_apart_by_name(amount: int) -> None:
    store, clock = MemoryLedger(), QuickClock(UNIX_S)
    await written(store, clock, 3)
    bad = replace(request_usage("bad"), usage=Usage(amount, amount, 0), list_micros=amount)
    poisoned(
        store,
        bad,
        replace(request_usage("dear"), list_micros=amount),
        request_usage("good"),
        replace(sequence_use("bad-2"), usage=Usage(amount, 1, 0)),
        replace(INTERVAL, began_unix_s=0.0),
    )
    async with Leader(store, clock) as ledger:
        assert sorted(await booked(ledger)) == ["good", "r1", "r2", "r3"]
        assert ledger.damaged == 1
        await ledger.checkpoint()
        assert await ledger.report(UsageReport("src", 4, (request_usage("r4"),))) == 4
    copies = [name for name in store.objects if name.startswith("damaged/")]
    assert copies == ["damaged/1-0000000000000004"]
    found = segment_from_bytes(store.objects[copies[0]], 4)
    for field in ("request.tokens.prompt", "list_micros", "sequence.tokens.prompt", "began_unix_ms"):
        assert field in found.damage
    assert "source bad" in found.damage


async def test_sums_beyond_what_is_stored_end_no_checkpoint() -> None:
    store, clock = MemoryLedger(), QuickClock(UNIX_S)
    async with Leader(store, clock) as ledger:
        huge = replace(sequence_use("h"), device_s=1e6, cost_per_hour=1e6)
        for number in range(1, 40):
            events = tuple(replace(huge, request_id=f"h{number}-{each}") for each in range(2))
            await ledger.report(UsageReport("worker", 2 * number - 1, events))
            await ledger.charge([Charge(one.request_id, Usage(1, 1, 0), 1) for one in events])
        await ledger.checkpoint()
        assert ledger.leads
    async with Leader(store, clock) as ledger:
        assert ledger.damaged == 0


async def test_a_log_with_a_gap_is_reported_and_not_loaded_in_a_hot_loop() -> None:
    store, clock = MemoryLedger(), CountedSleeps(UNIX_S)
    await written(store, clock, 4)
    del store.objects["segments/0000000000000002"]
    clock.slept.clear()
    ledger = ledger_of(store, clock, StaticElection(1))
    task = asyncio.ensure_future(ledger.run())
    try:
        await until(lambda: clock.slept.count(5.0) >= 3)
        assert "segment 2 of the usage ledger is missing" in ledger.problem()
        assert not ledger.leads
        assert [slept_s for slept_s in clock.slept if slept_s != 0.2][:6] == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
