"""What candidates, copies and soaks are judged by: what load, class and time do not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.controlplane.objectives.policy.gates import PACK_BOUNDS, GateMetric, Verdict
from services.controlplane.rollouts.controller import RolloutController, gate_plan, judged
from services.controlplane.rollouts.policy.effects import load_ratio, replicas_for_weight, route_of
from services.controlplane.rollouts.records import (
    GateSettings,
    Rollout,
    RolloutPhase,
    RolloutStrategy,
    with_defaults,
)
from services.core.arms import ArmKey, ArmWindow, GateWindow
from services.core.records import BurnAlert, Priority, Sli
from services.core.rollouts.routes import WHOLE_BP, ModelRoute, RouteArm, Shadow
from tests.unit.controlplane.objectives.policy.test_gates import window
from tests.unit.controlplane.policy.test_update import NEW, OLD
from tests.unit.controlplane.rollouts.policy.driven import rollout


def arm(requests: int = 25, **changes: float) -> ArmWindow:
    """Return what an arm served."""
    counts = {"tokens": 1000, "device_s": 10.0, "output_tokens": 500, **changes}
    return window(40, requests, **counts)


def shadow() -> Rollout:
    return rollout(RolloutStrategy.SHADOW, shadow=Shadow("canary", WHOLE_BP), phase=RolloutPhase.RUNNING)


def verdicts(copies: ArmWindow, *, replicas: int = 2) -> dict[GateMetric, tuple[Verdict, bool]]:
    """Return verdict and whether it counts, by metric."""
    arms = (RouteArm("stable", OLD, WHOLE_BP, 2), RouteArm("canary", NEW, 0, replicas))
    route = ModelRoute("d", "salt", arms, shadow=Shadow("canary", WHOLE_BP), step="r/0")
    report = judged(shadow(), route, {OLD: arm(), NEW: copies})["canary"]
    return {one.metric: (one.verdict, one.counted) for one in report.evidence}


def slower() -> ArmWindow:
    found = arm()
    for sums in found.clusters.values():
        sums.ttft.clear()
        sums.ttft_of(3).add(1.0, 25)
    return found


def test_latencies_count_while_a_replica_has_no_more_load_than_a_stable_one() -> None:
    found = {}
    for replicas in (1, 2):
        arms = (RouteArm("stable", OLD, 5000, 2), RouteArm("canary", NEW, 5000, replicas))
        canary = rollout(phase=RolloutPhase.RUNNING, step=3)
        report = judged(canary, ModelRoute("d", "salt", arms, step="r/3"), {OLD: arm(), NEW: slower()})
        found[replicas] = {
            one.metric: one.counted for one in report["canary"].evidence if one.verdict is Verdict.FAIL
        }
    assert found == {1: {GateMetric.TTFT_P95: False}, 2: {GateMetric.TTFT_P95: True}}


def test_copies_that_wait_longer_are_no_regression() -> None:
    assert verdicts(slower())[GateMetric.TTFT_P95] == (Verdict.FAIL, False)


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"errors": 5}, GateMetric.ERROR_RATIO),
        ({"broken": 5}, GateMetric.BROKEN_RATIO),
        ({"output_tokens": 100}, GateMetric.OUTPUT_LENGTH),
        ({"device_s": 30.0}, GateMetric.COST),
    ],
)
def test_copies_that_fail_or_cost_more_are_a_regression(
    changes: dict[str, float], metric: GateMetric
) -> None:
    assert verdicts(arm(25, **changes))[metric] == (Verdict.FAIL, True)


def test_the_cost_of_copies_counts_from_twice_that_of_the_originals() -> None:
    assert verdicts(arm(25, device_s=17.0))[GateMetric.COST] == (Verdict.PASS, True)


def test_the_cost_counts_by_the_copies_that_were_made() -> None:
    """Half of the copies were left out for want of capacity: the replicas had smaller batches."""
    few = arm(12, tokens=500, output_tokens=250, device_s=15.0)
    assert verdicts(few)[GateMetric.COST] == (Verdict.FAIL, False)
    assert verdicts(few, replicas=1)[GateMetric.COST] == (Verdict.FAIL, True)


@pytest.mark.parametrize(("interventions", "verdict"), [(1, Verdict.PASS), (5, Verdict.FAIL)])
def test_a_safety_pack_is_judged_by_its_interventions_without_workers_to_compare(
    interventions: int, verdict: Verdict
) -> None:
    arms = (RouteArm("stable", OLD, 9_900, 0), RouteArm("canary", NEW, 100, 1))
    route = ModelRoute("strict", "salt", arms, step="r/0")
    canary = with_defaults(rollout(phase=RolloutPhase.RUNNING), of_pack=True)
    windows = {OLD: arm(100, interventions=1), NEW: arm(100, interventions=interventions)}
    found = {one.metric: one for one in judged(canary, route, windows)["canary"].evidence}
    assert tuple(found) == tuple(PACK_BOUNDS)
    assert (found[GateMetric.INTERVENTION_RATE].verdict, found[GateMetric.INTERVENTION_RATE].counted) == (
        verdict,
        True,
    )
    assert (found[GateMetric.COST].verdict, found[GateMetric.COST].counted) == (Verdict.PASS, True)
    named = replace(canary, gate=GateSettings(metrics=(GateMetric.COST,)))
    assert with_defaults(named, of_pack=True).gate.metrics == (GateMetric.COST,), "an operator's stay"


def itl(seconds: float, requests: int = 25, **changes: float) -> ArmWindow:
    """Return an arm whose tokens came that far apart."""
    found = arm(requests, **changes)
    for sums in found.clusters.values():
        sums.itl.add(seconds, 10 * requests)
    return found


@pytest.mark.parametrize("replicas", range(2, 9))
@pytest.mark.parametrize(("step", "weight_bp"), [(0, 100), (1, 500), (2, 2500), (3, 5000)])
@pytest.mark.parametrize("costly", [False, True])
def test_the_cost_counts_from_the_first_step_whatever_replicas(
    replicas: int, step: int, weight_bp: int, *, costly: bool
) -> None:
    """Batches of fewer sequences have larger shares: they cost no more, and steps that last longer do."""
    needed = replicas_for_weight(weight_bp, replicas)
    arms = (
        RouteArm("stable", OLD, WHOLE_BP - weight_bp, replicas),
        RouteArm("canary", NEW, weight_bp, needed),
    )
    route = ModelRoute("d", "salt", arms, step=f"r/{step}")
    load = load_ratio(route, "canary")
    of_step = 2.0 if costly else 1.0
    candidate = itl(0.02 * of_step, device_s=10.0 * of_step / (load if load < 0.8 else 1.0))
    canary = rollout(phase=RolloutPhase.RUNNING, step=step, gate=GateSettings(metrics=(GateMetric.COST,)))
    found = judged(canary, route, {OLD: itl(0.02), NEW: candidate})["canary"]
    (cost,) = found.evidence
    assert (found.verdict, cost.counted) == (Verdict.FAIL if costly else Verdict.PASS, True), load


def soak(candidate: ArmWindow, *, before_s: float, soak_s: float) -> dict[GateMetric, tuple[Verdict, bool]]:
    """Return verdict and whether it counts, by metric, of all traffic after that of the stable version."""
    green = rollout(RolloutStrategy.BLUE_GREEN, phase=RolloutPhase.SOAKING, baseline="r/loading", salt="r")

    class Slis:
        def arms_of(self, window: GateWindow) -> dict[str, ArmWindow]:
            return {"r/loading": {OLD: itl(0.02)}, "r/soaking": {NEW: candidate}}[window.step]

        def lasted_s(self, window: GateWindow) -> float:
            return {"r/loading": before_s, "r/soaking": soak_s}[window.step]

        def counting_s(self) -> float:
            return 60.0

        def arm_alerts(self, arm: ArmKey, since_unix_s: float) -> dict[tuple[Priority, Sli], BurnAlert]:
            return {}

    unused: Any = None
    controller = RolloutController(unused, unused, unused, unused, slis=Slis())
    report = controller.reports(green, route_of(green, 2))["canary"]
    return {one.metric: (one.verdict, one.counted) for one in report.evidence}


FAULTS = [
    ({"errors": 5}, GateMetric.ERROR_RATIO),
    ({"broken": 5}, GateMetric.BROKEN_RATIO),
    ({"output_tokens": 100}, GateMetric.OUTPUT_LENGTH),
    ({"device_s": 20.0}, GateMetric.COST),
]


@pytest.mark.parametrize(("changes", "metric"), FAULTS)
def test_a_soak_is_judged_by_what_the_stable_version_did_before_it(
    changes: dict[str, Any], metric: GateMetric
) -> None:
    found = soak(itl(0.02, **changes), before_s=60.0, soak_s=60.0)
    assert [one for one, (verdict, counts) in found.items() if verdict is Verdict.FAIL and counts] == [metric]


def test_a_version_like_the_stable_one_does_not_fail_its_soak() -> None:
    found = soak(itl(0.02), before_s=60.0, soak_s=60.0)
    assert Verdict.FAIL not in {verdict for verdict, _ in found.values()}
    assert found[GateMetric.COST] == (Verdict.PASS, True)


def test_latencies_of_a_soak_do_not_count_with_more_traffic_than_before() -> None:
    slow = itl(0.03)
    assert soak(slow, before_s=60.0, soak_s=60.0)[GateMetric.ITL_P95] == (Verdict.FAIL, True)
    assert soak(slow, before_s=60.0, soak_s=40.0)[GateMetric.ITL_P95] == (Verdict.FAIL, False)
    assert soak(slow, before_s=40.0, soak_s=60.0)[GateMetric.ITL_P95] == (Verdict.FAIL, True)


@pytest.mark.parametrize(
    ("strategy", "gates"),
    [(RolloutStrategy.CANARY, 5), (RolloutStrategy.BLUE_GREEN, 1), (RolloutStrategy.INSTANT, 1)],
)
def test_the_soak_shares_the_false_alarms_of_the_rollout(strategy: RolloutStrategy, gates: int) -> None:
    assert gate_plan(rollout(strategy), 1.0).gates == gates
    assert gate_plan(shadow(), 1.0).gates == 1
