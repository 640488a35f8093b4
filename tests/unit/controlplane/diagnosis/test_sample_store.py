"""Samples of requests are kept in bounds, outlive a leader, and say what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from services.adapters.ledger_stores import FolderLedger
from services.controlplane.diagnosis import store as limits
from services.controlplane.diagnosis.store import SampleStore
from services.core.arms import SliReport
from services.core.errors import FailedPrecondition, NotFound
from services.core.estimates.finished import FinishedRequest
from services.core.generation import RunFacts, StageClock, StepTotals, Usage
from services.core.records import LoadedVersion, Priority, VersionState, Worker
from tests.support.clocks import HandClock
from tests.support.memory_ledger import MemoryLedger

NOW_S = 1_700_000_040.0  # begins no minute
RUN = RunFacts("worker-0", before=StepTotals(1, 2, 3, 4, 5), log_us=7)


def request(number: int, ended_s: float, *, model: str = "chat", weight: float = 1.0) -> FinishedRequest:
    clock = StageClock(round(ended_s * 1e6) - 1000, decode_us=1000)
    names = f"req_{number}", "grpc", "acme", model, "sha256:a", Priority.BATCH, "FINISHED"
    return FinishedRequest(*names, clock, Usage(3, 4, 1), "a", "gateway", weight, RUN)


def report(cut_s: float, *requests: FinishedRequest) -> SliReport:
    return SliReport(cut_s, {}, {}, sampled=requests)


def worker(state: VersionState = VersionState.READY) -> Worker:
    version = LoadedVersion("chat", "chat", "sha256:a", state)
    return Worker("worker-0", "host:1", zone="b", versions=(version,), device="h200")


def test_requests_are_found_by_the_time_of_their_end_with_all_their_fields() -> None:
    store = SampleStore(MemoryLedger(), HandClock(NOW_S), workers=lambda: [worker()])
    sent = [request(number, NOW_S - number, weight=2.5) for number in range(40)]
    store.add("one", [report(NOW_S, *sent)], lost=0)
    found = store.find(NOW_S - 20.5, NOW_S - 9.5)
    assert sorted(found.requests, key=lambda one: one.request_id) == sorted(
        sent[10:21], key=lambda one: one.request_id
    )
    assert (found.zones, found.devices) == ({"worker-0": "b"}, ("h200",))
    assert [one.ready for one in store.find(NOW_S - 1, NOW_S + 1).moments] == [{"chat": 1}]


def test_a_worker_that_loads_is_noted() -> None:
    store = SampleStore(MemoryLedger(), HandClock(NOW_S), workers=lambda: [worker(VersionState.LOADING)])
    store.add("one", [report(NOW_S, request(1, NOW_S))], lost=0)
    (moment,) = store.find(NOW_S - 1, NOW_S + 1).moments
    assert (moment.loading, moment.ready) == (("worker-0",), {"chat": 0})


def test_a_bucket_keeps_a_bounded_sample_of_each_model_that_stands_for_all() -> None:
    clock = HandClock(NOW_S)
    store = SampleStore(MemoryLedger(), clock)
    many = 5 * limits.MAX_OF_MODEL
    for number in range(many):
        store.add("one", [report(NOW_S, request(number, NOW_S - 1))], lost=0)
    for number in range(3):
        store.add("one", [report(NOW_S, request(many + number, NOW_S - 1, model="small"))], lost=0)
    found = store.find(NOW_S - 10, NOW_S).requests
    chat = [one for one in found if one.model == "chat"]
    assert limits.MAX_OF_MODEL // 2 <= len(chat) <= limits.MAX_OF_MODEL
    assert sum(one.weight for one in chat) == pytest.approx(many, rel=0.02)
    assert [one.weight for one in found if one.model == "small"] == [1.0] * 3


def test_memory_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 20_000)
    clock = HandClock(NOW_S)
    store = SampleStore(MemoryLedger(), clock)
    for number in range(400):
        clock.now_s += 1.0
        store.add("one", [report(clock.now_s, request(number, clock.now_s))], lost=0)
    assert store.size_bytes <= 20_000 + 10 * 250
    assert {one.request_id for one in store.find(NOW_S, clock.now_s + 1).requests} >= {"req_399", "req_390"}
    assert store.began_s > NOW_S + 200
    clock.now_s += limits.KEPT_S + 20
    store.add("one", [report(clock.now_s, request(999, clock.now_s))], lost=0)
    assert len(store.find(0, clock.now_s + 1).requests) == 1


def test_a_clock_that_differs_is_corrected_and_named() -> None:
    store = SampleStore(MemoryLedger(), HandClock(NOW_S))
    store.add("one", [report(NOW_S + 30, request(1, NOW_S + 29))], lost=0)
    (found,) = store.find(NOW_S - 2, NOW_S).requests
    assert found.ended_unix_us == pytest.approx((NOW_S - 1) * 1e6, abs=1e3)
    assert store.notes(NOW_S - 10, NOW_S) == (
        "the clock of gateway is 30.0 s ahead; its times are corrected",
    )
    # Reports that come late after an outage are no sign of a clock.
    late = SampleStore(MemoryLedger(), HandClock(NOW_S))
    late.add("one", [report(NOW_S - 60, request(1, NOW_S - 61)), report(NOW_S)], lost=0)
    assert len(late.find(NOW_S - 62, NOW_S - 60).requests) == 1
    assert late.notes(NOW_S - 100, NOW_S) == ()


def test_lost_reports_and_gateways_that_stopped_are_said() -> None:
    clock = HandClock(NOW_S)
    store = SampleStore(MemoryLedger(), clock)
    store.add("one", [report(NOW_S, request(1, NOW_S))], lost=3)
    assert store.notes(NOW_S - 5, NOW_S + 5) == (
        "3 reports of gateways are lost: their requests are missing in the samples",
    )
    (_, stopped) = store.notes(NOW_S - 5, NOW_S + 60)
    assert stopped.startswith("gateway reported nothing in the last 60 s")
    assert store.notes(NOW_S + 61, NOW_S + 120) == ()


@pytest.mark.parametrize("kind", ["memory", "folder"])
async def test_a_new_leader_has_the_minutes_of_the_one_before(kind: str, tmp_path: Path) -> None:
    ledger = MemoryLedger() if kind == "memory" else FolderLedger(tmp_path)
    clock = HandClock(NOW_S)
    first = SampleStore(ledger, clock, workers=lambda: [worker()])
    for number in range(130):
        clock.now_s += 1.0
        first.add("one", [report(clock.now_s, request(number, clock.now_s))], lost=0)
    await first.store()
    second = SampleStore(ledger, clock)
    await second.load()
    last_s = (clock.now_s - limits.BUCKET_S) // 60 * 60
    expected = first.find(0, last_s)
    assert len(expected.requests) > 60
    found = second.find(0, last_s)
    assert found.requests == expected.requests
    assert found.moments == expected.moments
    assert found.zones == {"worker-0": "b"}
    unstored = first.find(last_s, clock.now_s + 1)
    await first.load()  # it leads again
    assert first.find(0, last_s) == expected
    assert first.find(last_s, clock.now_s + 1) == unstored


@pytest.mark.parametrize("kind", ["memory", "folder"])
async def test_a_saved_baseline_is_replaced_by_one_of_its_name(kind: str, tmp_path: Path) -> None:
    ledger = MemoryLedger() if kind == "memory" else FolderLedger(tmp_path)
    store = SampleStore(ledger, HandClock(NOW_S), installation=lambda: "here")
    for number in (1, 2):
        store.add("one", [report(NOW_S, request(number, NOW_S - 1))], lost=0)
        await store.save("monday-2", store.find(NOW_S - 10, NOW_S))
        await store.save("monday", store.find(NOW_S - 10, NOW_S))
    found = await store.baseline("monday")
    assert [one.request_id for one in found.requests] == ["req_1", "req_2"]
    assert (found.installation, found.begin_s, found.end_s) == ("here", NOW_S - 10, NOW_S)
    assert len(await ledger.names("baselines/")) == 2
    with pytest.raises(NotFound, match=r"no baseline tuesday is saved \(saved: monday, monday-2\)"):
        await store.baseline("tuesday")


async def test_baselines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BASELINES", 1)
    store = SampleStore(MemoryLedger(), HandClock(NOW_S))
    await store.save("one", store.find(0, 1))
    await store.save("one", store.find(0, 1))
    with pytest.raises(FailedPrecondition, match="1 baselines are saved"):
        await store.save("two", store.find(0, 1))


async def test_hours_are_stored_and_found_by_the_hour_of_the_day() -> None:
    ledger, clock = MemoryLedger(), HandClock(NOW_S)
    store = SampleStore(ledger, clock)
    for number in range(26 * 6):
        clock.now_s += 600.0
        store.add("one", [report(clock.now_s, request(number, clock.now_s - 1))], lost=0)
        await store.store()
    found = await store.hours_before(clock.now_s)
    assert found is not None
    hour = int(clock.now_s // 3600)
    ended = {int(one.ended_unix_us / 3600e6) for one in found.requests}
    assert ended == {hour - 24}
    assert len(await ledger.names("minutes/")) <= 70
    assert await store.hours_before(0.0) is None


async def test_a_damaged_minute_is_skipped() -> None:
    ledger, clock = MemoryLedger(), HandClock(NOW_S)
    store = SampleStore(ledger, clock)
    for number in range(200):
        clock.now_s += 1.0
        store.add("one", [report(clock.now_s, request(number, clock.now_s))], lost=0)
    await store.store()
    name = min(await ledger.names("minutes/"))
    ledger.objects[name] = ledger.objects[name][:-5]
    second = SampleStore(ledger, clock)
    await second.load()
    assert 0 < len(second.find(0, clock.now_s).requests) < len(store.find(0, clock.now_s).requests)


def test_a_thinned_request_keeps_everything_but_its_weight() -> None:
    sent = request(1, NOW_S - 1)
    store = SampleStore(MemoryLedger(), HandClock(NOW_S))
    store.add("one", [report(NOW_S, sent)], lost=0)
    (found,) = store.find(NOW_S - 5, NOW_S).requests
    assert replace(found, weight=sent.weight) == sent
