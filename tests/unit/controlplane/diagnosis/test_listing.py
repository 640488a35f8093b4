"""Which times a diagnosis compares, what limits its answer, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.diagnosis.listing import Diagnoses, answer_for_tenant, for_tenant
from services.controlplane.diagnosis.store import SampleStore
from services.core.arms import SliReport
from services.core.errors import InvalidInput, NoLeader, NotFound
from services.core.records import Worker
from services.rpc.convert.inference import timestamp
from tests.support.clocks import HandClock
from tests.support.drawn_windows import Habits, World, drawn
from tests.support.memory_ledger import MemoryLedger
from tests.support.no_plane import NoPlane

T0 = 1_700_000_000.0
SLOW_STORE = replace(World(), admit_s=0.05)
TWO_TENANTS = World({"ann": Habits(6.0), "bob": Habits(6.0)})
FLOOD = World({"ann": Habits(8.4), "bob": Habits(60.0)})


class Plane:
    """A leading control plane whose clock is 100 s after ``T0``: 60 usual seconds, then a slow Redis."""

    def __init__(
        self, ledger: MemoryLedger | None = None, *, device: str = "cpu", installation: str = "here"
    ) -> None:
        self.clock = HandClock(T0 + 100)
        self.ledger = MemoryLedger() if ledger is None else ledger
        self.samples = SampleStore(
            self.ledger,
            self.clock,
            workers=lambda: [Worker("worker-1", "host:1", zone="b", device=device)],
            installation=lambda: installation,
        )
        self.leads = True
        self.diagnoses = Diagnoses(self.samples, NoPlane(), self.clock, leads=lambda: self.leads)

    def fill(self, *worlds: tuple[World, float, float]) -> Plane:
        for number, (world, begin_s, lasted_s) in enumerate(worlds):
            found = drawn(world, T0 + begin_s, lasted_s, number)
            self.samples.add("one", [SliReport(self.clock.now_s, {}, {}, sampled=found)], lost=0)
        return self

    async def ask(self, **fields: object) -> pb.DiagnoseLatencyResponse:
        return await self.diagnoses.diagnose(pb.DiagnoseLatencyRequest(**fields), forwarded=True)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plane() -> Plane:
    return Plane().fill((World(), 0.0, 60.0), (SLOW_STORE, 60.0, 38.0))


def named(found: pb.DiagnoseLatencyResponse) -> list[tuple[str, str]]:
    return [(one.kind, one.subject) for one in found.causes]


async def test_without_a_start_the_window_begins_at_the_rise(plane: Plane) -> None:
    found = await plane.ask()
    assert found.verdict == "CAUSE_FOUND"
    assert named(found) == [("quota_store_slow", "redis")]
    begin = getattr(found.window, "from")
    assert begin.ToSeconds() == pytest.approx(T0 + 60, abs=5)
    assert (found.model, found.metric, found.quantile) == ("chat", "ttft", 0.95)
    assert found.quantiles.window_s > 2 * found.quantiles.baseline_s
    assert "the last rise" in found.notes[0]
    assert not found.window_samples.requests
    assert {step.depth for step in found.tree} == {0, 1, 2, 3}


async def test_samples_are_sent_where_they_are_requested(plane: Plane) -> None:
    found = await plane.ask(start_time=timestamp(T0 + 60), samples=True)
    assert len(found.window_samples.requests) == found.window.samples > 100
    assert len(found.baseline_samples.requests) == found.baseline.samples
    assert len(found.step_prices) == 4


async def test_a_calm_hour_has_no_cause(plane: Plane) -> None:
    found = await plane.ask(end_time=timestamp(T0 + 58))
    assert (found.verdict, named(found)) == ("NO_CAUSE_FOUND", [])
    assert "no rise was found" in found.notes[0]


async def test_no_traffic_is_said(plane: Plane) -> None:
    for fields in ({"end_time": timestamp(T0 - 500)}, {"model": "other"}, {"tenant": "nobody"}):
        found = await plane.ask(**fields)
        assert (found.verdict, named(found)) == ("NOT_ENOUGH_TRAFFIC", [])


async def test_the_latencies_of_a_tenant_are_its_own(plane: Plane) -> None:
    found = await plane.ask(start_time=timestamp(T0 + 60), tenant="ann", samples=True)
    for span, samples in (
        (found.window, found.window_samples),
        (found.baseline, found.baseline_samples),
    ):
        assert span.samples == sum(one.tenant == "ann" for one in samples.requests) < len(samples.requests)
    alone = Plane()
    mine = [one for one in plane.samples.find(T0, T0 + 100).requests if one.tenant == "ann"]
    alone.samples.add("one", [SliReport(alone.clock.now_s, {}, {}, sampled=mine)], lost=0)
    expected = await alone.ask(start_time=timestamp(T0 + 60))
    assert found.quantiles == expected.quantiles
    shares = [[one.share for one in each.stages] for each in (found, expected)]
    assert shares[0] == pytest.approx(shares[1])
    assert named(found) == [("quota_store_slow", "redis")]


@pytest.mark.parametrize("start", ["given", "found"])
async def test_a_tenant_is_not_accused_of_the_flood_of_another(start: str) -> None:
    plane = Plane().fill((TWO_TENANTS, 0.0, 60.0), (FLOOD, 60.0, 38.0))
    fields = {"start_time": timestamp(T0 + 60)} if start == "given" else {}
    found = await plane.ask(tenant="ann", **fields)
    assert named(found) == [("arrivals_grew", "bob")]
    shown = for_tenant(found, "ann")
    assert "bob" not in str(shown)
    assert named(shown) == [("arrivals_grew", "other tenants")]
    assert shown.message == "arrivals_grew of other tenants explains most of the rise"


def test_a_tenant_named_like_the_model_is_hidden_too() -> None:
    answer = pb.DiagnoseLatencyResponse(model="chat")
    for kind in ("arrivals_grew", "capacity_lost"):
        answer.causes.add(kind=kind, subject="chat", evidence=["2 replicas"], next="update chat")
    found = for_tenant(answer, "ann")
    assert named(found) == [("arrivals_grew", "other tenants"), ("capacity_lost", "chat")]
    assert not any(one.evidence for one in found.causes)
    for tenant in ("ann", "chat"):
        answer = pb.DiagnoseLatencyResponse(model="chat")
        answer.causes.add(kind="cache_hits_fell", subject="chat", evidence=["for all 7 tenants"])
        assert "7" not in str(for_tenant(answer, tenant))


def test_a_tenant_reads_evidence_of_its_own_figures_alone() -> None:
    answer = pb.DiagnoseLatencyResponse(model="chat", step_prices=[0.01, 0.0, 0.0, 0.0])
    for kind in ("reader_stalled", "noisy_neighbour", "preempted", "slow_worker"):
        answer.causes.add(kind=kind, subject="standard", evidence=[kind])
    answer.causes.add(kind="reader_stalled", subject="bob", evidence=["streams of bob"])
    found = for_tenant(answer, "standard")
    assert [(one.kind, one.subject, list(one.evidence)) for one in found.causes] == [
        ("reader_stalled", "standard", ["reader_stalled"]),
        ("noisy_neighbour", "standard", []),
        ("preempted", "", []),
        ("slow_worker", "", []),
        ("reader_stalled", "other tenants", []),
    ]
    assert not found.step_prices


async def test_a_tenant_reads_nothing_of_saved_baselines() -> None:
    plane = Plane(device="h200").fill((World(), 0.0, 60.0))
    await plane.diagnoses.save_baseline(pb.SaveLatencyBaselineRequest(name="secret"), forwarded=True)
    later = Plane(plane.ledger).fill((SLOW_STORE, 60.0, 38.0))
    found = await answer_for_tenant(later.ask(baseline="secret", tenant="ann"), "ann")
    assert found.verdict == "BASELINE_DIFFERS"
    assert "h200" not in str(found)
    with pytest.raises(NotFound) as caught:
        await answer_for_tenant(later.ask(baseline="other", tenant="ann"), "ann")
    assert "secret" not in caught.value.message


def test_a_tenant_reads_no_names_of_the_fleet() -> None:
    answer = pb.DiagnoseLatencyResponse(model="chat", notes=["127.0.0.1:1 is idle"])
    answer.tree.add(depth=1, text="decode")
    answer.tree.add(depth=3, text="slow_worker (worker-7)")
    answer.causes.add(
        kind="slow_worker", subject="worker-7", evidence=["steps of worker-7"], next="drain worker-7"
    )
    answer.causes.add(kind="prompts_grew", subject="ann", evidence=["prompts of ann"])
    answer.window_samples.requests.add(request_id="req_1")
    found = for_tenant(answer, "ann")
    assert "worker-7" not in str(found)
    assert "127.0.0.1" not in str(found)
    assert not found.window_samples.requests
    assert [(one.kind, one.subject) for one in found.causes] == [("slow_worker", ""), ("prompts_grew", "ann")]
    assert list(found.causes[1].evidence) == ["prompts of ann"]


async def test_a_saved_baseline_is_compared_with() -> None:
    plane = Plane().fill((World(), 0.0, 60.0), (SLOW_STORE, 60.0, 38.0))
    span = await plane.diagnoses.save_baseline(
        pb.SaveLatencyBaselineRequest(name="calm", start_time=timestamp(T0), end_time=timestamp(T0 + 60)),
        forwarded=True,
    )
    assert span.baseline.samples > 300
    later = Plane(plane.ledger).fill((SLOW_STORE, 60.0, 38.0))
    found = await later.ask(start_time=timestamp(T0 + 60), baseline="calm")
    assert named(found) == [("quota_store_slow", "redis")]
    assert found.baseline.to.ToSeconds() == T0 + 60
    with pytest.raises(NotFound, match="no baseline other is saved"):
        await later.ask(baseline="other")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"device": "h200"}, "is of workers with cpu, the fleet has h200"),
        ({"installation": "there"}, "is of another installation"),
    ],
)
async def test_a_baseline_of_another_fleet_accuses_nobody(other: dict[str, str], why: str) -> None:
    plane = Plane().fill((World(), 0.0, 60.0))
    request = pb.SaveLatencyBaselineRequest(name="calm", start_time=timestamp(T0))
    await plane.diagnoses.save_baseline(request, forwarded=True)
    later = Plane(plane.ledger, **other).fill((SLOW_STORE, 60.0, 38.0))
    found = await later.ask(start_time=timestamp(T0 + 60), baseline="calm")
    assert (found.verdict, named(found)) == ("BASELINE_DIFFERS", [])
    assert why in found.message
    assert (list(found.tree), list(found.stages)) == ([], [])


async def test_a_baseline_lasts_as_long_as_its_samples() -> None:
    """A process that started a moment ago has no hour of samples: traffic as usual is no growth."""
    plane = Plane().fill((World(), 0.0, 60.0))
    plane.clock.now_s = T0 + 61
    span = await plane.diagnoses.save_baseline(
        pb.SaveLatencyBaselineRequest(name="calm", start_time=timestamp(T0 - 500)), forwarded=True
    )
    assert getattr(span.baseline, "from").ToSeconds() == T0
    later = Plane(plane.ledger).fill((SLOW_STORE, 60.0, 38.0))
    found = await later.ask(start_time=timestamp(T0 + 60), baseline="calm")
    assert named(found) == [("quota_store_slow", "redis")]
    assert "arrivals_grew" not in str(found.tree)


async def test_stored_hours_are_compared_by_the_time_that_they_cover() -> None:
    """The same hour of three days does not last two days; processes started late in each."""
    ledger = MemoryLedger()
    for day in (3, 2, 1):
        plane = Plane(ledger)
        end_s = (T0 // 3600 + 1) * 3600 - day * 86400
        plane.clock.now_s = end_s + 61
        found = drawn(World(), end_s - 60, 60.0, day)
        plane.samples.add("one", [SliReport(plane.clock.now_s, {}, {}, sampled=found)], lost=0)
        await plane.samples.store()
    later = Plane(ledger).fill((SLOW_STORE, 60.0, 38.0))
    answer = await later.ask(start_time=timestamp(T0 + 60))
    assert answer.baseline.to.ToSeconds() - getattr(answer.baseline, "from").ToSeconds() > 172_000
    assert 120.0 < answer.baseline.covered_s <= 180.0
    assert answer.window.covered_s == 0.0  # all of it
    assert named(answer) == [("quota_store_slow", "redis")]
    # One tenant of six sends so little that it varies by the least growth.
    assert sum("arrivals_grew" in step.text for step in answer.tree) <= 1


async def test_a_baseline_of_other_models_is_refused() -> None:
    plane = Plane().fill((World(), 0.0, 60.0))
    await plane.diagnoses.save_baseline(pb.SaveLatencyBaselineRequest(name="calm"), forwarded=True)
    later = Plane(plane.ledger)
    renamed = [structs.replace(one, model="new") for one in drawn(SLOW_STORE, T0 + 60, 38.0, 1)]
    later.samples.add("one", [SliReport(later.clock.now_s, {}, {}, sampled=renamed)], lost=0)
    found = await later.ask(start_time=timestamp(T0 + 60), baseline="calm")
    assert (found.verdict, found.message) == (
        "BASELINE_DIFFERS",
        "the baseline calm has no request of new: save one of this traffic",
    )


async def test_lost_reports_are_noted() -> None:
    plane = Plane().fill((World(), 0.0, 60.0), (SLOW_STORE, 60.0, 38.0))
    plane.samples.add("two", [], lost=4)
    found = await plane.ask(start_time=timestamp(T0 + 60))
    assert any(note.startswith("4 reports of gateways are lost") for note in found.notes)


async def test_an_answer_says_what_an_earlier_leader_had_not_stored() -> None:
    earlier = Plane().fill((World(), 0.0, 60.0))
    await earlier.samples.store()
    later = Plane(earlier.ledger)
    await later.samples.load()
    later.fill((SLOW_STORE, 60.0, 38.0))
    found = await later.ask(start_time=timestamp(T0 + 60))
    assert any(note.startswith("the leader changed: requests of 40 s") for note in found.notes)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"start_time": timestamp(T0 + 50), "end_time": timestamp(T0 + 50)}, "is not before its end"),
        ({"end_time": timestamp(T0 + 1000)}, "is in the future"),
    ],
)
async def test_impossible_times_are_refused(plane: Plane, fields: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        await plane.ask(**fields)


async def test_a_baseline_needs_requests_and_a_name_of_its_own(plane: Plane) -> None:
    for name, end_s, why in (("auto", T0 + 60, "auto is"), ("calm", T0 - 500, "a baseline needs 30")):
        request = pb.SaveLatencyBaselineRequest(name=name, end_time=timestamp(end_s))
        with pytest.raises(InvalidInput, match=why):
            await plane.diagnoses.save_baseline(request, forwarded=True)


async def test_only_the_leader_answers() -> None:
    plane = Plane()
    plane.leads = False
    for forwarded in (True, False):  # the second asks the leader, and there is none
        with pytest.raises(NoLeader):
            await plane.diagnoses.diagnose(pb.DiagnoseLatencyRequest(), forwarded=forwarded)
        with pytest.raises(NoLeader):
            await plane.diagnoses.save_baseline(pb.SaveLatencyBaselineRequest(), forwarded=forwarded)
