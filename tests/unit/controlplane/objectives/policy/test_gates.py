"""The gate finds regressions, and raises no alarm about equal arms whose requests come in sessions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.gates import STRICT
from bench.gating.noise import NONE, Regression, draw, independent, looks
from services.controlplane.objectives.policy.gates import (
    PACK_BOUNDS,
    GateMetric,
    GatePlan,
    GateReport,
    MetricBounds,
    Verdict,
    judge,
)
from services.core.arms import ArmWindow, SliSums

COUNTS = (100, 200, 400, 700, 1000)
HARSH = replace(STRICT, false_alarm_ratio=0.1, gates=1)


def alarms(gates: int, plan: GatePlan, *, mistaken: bool = False) -> int:
    """Return how many gates of equal arms fail."""
    found = 0
    for seed in range(gates):
        rng = np.random.default_rng(seed)
        arms = [draw(rng, 3 * COUNTS[-1], times=8), draw(rng, COUNTS[-1], times=8)]
        if mistaken:
            arms = [independent(rng, arm) for arm in arms]
        windows = zip(looks(arms[0], tuple(3 * one for one in COUNTS)), looks(arms[1], COUNTS), strict=True)
        found += any(judge(plan, *pair).verdict is Verdict.FAIL for pair in windows)
    return found


def report_of(regression: Regression, sessions: int, plan: GatePlan = GatePlan()) -> GateReport:  # noqa: B008
    rng = np.random.default_rng(7)
    (base,) = looks(draw(rng, 3 * sessions), (3 * sessions,))
    (other,) = looks(draw(rng, sessions, regression), (sessions,))
    return judge(plan, base, other)


def window(clusters: int = 40, requests: int = 25, **counts: float) -> ArmWindow:
    """Return equal clusters with many sessions each."""
    found = {}
    for number in range(clusters):
        sums = SliSums(requests=requests, started=requests, finished=requests, session_bits=0xFFFF)
        sums.ttft_of(3).add(0.1, requests)
        for name, value in counts.items():
            setattr(sums, name, value)
        found[number] = sums
    return ArmWindow(found)


@pytest.mark.sweep
def test_no_alarm_without_a_margin_however_often_one_looks() -> None:
    assert alarms(40, HARSH) <= 4


def test_requests_counted_as_independent_raise_too_many_alarms() -> None:
    """The planted mistake: the same arms, with a cluster for each request instead of each session."""
    assert alarms(40, HARSH, mistaken=True) > 8


@pytest.mark.parametrize(
    ("regression", "metric"),
    [
        (Regression(ttft=1.5), GateMetric.TTFT_P95),
        (Regression(itl=1.3), GateMetric.ITL_P95),
        (Regression(error_ratio=0.05), GateMetric.ERROR_RATIO),
        (Regression(cost=2.0), GateMetric.COST),
        (Regression(output=2.0), GateMetric.OUTPUT_LENGTH),
        (Regression(output=0.4), GateMetric.OUTPUT_LENGTH),
    ],
)
def test_a_regression_fails_by_its_metric(regression: Regression, metric: GateMetric) -> None:
    report = report_of(regression, 3000)
    assert report.verdict is Verdict.FAIL
    assert metric in report.failed


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [(30, 80, Verdict.FAIL), (30, 0, Verdict.FAIL), (30, 30, Verdict.PASS), (0, 0, Verdict.PASS)],
)
def test_a_pack_that_finds_much_more_or_much_less_fails(before: int, after: int, verdict: Verdict) -> None:
    plan = GatePlan({GateMetric.INTERVENTION_RATE: PACK_BOUNDS[GateMetric.INTERVENTION_RATE]})
    arms = [window(requests=250, interventions=count) for count in (before, after)]
    assert judge(plan, *arms).verdict is verdict


def test_equal_arms_pass() -> None:
    assert report_of(NONE, 4000).verdict is Verdict.PASS


def test_few_samples_are_not_judged() -> None:
    report = report_of(Regression(error_ratio=0.9), 20)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "candidate" in report.waits_for


def test_an_accepted_regression_is_shown_and_does_not_count() -> None:
    plan = GatePlan(accepted={GateMetric.COST: "twice the quality"})
    report = report_of(Regression(cost=2.0), 4000, plan)
    cost = next(one for one in report.evidence if one.metric is GateMetric.COST)
    assert cost.verdict is Verdict.FAIL
    assert (cost.counted, cost.accepted) == (False, "twice the quality")
    assert cost.ratio == pytest.approx(2.0, abs=0.2)
    assert report.verdict is Verdict.PASS


def test_errors_of_few_sessions_are_no_proof() -> None:
    base, other = window(), window()
    other.clusters[0].errors = 25
    assert judge(GatePlan(), base, other).failed == ()


def test_a_small_baseline_without_errors_is_proof() -> None:
    """Found by a rollout in one step: 4 % of 5,932 errors against 0 of 405 had a statistic of 3.7."""
    rng = np.random.default_rng(7)
    base, other = window(clusters=64, requests=6), window(clusters=64, requests=93)
    for sums in other.clusters.values():
        sums.errors = int(rng.binomial(93, 0.043))
    assert judge(GatePlan(), base, other).failed == (GateMetric.ERROR_RATIO,)


def test_a_small_baseline_may_have_missed_the_sessions_that_fail_as_a_whole() -> None:
    """Equal arms: sessions of five requests, of which 6 % fail with all of theirs."""

    def arm(rng: np.random.Generator, sessions: int) -> ArmWindow:
        failed, at = rng.random(sessions) < 0.06, rng.integers(0, 64, sessions)
        found = {int(one): SliSums(session_bits=0xFFFF) for one in at}
        for one, fails in zip(at, failed, strict=True):
            found[int(one)].requests += 5
            found[int(one)].errors += 5 * int(fails)
        return ArmWindow(found)

    plan = GatePlan(bounds={GateMetric.ERROR_RATIO: MetricBounds(0.0, 0.01)}, false_alarm_ratio=0.05)
    alarmed = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        alarmed += judge(plan, arm(rng, 60), arm(rng, 900)).verdict is Verdict.FAIL
    assert alarmed <= 4, "twice what one look may have"


@pytest.mark.parametrize("failing_of", [1.5, 2])
def test_a_candidate_that_fails_many_requests_fails_the_gate(failing_of: float) -> None:
    """Found by a simulated rollout: the bound grew with the candidate's own variance, which is largest at a
    half."""
    base, other, rng = window(requests=8), window(requests=3), np.random.default_rng(7)
    for sums in other.clusters.values():
        sums.errors = int(rng.binomial(3, 1 / failing_of))
        sums.started = sums.finished = 3 - sums.errors
    assert judge(GatePlan(gates=2), base, other).failed == (GateMetric.ERROR_RATIO,)


def test_fifty_requests_prove_a_candidate_that_fails_half_of_them() -> None:
    """Found by a simulated rollout: a bound tuned for an effect of one percent alone took hundreds."""
    base, other, rng = window(requests=7), window(clusters=24, requests=2), np.random.default_rng(7)
    for sums in other.clusters.values():
        sums.errors = int(rng.binomial(2, 0.5))
        sums.started = sums.finished = 2 - sums.errors
    plan = GatePlan(gates=3, min_requests=20, min_sessions=15)
    assert judge(plan, base, other).failed == (GateMetric.ERROR_RATIO,)


def test_a_candidate_that_fails_everything_fails_the_gate() -> None:
    other = window(errors=25, started=0, finished=0)
    for sums in other.clusters.values():
        sums.ttft.clear()
    report = judge(GatePlan(min_requests=50, min_sessions=20), window(), other)
    assert report.failed == (GateMetric.ERROR_RATIO,)
    ttft = next(one for one in report.evidence if one.metric is GateMetric.TTFT_P95)
    assert (ttft.candidate, ttft.verdict) == (None, Verdict.INCONCLUSIVE)


def test_what_the_baseline_does_not_measure_does_not_count() -> None:
    report = judge(GatePlan(), window(), window())
    counted = {one.metric for one in report.evidence if one.counted}
    assert GateMetric.COST not in counted
    assert GateMetric.ITL_P95 not in counted
    assert GateMetric.TTFT_P95 in counted


def test_fixed_latencies_need_few_requests() -> None:
    plan = GatePlan(bounds={GateMetric.TTFT_P95: MetricBounds(1.1, 1.3)}, min_requests=30, min_sessions=20)
    base, other = window(clusters=20, requests=3), window(clusters=20, requests=3)
    for sums in other.clusters.values():
        sums.ttft.clear()
        sums.ttft_of(3).add(0.15, 3)
    assert judge(plan, base, other).verdict is Verdict.FAIL
    assert judge(plan, base, base).verdict is not Verdict.FAIL
