"""Reports of gateways reach the sums once, whatever happens to control planes between two snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from random import Random

import pytest
from msgspec.structs import replace

from services.controlplane.objectives.policy.book import SERIES_S, SliBook
from services.controlplane.objectives.policy.burn import EventCounts
from services.controlplane.objectives.store import SliStore, SnapshotTaken, book_from_bytes, book_to_message
from services.core.arms import ArmKey, ArmWindow, GateWindow, SliKey, SliReceipt, SliReport
from services.core.errors import InvalidInput, NoLeader, StoreUnavailable
from services.core.estimates.finished import FinishedRequest
from services.core.estimates.traffic_shapes import RequestShape, SamplingKind, TrafficShapes
from services.core.generation import StageClock, Usage
from services.core.records import BurnAlert, LatencyTarget, Meta, Objective, Priority, Sli
from services.gateway.slis import RequestEnd, RequestLatencies, SliRecorder, SliReporter, SliSubject
from services.rpc.convert.slis import report_from_proto, report_to_proto
from tests.support.clocks import QuickClock
from tests.support.election import StaticElection
from tests.support.memory_ledger import MemoryLedger
from tests.support.usage_ledgers import UNIX_S
from tests.support.waiting import until

ARM = ArmKey("chat", "sha256:1")
KEY = SliKey(ARM, "acme", Priority.STANDARD, "a")
WINDOW = GateWindow("chat", "r1/1")
OBJECTIVE = Objective(
    Meta("chat"), "chat", availability=0.99, completion=0.99, ttft=LatencyTarget(1.0), itl=LatencyTarget(0.1)
)


class Plane:
    """A control plane on the shared objects."""

    def __init__(self, objects: MemoryLedger, clock: QuickClock, *, epoch: int | None = None) -> None:
        self.election = StaticElection(epoch)
        self.store = SliStore(objects, clock, self.election, lambda: {("chat", Priority.STANDARD): OBJECTIVE})
        self.task = asyncio.ensure_future(self.store.run())

    async def lead(self, epoch: int) -> None:
        self.election.turn(epoch)
        await until(lambda: self.store.leads)

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class Link:
    """The way to the present leader. It loses answers, as a connection does that breaks."""

    def __init__(self, rng: Random, planes: Sequence[Plane], lost_ratio: float = 0.0) -> None:
        self.rng, self.planes, self.lost_ratio = rng, planes, lost_ratio

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        leader = next((plane for plane in self.planes if plane.store.leads), None)
        if leader is None:
            raise NoLeader("none leads")
        sent = [report_from_proto(report_to_proto(one)) for one in reports]
        receipt = leader.store.report(source, first, oldest, sent)
        if self.rng.random() < self.lost_ratio:
            raise NoLeader("the answer was lost")
        return receipt


def finish(recorder: SliRecorder, ttft_s: float = 0.2, reason: str = "FINISHED") -> None:
    latencies = RequestLatencies()
    latencies.ttft_s.append(ttft_s)
    latencies.gap(0.02, 9)
    subject = SliSubject(KEY, 7, "r1/1")
    recorder.ended(subject, RequestEnd(reason, Usage(100, 10, device_s=0.5), latencies))


def counted(plane: Plane) -> tuple[int, int, float, int]:
    """Return the requests of the series, of the step and of the budget, and the device time."""
    sums = plane.store.sums_of(KEY, SERIES_S)
    arm = plane.store.arms_of(WINDOW).get("sha256:1", ArmWindow())
    events = plane.store.events_of("chat", Priority.STANDARD, Sli.AVAILABILITY, 3600.0)
    return sums.requests, arm.requests, round(sums.device_s, 3), events.events


async def test_a_leader_counts_from_its_own_beginning() -> None:
    clock, objects = QuickClock(UNIX_S), MemoryLedger()
    plane = Plane(objects, clock)
    try:
        with pytest.raises(NoLeader):
            plane.store.counting_s()
        await plane.lead(1)
        clock.now_s += 9.0
        assert plane.store.counting_s() == 9.0
        plane.election.turn(None)
        with pytest.raises(NoLeader):
            plane.store.counting_s()
    finally:
        await plane.stop()


@pytest.mark.parametrize("seed", range(12))
async def test_each_request_counts_once_over_failovers(seed: int) -> None:
    rng, clock, objects = Random(seed), QuickClock(UNIX_S), MemoryLedger()
    planes = [Plane(objects, clock), Plane(objects, clock)]
    gateways = [SliRecorder(zone="a") for _ in range(2)]
    link = Link(rng, planes, lost_ratio=0.3)
    reporters = [SliReporter(one, link, clock, f"g{at}") for at, one in enumerate(gateways)]
    leader, sent = 0, 0
    await planes[0].lead(1)
    try:
        for turn in range(60):
            for recorder, reporter in zip(gateways, reporters, strict=True):
                finish(recorder)
                sent += 1
                with suppress(NoLeader):
                    await reporter.send()
            what = rng.random()
            if what < 0.15:
                planes[leader].election.turn(None)
                leader = 1 - leader
                await planes[leader].lead(turn + 2)
            elif what < 0.4:
                with suppress(Exception):
                    await planes[leader].store.store()
            elif what < 0.5:  # a frozen leader stores what it has when it wakes up
                planes[1 - leader].election.turn(1000)
                with suppress(Exception):
                    await planes[1 - leader].store.store()
                planes[1 - leader].election.turn(None)
        link.lost_ratio = 0.0
        await planes[leader].lead(10_000)
        for reporter in reporters:
            await reporter.send()
        assert counted(planes[leader]) == (sent, sent, sent * 0.5, sent)
        assert max(reporter.kept for reporter in reporters) <= 60
    finally:
        for plane in planes:
            await plane.stop()


async def test_samples_that_come_again_to_a_leader_count_once() -> None:
    """It led before: its sums begin from the snapshot again, its samples are still there."""
    clock = QuickClock(UNIX_S)
    plane = Plane(MemoryLedger(), clock)
    recorder = SliRecorder(zone="a")
    reporter = SliReporter(recorder, Link(Random(1), [plane]), clock, "g")
    await plane.lead(1)

    async def send(number: int) -> None:
        ended = StageClock(round(UNIX_S * 1e6) + number, decode_us=1)
        names = f"req_{number}", "grpc", "acme", "chat", "sha256:1", Priority.STANDARD, "FINISHED"
        finish(recorder)
        recorder.note(FinishedRequest(*names, ended, Usage(1, 1)))
        await reporter.send()

    for number in range(6):
        await send(number)
        if number == 2:
            await plane.store.store()
    await plane.lead(2)
    assert counted(plane)[0] == 3
    await send(6)
    assert counted(plane)[0] == 7
    found = plane.store.samples.find(UNIX_S - 1, UNIX_S + 1).requests
    assert [one.request_id for one in found] == [f"req_{number}" for number in range(7)]
    assert plane.store.samples.notes(UNIX_S - 1, UNIX_S + 1) == ()
    await plane.stop()


@pytest.mark.parametrize("snapshots", [1, 6])
async def test_of_two_leaders_one_stores(snapshots: int) -> None:
    """The other one began from the same snapshot. After several, its number is free again."""
    objects, clock = MemoryLedger(), QuickClock(UNIX_S)
    planes = [Plane(objects, clock), Plane(objects, clock)]
    recorders = [SliRecorder(zone="a") for _ in planes]
    for epoch, plane in enumerate(planes, 1):
        await plane.lead(epoch)
    reporters = [
        SliReporter(recorder, Link(Random(1), [plane]), clock, f"g{at}")
        for at, (recorder, plane) in enumerate(zip(recorders, planes, strict=True))
    ]
    for _ in range(snapshots):
        finish(recorders[0])
        await reporters[0].send()
        await planes[0].store.store()
    finish(recorders[1])
    await reporters[1].send()
    with pytest.raises(SnapshotTaken):
        await planes[1].store.store()
    await reporters[1].send()
    assert reporters[1].kept == 1, "it is in no snapshot that counts"
    for plane in planes:
        await plane.stop()


async def test_what_is_stored_is_forgotten_by_the_gateway() -> None:
    clock, objects = QuickClock(UNIX_S), MemoryLedger()
    plane = Plane(objects, clock)
    await plane.lead(1)
    recorder = SliRecorder(zone="a")
    reporter = SliReporter(recorder, Link(Random(1), [plane]), clock, "g")
    finish(recorder)
    await reporter.send()
    assert reporter.kept == 1
    await plane.store.store()
    await reporter.send()
    assert reporter.kept == 0
    await plane.stop()


async def test_an_outage_of_the_objects_loses_nothing() -> None:
    clock, objects = QuickClock(UNIX_S), MemoryLedger()

    def fail(operation: str, name: str) -> None:
        raise StoreUnavailable("full")

    objects.after = fail  # the effect took place, the answer is an error
    plane = Plane(objects, clock)
    await plane.lead(1)
    recorder = SliRecorder(zone="a")
    reporter = SliReporter(recorder, Link(Random(1), [plane]), clock, "g")
    for _ in range(3):
        finish(recorder)
        await reporter.send()
        with suppress(Exception):
            await plane.store.store()
    objects.after = lambda operation, name: None
    await plane.lead(1)
    await reporter.send()
    assert counted(plane)[0] == 3
    await plane.stop()


async def test_a_damaged_snapshot_is_named_and_the_one_before_is_taken() -> None:
    clock, objects = QuickClock(UNIX_S), MemoryLedger()
    plane = Plane(objects, clock)
    await plane.lead(1)
    recorder = SliRecorder(zone="a")
    reporter = SliReporter(recorder, Link(Random(1), [plane]), clock, "g")
    for _ in range(3):
        finish(recorder)
        await reporter.send()
        await plane.store.store()
    newest = max(objects.objects)
    objects.objects[newest] = objects.objects[newest][:-9]
    await plane.lead(2)
    assert counted(plane)[0] == 2
    await reporter.send()  # the gateway still has what the damaged snapshot contained
    assert counted(plane)[0] == 3
    await plane.store.store()
    assert max(objects.objects) > newest
    await plane.stop()


async def test_a_report_that_is_refused_for_good_is_dropped_and_the_rest_is_counted() -> None:
    clock, plane = QuickClock(UNIX_S), Plane(MemoryLedger(), QuickClock(UNIX_S))
    await plane.lead(1)
    recorder, link = SliRecorder(zone="a"), Refusing(Random(1), [plane])
    reporter = SliReporter(recorder, link, clock, "g")
    link.down = True
    for tokens in (10, 666, 10, 10, 10, 10):
        finish(recorder, ttft_s=tokens / 100)
        with suppress(NoLeader):
            await reporter.send()
    link.down = False
    await reporter.send()
    assert counted(plane)[0] == 5
    await plane.stop()


async def test_a_leader_that_refuses_whatever_is_sent_is_tried_again_later() -> None:
    clock, plane = QuickClock(UNIX_S), Plane(MemoryLedger(), QuickClock(UNIX_S))
    recorder, link = SliRecorder(zone="a"), Closed(Random(1), [plane])
    reporter = SliReporter(recorder, link, clock, "g")
    finish(recorder)
    with pytest.raises(InvalidInput):
        await reporter.send()
    assert link.calls < 5
    assert reporter.kept == 1


class Closed(Link):
    """Refuses every report for good, also one without content."""

    calls = 0

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        self.calls += 1
        raise InvalidInput("no reports are taken")


class Refusing(Link):
    """Refuses a batch with a slow request in it."""

    down = False

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        if self.down:
            raise NoLeader("none leads")
        if any(
            sums.ttft and max(s.most for s in sums.ttft.values()) > 6
            for r in reports
            for sums in r.series.values()
        ):
            raise InvalidInput("reports[0] is refused", field="reports")
        return await super().report(source, first, oldest, reports)


async def test_an_arm_that_burns_its_budget_raises_an_alert_of_its_own() -> None:
    plane = Plane(MemoryLedger(), QuickClock(UNIX_S))
    await plane.lead(1)
    recorder = SliRecorder(zone="a")
    reporter = SliReporter(recorder, Link(Random(1), [plane]), QuickClock(UNIX_S), "g")
    for number in range(40):
        finish(recorder, reason="STREAM_BROKEN" if number % 4 == 0 else "FINISHED")
    await reporter.send()
    alerts = plane.store.arm_alerts(ARM, UNIX_S)
    assert alerts == {(Priority.STANDARD, Sli.COMPLETION): BurnAlert.ACUTE}
    assert plane.store.arm_alerts(ARM, UNIX_S - 7200.0) == alerts
    assert plane.store.arm_alerts(ARM, UNIX_S + 60.0) == {}, "of an earlier rollout"
    assert plane.store.arm_alerts(replace(ARM, version_digest="sha256:2"), UNIX_S) == {}
    await plane.stop()


def first_token() -> RequestLatencies:
    latencies = RequestLatencies()
    latencies.ttft_s.append(0.2)
    return latencies


def test_a_snapshot_keeps_everything() -> None:
    recorder = SliRecorder(zone="a")
    finish(recorder)
    shape = RequestShape(9, 0, SamplingKind.GREEDY)
    recorder.ended(SliSubject(KEY, shapes=(shape,)), RequestEnd("FINISHED", Usage(9, 5), first_token()))
    report = recorder.cut(UNIX_S)
    assert report is not None
    book = SliBook(3)
    objectives = {("chat", Priority.STANDARD): OBJECTIVE}
    assert book.apply("g", 1, 1, [report], objectives, now_s=UNIX_S) == 1
    data = book_to_message(book, 4).SerializeToString(deterministic=True)
    loaded = book_from_bytes(data)
    assert loaded.number == 4
    assert book_to_message(loaded, 4).SerializeToString(deterministic=True) == data
    assert loaded.apply("g", 1, 1, [report], objectives, now_s=UNIX_S) == 1
    assert loaded.sums_of(KEY, SERIES_S, UNIX_S).requests == 2, "the same report does not count again"
    assert dict(loaded.shapes["chat"].items()) == {RequestShape(9, 5, SamplingKind.GREEDY): 1.0}


def test_a_snapshot_of_fewer_indicators_is_read() -> None:
    book, total = SliBook(3), Objective(Meta("o"), "chat", availability=0.9, total=LatencyTarget(5.0))
    recorder = SliRecorder(zone="a")
    recorder.ended(SliSubject(KEY), RequestEnd("FINISHED", Usage(9, 5), first_token(), 9.0))
    report = recorder.cut(UNIX_S)
    assert report is not None
    book.apply("g", 1, 1, [report], {("chat", Priority.STANDARD): total}, now_s=UNIX_S)
    message = book_to_message(book, 4)
    bins = [one for burn in message.burns for ring in burn.rings for one in ring.bins]
    assert [list(one.counts) for one in bins] == [[1, 0, 0, 0, 0, 0, 0, 0, 1, 1]] * 3
    for one in bins:
        del one.counts[8:]  # as a control plane without that indicator stored it
    (rings,) = book_from_bytes(message.SerializeToString()).burns.values()
    assert rings.over(Sli.AVAILABILITY, 3600.0, UNIX_S) == EventCounts(1, 0)
    assert rings.over(Sli.TOTAL, 3600.0, UNIX_S) == EventCounts(0, 0)


def test_shapes_of_traffic_lose_weight_and_are_forgotten() -> None:
    book, shapes = SliBook(), TrafficShapes()
    shapes.add(RequestShape(9, 5, SamplingKind.GREEDY), 2.0)
    book.apply("g", 1, 1, [SliReport(UNIX_S, {}, {}, {"chat": shapes})], {}, now_s=UNIX_S)
    book.forget(UNIX_S)
    book.forget(UNIX_S)
    assert [weight for _, weight in book.shapes["chat"].items()] == [2.0], "once an interval"
    book.forget(UNIX_S + 4 * 3600)
    assert [weight for _, weight in book.shapes["chat"].items()] == [pytest.approx(1.0, rel=0.1)]
    book.forget(UNIX_S + 86_400)
    assert book.shapes == {}
