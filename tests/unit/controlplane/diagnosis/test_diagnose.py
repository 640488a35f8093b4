"""Planted causes are named, quiet windows accuse nobody, and the parts of an answer sum to the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
from msgspec import structs

from services.controlplane.diagnosis.policy import diagnose as diagnosis
from services.controlplane.diagnosis.policy.comparison import Evidence, TwoTimes, compare
from services.controlplane.diagnosis.policy.demand import DemandSuspects
from services.controlplane.diagnosis.policy.diagnose import (
    Diagnosis,
    DiagnosisVerdict,
    change_in,
    diagnose,
)
from services.controlplane.diagnosis.policy.quantiles import (
    allocated,
    change_points,
    levels,
    quantile,
    rises,
    unlike_span,
)
from services.controlplane.diagnosis.policy.samples import (
    FleetMoment,
    Metric,
    RequestTable,
    fit_prices,
    parts_of,
    samples_of,
)
from services.controlplane.diagnosis.policy.suspects import CauseKind, Suspect, suspects_of
from services.core.estimates.finished import FinishedRequest
from services.core.generation import StageClock, Usage
from tests.support import drawn_windows as draws
from tests.support.drawn_windows import World, drawn, drawn_rows

ZONES = {f"worker-{at}": "ab"[at % 2] for at in range(8)}
BASELINE_S, WINDOW_S = (1000.0, 1040.0), (1050.0, 1080.0)
USUAL = World()
CAUSES = {
    "prompts": (Metric.TTFT, USUAL.with_tenant("ann", prompt=(1000, 1400)), CauseKind.PROMPTS_GREW, "ann"),
    "cache": (Metric.TTFT, USUAL.with_tenant("bob", shared=0), CauseKind.CACHE_HITS_FELL, "bob"),
    "worker": (
        Metric.ITL,
        replace(USUAL, worker_ratio={"worker-1": 3.0}),
        CauseKind.SLOW_WORKER,
        "worker-1",
    ),
    "noisy": (
        Metric.ITL,
        USUAL.with_tenant("nora", per_s=8.0, prompt=(1500, 1900), output=(2, 4)),
        CauseKind.NOISY_NEIGHBOUR,
        "nora",
    ),
    "redis": (Metric.TTFT, replace(USUAL, admit_s=0.05), CauseKind.QUOTA_STORE_SLOW, "redis"),
    "zone": (Metric.TTFT, replace(USUAL, zone_delay_s={"b": 0.06}), CauseKind.ZONE_NETWORK_SLOW, "b"),
    "version": (
        Metric.ITL,
        replace(USUAL, version="sha256:new", version_ratio=2.0),
        CauseKind.SLOW_VERSION,
        "sha256:new",
    ),
    "outputs": (Metric.TOTAL, USUAL.with_tenant("cleo", output=(50, 70)), CauseKind.OUTPUTS_GREW, "cleo"),
    "reader": (Metric.TOTAL, USUAL.with_tenant("rita", pause_s=0.3), CauseKind.READER_STALLED, "rita"),
    "log": (Metric.TTFT, replace(USUAL, log_s={"gateway-0": 0.08}), CauseKind.LOG_DISK_SLOW, "gateway-0"),
    "overtaken": (Metric.TTFT, USUAL.with_tenant("iris", per_s=24.0), CauseKind.PREEMPTED, "standard"),
    "arrivals": (Metric.TTFT, USUAL.with_tenant("cleo", per_s=60.0), CauseKind.ARRIVALS_GREW, "cleo"),
    "capacity": (Metric.TTFT, replace(USUAL, workers=1), CauseKind.CAPACITY_LOST, "chat"),
}
QUIET = {
    "nothing-ttft": (Metric.TTFT, USUAL),
    "nothing-itl": (Metric.ITL, USUAL),
    "nothing-total": (Metric.TOTAL, USUAL),
    "a-tenant-comes": (Metric.TTFT, USUAL.with_tenant("theo", per_s=1.0)),
    "a-tenant-goes": (Metric.TTFT, USUAL.with_tenant("dora", per_s=0.0)),
    "traffic-drifts": (Metric.TOTAL, USUAL.with_tenant("cleo", per_s=2.8)),
    "an-equal-version": (Metric.ITL, replace(USUAL, version="sha256:new")),
    "prompts-drift": (Metric.TTFT, USUAL.with_tenant("ann", prompt=(90, 170))),
}


def evidence(
    requests: Sequence[FinishedRequest], span: tuple[float, float], moments: Sequence[FleetMoment] = ()
) -> Evidence:
    return Evidence(*span, samples_of(requests, ZONES), moments)


@cache
def usual(seed: int) -> tuple[FinishedRequest, ...]:
    return tuple(drawn(USUAL, BASELINE_S[0], 40.0, seed))


@cache
def window_of(world: str, seed: int) -> tuple[FinishedRequest, ...]:
    found = CAUSES[world][1] if world in CAUSES else QUIET[world][1]
    return tuple(drawn(found, WINDOW_S[0], 30.0, seed + 7777))


def diagnosed(world: str, seed: int, metric: Metric, tenant: str = "") -> Diagnosis:
    baseline = evidence(usual(seed), BASELINE_S)
    return diagnose(baseline, evidence(window_of(world, seed), WINDOW_S), metric=metric, tenant=tenant)


@pytest.mark.parametrize("name", CAUSES)
def test_a_planted_cause_is_named_first(name: str) -> None:
    metric, _, kind, subject = CAUSES[name]
    found = diagnosed(name, 1, metric)
    assert [(one.kind, one.subject) for one in found.causes][:1] == [(kind, subject)], found.tree
    cause = found.causes[0]
    assert found.verdict is DiagnosisVerdict.CAUSE_FOUND
    assert cause.score > 0.3
    assert cause.evidence
    assert cause.next
    assert cause.counterfactual_s == pytest.approx(found.window_s - cause.share_s)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("tenant", ["", "ann"])
@pytest.mark.parametrize("name", QUIET)
def test_a_quiet_window_accuses_nobody(name: str, tenant: str, seed: int) -> None:
    found = diagnosed(name, seed, QUIET[name][0], tenant)
    assert found.causes == ()
    assert found.verdict is DiagnosisVerdict.NO_CAUSE_FOUND


def test_a_bad_window_split_at_random_accuses_nobody() -> None:
    """What is unusual in both times alike explains no change between them."""
    requests = list(window_of("prompts", 1))
    Random(3).shuffle(requests)
    parts = [evidence(half, WINDOW_S) for half in (requests[::2], requests[1::2])]
    assert diagnose(parts[0], parts[1]).causes == ()


def test_rows_of_many_widths_fragment_the_buckets() -> None:
    one = evidence(drawn_rows([128], 24, BASELINE_S[0], 40.0, 1), BASELINE_S)
    many = evidence(drawn_rows(range(4, 252), 24, WINDOW_S[0], 30.0, 2), WINDOW_S)
    found = diagnose(one, many, metric=Metric.TOTAL)
    assert [(cause.kind, cause.subject) for cause in found.causes] == [("buckets_fragmented", "embed")]
    same = evidence(drawn_rows([128], 24, WINDOW_S[0], 30.0, 2), WINDOW_S)
    assert diagnose(one, same, metric=Metric.TOTAL).causes == ()


def test_a_version_that_loads_beside_is_named_with_the_worker() -> None:
    world = replace(USUAL, worker_ratio={"worker-1": 3.0})
    requests = drawn(world, WINDOW_S[0], 30.0, 5)
    loads = [FleetMoment(WINDOW_S[0] + at, ("worker-1",)) for at in range(0, 30, 2)]
    calm = [FleetMoment(BASELINE_S[0] + at) for at in range(0, 40, 2)]
    found = diagnose(
        evidence(usual(5), BASELINE_S, calm), evidence(requests, WINDOW_S, loads), metric=Metric.ITL
    )
    assert (CauseKind.VERSION_LOAD, "worker-1") in [(one.kind, one.subject) for one in found.causes[:2]]


def test_moments_without_the_only_replica_count_as_lost_capacity() -> None:
    calm = [FleetMoment(BASELINE_S[0] + at, ready={"chat": 1}) for at in range(0, 40, 2)]
    gone = [FleetMoment(WINDOW_S[0] + at, ready={"chat": 1} if at < 16 else {}) for at in range(0, 32, 2)]
    found = compare(
        "chat",
        Metric.TTFT,
        0.95,
        evidence(usual(5), BASELINE_S, calm),
        evidence(window_of("capacity", 5), WINDOW_S, gone),
    )
    (lost,) = (one for one in DemandSuspects(found).suspects() if one.kind is CauseKind.CAPACITY_LOST)
    assert lost.evidence == ("1 replicas served on average, then 0.5: 0.5 fewer",)


def test_what_grows_while_latency_does_not_is_no_cause() -> None:
    """A tenant that sends more while something else slows all down is not accused of it."""
    world = replace(USUAL.with_tenant("dora", per_s=2.5), admit_s=0.05)
    found = diagnose(evidence(usual(1), BASELINE_S), evidence(drawn(world, WINDOW_S[0], 30.0, 9), WINDOW_S))
    assert [(one.kind, one.subject) for one in found.causes] == [("quota_store_slow", "redis")]


def test_requests_without_prompt_tokens_are_compared_like_any() -> None:
    """A mean of 0 tokens in both times is no growth, and divides nothing."""
    sides = [
        [structs.replace(one, usage=Usage(0, one.usage.output_tokens)) for one in requests]
        for requests in (usual(1), window_of("redis", 1))
    ]
    found = diagnose(evidence(sides[0], BASELINE_S), evidence(sides[1], WINDOW_S))
    assert [(one.kind, one.subject) for one in found.causes][:1] == [("quota_store_slow", "redis")]


def test_loaded_hosts_are_no_slow_store() -> None:
    """Admission that takes as many times as long as what processors alone do has no slow store."""

    def loaded(one: FinishedRequest) -> FinishedRequest:
        clock = structs.replace(
            one.clock, validate_us=40 * one.clock.validate_us, admit_us=40 * one.clock.admit_us
        )
        return structs.replace(one, clock=clock)

    window = [loaded(one) for one in window_of("nothing-ttft", 1)]
    found = diagnose(evidence(usual(1), BASELINE_S), evidence(window, WINDOW_S))
    assert found.verdict is DiagnosisVerdict.NO_CAUSE_FOUND
    assert found.window_s > 2 * found.baseline_s


def test_all_zones_slow_alike_are_no_suspects() -> None:
    world = replace(USUAL, zone_delay_s={"a": 0.06, "b": 0.06})
    window = evidence(drawn(world, WINDOW_S[0], 30.0, 9), WINDOW_S)
    found = compare("chat", Metric.TTFT, 0.95, evidence(usual(1), BASELINE_S), window)
    assert found.after_s > 2 * found.before_s
    assert CauseKind.ZONE_NETWORK_SLOW not in [one.kind for one in suspects_of(found)]


def test_a_certain_rise_that_is_small_is_not_diagnosed() -> None:
    def slower(one: FinishedRequest) -> FinishedRequest:
        stages = [round(1.15 * each) for each in structs.astuple(one.clock)[1:]]
        return structs.replace(one, clock=StageClock(one.clock.received_unix_us + 50_000_000, *stages))

    window = evidence([slower(one) for one in usual(1)], (1050.0, 1090.0))
    found = diagnose(evidence(usual(1), BASELINE_S), window)
    assert found.window_s == pytest.approx(1.15 * found.baseline_s, rel=0.01)
    assert found.message.startswith("the latency of chat did not rise beyond chance and 1.2 times")


@pytest.mark.parametrize(("chance", "accused"), [(0.005, False), (1e-5, True)])
def test_many_suspects_share_one_chance_of_a_false_accusation(
    chance: float, accused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_suspect(found: TwoTimes) -> Iterator[Suspect]:
        nothing = np.zeros(len(found.window.samples))
        weights = found.window.samples.weight
        yield Suspect(CauseKind.SLOW_WORKER, "worker-9", nothing, weights, (), (nothing, nothing), chance)

    monkeypatch.setattr(diagnosis, "suspects_of", one_suspect)
    found = diagnosed("redis", 1, Metric.TTFT)
    assert ("worker-9" in [one.subject for one in found.causes]) is accused


@pytest.mark.parametrize("metric", Metric)
def test_stages_sum_to_the_change_exactly(metric: Metric) -> None:
    found = diagnosed("prompts", 1, metric)
    change = found.window_s - found.baseline_s
    assert sum(one.window_s for one in found.stages) == pytest.approx(found.window_s, rel=1e-9)
    assert sum(one.baseline_s for one in found.stages) == pytest.approx(found.baseline_s, rel=1e-9)
    assert sum(one.share for one in found.stages) == pytest.approx(1.0 if change else 0.0)


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("world", ["prompts", "reader", "version"])
def test_parts_of_a_request_sum_to_its_latency(metric: Metric, world: str) -> None:
    table = samples_of(window_of(world, 1), ZONES)
    parts = parts_of(table, metric, fit_prices(samples_of(usual(1), ZONES)))
    assert parts.total == pytest.approx(table.metric(metric), abs=1e-9)


def test_prices_of_steps_are_those_that_were_drawn() -> None:
    prices = fit_prices(samples_of(usual(1), ZONES))
    assert prices.step_s == pytest.approx(draws.STEP_S, rel=0.1)
    assert prices.prefill_s == pytest.approx(draws.PREFILL_S, rel=0.2)


def test_a_slow_worker_in_the_baseline_does_not_shift_the_prices() -> None:
    slow = drawn(replace(USUAL, worker_ratio={"worker-1": 3.0}), BASELINE_S[0], 40.0, 4)
    assert fit_prices(samples_of(slow, ZONES)).step_s == pytest.approx(draws.STEP_S, rel=0.15)


@pytest.mark.parametrize("requests", [0, 10])
def test_too_few_requests_are_said(requests: int) -> None:
    window = evidence(window_of("prompts", 1)[:requests], WINDOW_S)
    found = diagnose(evidence(usual(1), BASELINE_S), window)
    assert found.verdict is DiagnosisVerdict.NOT_ENOUGH_TRAFFIC
    assert found.message.startswith(f"the window has {requests} sampled requests")
    empty = diagnose(window, evidence(usual(1), BASELINE_S), model="chat")
    assert empty.message.startswith(f"the baseline has {requests} sampled requests of chat")


def test_failed_requests_have_no_latency() -> None:
    failed = [structs.replace(one, reason="QUEUE_FULL") for one in usual(1)]
    assert len(samples_of(failed, {})) == 0


# --- statistics --------------------------------------------------------------------------------------


def test_a_quantile_is_the_sum_of_its_parts() -> None:
    rng = np.random.default_rng(1)
    parts = rng.exponential(size=(400, 5))
    values, weights = parts.sum(axis=1), rng.uniform(0.5, 2.0, 400)
    found = allocated(values, weights, 0.95, parts)
    assert found.sum() == pytest.approx(quantile(values, weights, 0.95), rel=1e-12)
    assert quantile(values, weights, 0.95) == pytest.approx(np.quantile(values, 0.95), rel=0.1)
    assert quantile(np.zeros(0), np.zeros(0), 0.5) == 0.0


def test_chances_are_uniform_without_a_change_and_small_with_one() -> None:
    rng = np.random.default_rng(2)
    chances = [rises(rng.normal(size=14), rng.normal(size=12)) for _ in range(2000)]
    for level in (0.01, 0.05, 0.5):
        assert np.mean(np.array(chances) < level) == pytest.approx(level, abs=0.25 * level + 0.01)
    assert rises(np.arange(12.0), np.arange(20.0, 32.0)) < 1e-4
    assert rises(np.arange(20.0, 32.0), np.arange(12.0)) > 0.99
    assert rises(np.zeros(12), np.zeros(12)) == 1.0
    assert rises(np.zeros(0), np.ones(3)) == 1.0


def test_the_span_that_differs_is_found_and_its_chance_is_calibrated() -> None:
    rng = np.random.default_rng(3)
    for sizes, edges in (((20, 15), [20]), ((20, 8, 20), [20, 28])):
        parts = [rng.normal(6 * (place == 1), 1, size=size) for place, size in enumerate(sizes)]
        found = change_points(np.concatenate(parts), 0.001)
        assert found == pytest.approx(edges, abs=1)
    assert unlike_span(np.ones(40))[2] == 1.0
    assert unlike_span(np.arange(7.0))[2] == 1.0
    for size in (20, 60, 120):
        chances = [unlike_span(rng.normal(size=size))[2] for _ in range(1000)]
        assert np.mean(np.array(chances) < 0.05) <= 0.07


def _joined(*parts: Sequence[FinishedRequest]) -> RequestTable:
    return samples_of([one for part in parts for one in part], ZONES)


def test_a_window_begins_where_the_latency_rose() -> None:
    before = drawn(USUAL, 1000.0, 60.0, 1)
    bad = drawn(replace(USUAL, admit_s=0.05), 1060.0, 30.0, 2)
    found = change_in(_joined(before, bad), Metric.TTFT, 0.95, 1000.0, 1090.0)
    assert found is not None
    assert found[:2] == pytest.approx((1060.0, 1090.0), abs=4.0)
    assert change_in(_joined(before), Metric.TTFT, 0.95, 1000.0, 1060.0) is None
    # A fall is no rise.
    good = drawn(USUAL, 1090.0, 60.0, 3)
    assert change_in(_joined(bad, good), Metric.TTFT, 0.95, 1060.0, 1150.0) is None


def _of_model(requests: Sequence[FinishedRequest], model: str, times: float) -> list[FinishedRequest]:
    """Return requests whose stages take so many times as long."""

    def one(request: FinishedRequest) -> FinishedRequest:
        stages = [round(times * each) for each in structs.astuple(request.clock)[1:]]
        late_us = request.ended_unix_us - request.clock.received_unix_us - sum(stages)
        return structs.replace(
            request, model=model, clock=StageClock(request.clock.received_unix_us + late_us, *stages)
        )

    return [one(request) for request in requests]


@pytest.mark.parametrize("times", [1.0, 0.5])
def test_a_rise_is_found_though_a_fall_follows(times: float) -> None:
    """The window ends with it: what is usual again would hide what rose."""
    parts = (
        drawn(USUAL, 1000.0, 40.0, 1),
        drawn(replace(USUAL, admit_s=0.05), 1040.0, 40.0, 2),
        _of_model(drawn(USUAL, 1080.0, 40.0, 3), "chat", times),
    )
    found = change_in(_joined(*parts), Metric.TTFT, 0.95, 1000.0, 1120.0)
    assert found is not None
    assert found == pytest.approx((1040.0, 1080.0, 1000.0), abs=4.0)


@pytest.mark.parametrize(("calm_s", "bad_s", "after_s"), [(1500, 600, 1500), (3240, 360, 0)])
def test_minutes_of_an_hour_are_found_in_its_middle_and_at_its_end(
    calm_s: int, bad_s: int, after_s: int
) -> None:
    few = {name: replace(habits, per_s=habits.per_s / 10) for name, habits in USUAL.tenants.items()}
    calm, bad = replace(USUAL, tenants=few), replace(USUAL, tenants=few, admit_s=0.05)
    begin_s, end_s, found = 1000.0 + calm_s, 1000.0 + calm_s + bad_s, 0
    for seed in range(0, 15, 3):
        table = _joined(
            drawn(calm, 1000.0, calm_s, seed),
            drawn(bad, begin_s, bad_s, seed + 1),
            drawn(calm, end_s, after_s, seed + 2) if after_s else (),
        )
        rise = change_in(table, Metric.TTFT, 0.95, 1000.0, 4600.0)
        found += rise is not None and rise[:2] == pytest.approx((begin_s, end_s), abs=120.0)
    assert found >= 4


@pytest.mark.parametrize("sizes", [(10, 12, 38), (8, 12, 40), (15, 20, 25)])
def test_a_rise_that_first_overshoots_lasts_to_the_end(sizes: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(5)
    parts = [rng.normal(ms, 0.05 * ms, size) for ms, size in zip((10, 23, 20), sizes, strict=True)]
    found = levels(np.concatenate(parts), 0.01)
    assert [place for place, _ in found] == pytest.approx([0, sizes[0], sizes[0] + sizes[1]], abs=1)
    assert [level for _, level in found] == pytest.approx([10, 23, 20], rel=0.05)
    slow = [replace(USUAL, admit_s=admit_s) for admit_s in (0.06, 0.05)]
    begin, end = 1000.0 + 2.0 * sizes[0], 1000.0 + 2.0 * (sizes[0] + sizes[1])
    table = _joined(
        drawn(USUAL, 1000.0, begin - 1000.0, 1),
        drawn(slow[0], begin, end - begin, 2),
        drawn(slow[1], end, 1120.0 - end, 3),
    )
    rise = change_in(table, Metric.TTFT, 0.95, 1000.0, 1120.0)
    assert rise is not None
    assert rise == pytest.approx((begin, 1120.0, 1000.0), abs=4.0)


def test_the_baseline_of_a_second_incident_begins_after_the_first() -> None:
    bad = replace(USUAL, admit_s=0.05)
    parts = [
        drawn(world, 1000.0 + 40.0 * at, 40.0, at) for at, world in enumerate((USUAL, bad, USUAL, bad, USUAL))
    ]
    found = change_in(_joined(*parts), Metric.TTFT, 0.95, 1000.0, 1200.0)
    assert found is not None
    assert found == pytest.approx((1120.0, 1160.0, 1080.0), abs=4.0)


def test_more_requests_of_equal_latency_are_no_rise() -> None:
    rng, found = np.random.default_rng(6), 0
    one = drawn(USUAL, 1000.0, 5.0, 1)[0]
    for _ in range(20):
        times = [1000.0 + at for at in range(3600) if rng.random() < (0.1 if at < 1800 else 1.0)]
        late = [_of_model([one], "chat", rng.lognormal(0.0, 0.6))[0] for _ in times]
        moved = [_ending(request, ended_s) for request, ended_s in zip(late, times, strict=True)]
        found += change_in(_joined(moved), Metric.TOTAL, 0.95, 1000.0, 4600.0) is not None
    assert found <= 1


def _ending(request: FinishedRequest, ended_s: float) -> FinishedRequest:
    late_us = round(1e6 * ended_s) - request.ended_unix_us
    moved = structs.replace(request.clock, received_unix_us=request.clock.received_unix_us + late_us)
    return structs.replace(request, clock=moved)


def test_a_rise_below_the_quantile_of_a_slower_model_is_found() -> None:
    before, after = drawn(USUAL, 1000.0, 60.0, 1), drawn(USUAL, 1060.0, 30.0, 2)
    slow = _of_model(drawn(USUAL, 1000.0, 90.0, 3), "slow", 9.0)
    mixed = _joined(before, _of_model(after, "chat", 2.0), slow)
    found = change_in(mixed, Metric.TTFT, 0.95, 1000.0, 1090.0)
    assert found is not None
    assert found[:2] == pytest.approx((1060.0, 1090.0), abs=4.0)


def test_requests_of_one_token_do_not_hide_a_rise_of_itl() -> None:
    before, after = drawn(USUAL, 1000.0, 60.0, 1), drawn(USUAL, 1060.0, 30.0, 2)
    rows = [
        structs.replace(one, usage=Usage(9, 1))
        for seed in range(8)
        for one in drawn(USUAL, 1000.0, 90.0, 3 + seed)
    ]
    mixed = _joined(before, _of_model(after, "chat", 2.0), rows)
    found = change_in(mixed, Metric.ITL, 0.5, 1000.0, 1090.0)
    assert found is not None
    assert found[:2] == pytest.approx((1060.0, 1090.0), abs=4.0)


def test_a_rate_is_per_second_of_what_samples_cover() -> None:
    """Two parts of a baseline, a day apart, with traffic as in the window."""
    day_s = 86400.0
    parts = drawn(USUAL, 1000.0, 40.0, 1), drawn(USUAL, 1000.0 + day_s, 40.0, 2)
    spans = (1000.0, 1040.0), (1000.0 + day_s, 1040.0 + day_s)
    baseline = Evidence(1000.0, 1040.0 + day_s, _joined(*parts), covered=spans)
    window = evidence(drawn(USUAL, 2000.0 + day_s, 30.0, 3), (2000.0 + day_s, 2030.0 + day_s))
    found = compare("chat", Metric.TTFT, 0.95, baseline, window)
    rates = found.both(lambda side, mask: side.rate(mask), found.everyone)
    assert rates[0] == pytest.approx(rates[1], rel=0.15)
    buckets = found.rates(found.everyone)
    assert len(buckets[0]) == 2 * 16
    assert buckets[0].mean() == pytest.approx(rates[0], rel=0.05)
    assert rises(*buckets) > 0.01
