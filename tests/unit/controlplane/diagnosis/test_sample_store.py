"""Samples of requests are kept in bounds, outlive a leader, and say what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from services.adapters.ledger_stores import FolderLedger
from services.controlplane.diagnosis import store as limits
from services.controlplane.diagnosis.store import Found, SampleStore
from services.controlplane.usage.log import KEEP_S, UsageLog
from services.controlplane.usage.policy.book import LedgerBook
from services.controlplane.usage.policy.lines import Amounts, Line
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


def worker(state: VersionState = VersionState.READY, name: str = "worker-0") -> Worker:
    version = LoadedVersion("chat", "chat", "sha256:a", state)
    return Worker(name, "host:1", zone="b", versions=(version,), device="h200")


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
    ahead = report(NOW_S + 30, request(1, NOW_S + 29))
    store.add("one", [ahead], lost=0, sent_unix_s=NOW_S + 30)
    (found,) = store.find(NOW_S - 2, NOW_S).requests
    assert found.ended_unix_us == pytest.approx((NOW_S - 1) * 1e6, abs=1e3)
    assert store.notes(NOW_S - 10, NOW_S) == (
        "the clock of gateway is 30.0 s ahead; its times are corrected",
    )


def test_a_clock_that_is_behind_is_corrected_once_calls_of_half_a_minute_show_it() -> None:
    clock = HandClock(NOW_S)
    store = SampleStore(MemoryLedger(), clock)
    for number in range(20):
        clock.now_s += 2.0
        slow_s = clock.now_s - 30
        store.add("one", [report(slow_s, request(number, slow_s - 1))], lost=0, sent_unix_s=slow_s)
    found = {one.request_id for one in store.find(NOW_S, clock.now_s).requests}
    assert found == {f"req_{number}" for number in range(15, 20)}
    assert "the clock of gateway is 30.0 s behind" in store.notes(NOW_S, clock.now_s)[0]


@pytest.mark.parametrize("slow_s", [0.1, 6.0])
def test_reports_that_come_late_are_no_sign_of_a_clock(slow_s: float) -> None:
    """A new leader receives those of an outage four at a time, the oldest first, and may be slow at first."""
    clock = HandClock(NOW_S)
    store = SampleStore(MemoryLedger(), clock)
    cuts = [NOW_S - 120 + 2 * number for number in range(60)]
    for begin in range(0, 60, 4):
        late = [report(cut_s, request(round(cut_s), cut_s - 1)) for cut_s in cuts[begin : begin + 4]]
        store.add("one", late, lost=0, sent_unix_s=clock.now_s - slow_s)
    found = store.find(NOW_S - 130, NOW_S).requests
    assert [one.ended_unix_us / 1e6 for one in found] == pytest.approx([cut_s - 1 for cut_s in cuts])
    assert store.notes(NOW_S - 130, NOW_S) == ()


def test_a_gateway_that_sends_no_time_is_not_corrected() -> None:
    store = SampleStore(MemoryLedger(), HandClock(NOW_S))
    store.add("one", [report(NOW_S - 60, request(1, NOW_S - 61))], lost=0)
    assert len(store.find(NOW_S - 62, NOW_S - 60).requests) == 1
    assert store.notes(NOW_S - 100, NOW_S) == ()


def test_zones_of_workers_that_are_gone_are_forgotten() -> None:
    clock, fleet = HandClock(NOW_S), [worker()]
    store = SampleStore(MemoryLedger(), clock, workers=lambda: fleet)
    for number in range(100):
        clock.now_s += 60.0
        fleet[:] = [worker(name=f"worker-{number}")]
        run = replace(RUN, worker_id=f"worker-{number}")
        store.add("one", [report(clock.now_s, replace(request(number, clock.now_s), run=run))], lost=0)
        assert set(store.find(clock.now_s - 30, clock.now_s + 1).zones) == {f"worker-{number}"}
    store.add("one", [report(clock.now_s, request(100, clock.now_s))], lost=0)
    assert store.find(clock.now_s - 1, clock.now_s + 1).zones == {"worker-99": "b"}, "worker-0 is gone"
    assert len(store.find(0, clock.now_s + 1).zones) == limits.KEPT_S // 60 + 1


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


async def test_what_a_leader_had_not_stored_is_said() -> None:
    ledger, clock = MemoryLedger(), HandClock(NOW_S)
    first = SampleStore(ledger, clock)
    await first.load()
    assert first.missing(Found(0, NOW_S)) == (), "nothing was stored before"
    for number in range(130):
        clock.now_s += 1.0
        first.add("one", [report(clock.now_s, request(number, clock.now_s))], lost=0)
    await first.store()
    second = SampleStore(ledger, clock)
    clock.now_s += 5.0
    await second.load()
    last_s = (clock.now_s - limits.BUCKET_S) // 60 * 60
    lost_s = clock.now_s - last_s
    (note,) = second.missing(Found(0, last_s), Found(last_s, clock.now_s + 30))
    assert note.startswith(f"the leader changed: requests of {lost_s:.0f} s of this time may be missing")
    assert second.missing(Found(0, last_s), Found(clock.now_s, clock.now_s + 30)) == ()
    assert first.missing(Found(0, clock.now_s)) == ()


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
    assert len(await ledger.names("samples/saved-")) == 2
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
    assert len(await ledger.names("samples/minute-")) <= 70
    assert await store.hours_before(0.0) is None
    name = f"samples/hour-{hour - 24:016d}"
    ledger.objects[name] = ledger.objects[name][:-5]
    assert await store.hours_before(clock.now_s) is None, "the only hour of the day is damaged"


@pytest.mark.parametrize("kind", ["memory", "folder"])
async def test_samples_and_the_usage_ledger_share_a_store(kind: str, tmp_path: Path) -> None:
    """Each finds its own objects after both stored hours, and the checkpoints of usage delete no samples."""
    ledger = MemoryLedger() if kind == "memory" else FolderLedger(tmp_path)
    clock = HandClock(NOW_S)
    samples, usage = SampleStore(ledger, clock), UsageLog(ledger, clock)
    await usage.load()
    await ledger.create(f"hours/{int(NOW_S // 3600) - 1:016d}", b"samples of an earlier version")
    for number in range(26):
        samples.add("one", [report(clock.now_s, request(number, clock.now_s - 1))], lost=0)
        await samples.store()
        clock.now_s += 3600.0
    await samples.save("n" * 48, samples.find(0, clock.now_s))
    stored = await ledger.names("samples/")
    book = LedgerBook(number=10**15)  # above the number of any hour
    book.sums.add(Line(int(NOW_S // 3600), "acme"), Amounts(1))
    book.hours = await usage.write_checkpoint(book, 0)
    found = await samples.hours_before(clock.now_s)
    assert found is not None
    clock.now_s += KEEP_S
    await usage.delete_covered(book)
    assert await ledger.names("hours/") == tuple(
        f"hours/{hour:08d}-{through:016d}" for hour, through in book.hours.items()
    )
    assert await ledger.names("samples/") == stored
    assert await samples.hours_before(clock.now_s) == found
    assert (await UsageLog(ledger, clock).load()).hours == book.hours


async def test_minutes_that_are_in_memory_count_once_after_another_load() -> None:
    """Late requests thin a bucket whose minute is stored."""
    clock = HandClock(NOW_S)
    store = SampleStore(MemoryLedger(), clock)
    ended_s, many = NOW_S + 1, limits.MAX_OF_MODEL - 2
    store.add("one", [report(NOW_S, *(request(number, ended_s) for number in range(many)))], lost=0)
    clock.now_s += 120.0
    await store.store()
    late = [request(many + number, ended_s) for number in range(8)]
    store.add("one", [report(NOW_S, *late)], lost=0)
    await store.load()
    found = store.find(NOW_S, NOW_S + 60).requests
    assert sum(one.weight for one in found) == pytest.approx(many + 8, rel=0.02)


async def test_a_damaged_minute_is_skipped() -> None:
    ledger, clock = MemoryLedger(), HandClock(NOW_S)
    store = SampleStore(ledger, clock)
    for number in range(200):
        clock.now_s += 1.0
        store.add("one", [report(clock.now_s, request(number, clock.now_s))], lost=0)
    await store.store()
    name = min(await ledger.names("samples/minute-"))
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
