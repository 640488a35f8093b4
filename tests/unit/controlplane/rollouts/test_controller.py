"""What a shadow's copies are judged by: what the class in which they run does not change."""

from __future__ import annotations

import pytest

from services.controlplane.objectives.policy.gates import GateMetric, Verdict
from services.controlplane.rollouts.controller import judged
from services.controlplane.rollouts.records import Rollout, RolloutPhase, RolloutStrategy
from services.core.arms import ArmWindow
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
        ({"device_s": 20.0}, GateMetric.COST),
    ],
)
def test_copies_that_fail_or_cost_more_are_a_regression(
    changes: dict[str, float], metric: GateMetric
) -> None:
    assert verdicts(arm(25, **changes))[metric] == (Verdict.FAIL, True)


def test_the_cost_counts_by_the_copies_that_were_made() -> None:
    """Half of the copies were left out for want of capacity: the replicas had smaller batches."""
    few = arm(12, tokens=500, output_tokens=250)
    assert verdicts(few)[GateMetric.COST] == (Verdict.FAIL, False)
    assert verdicts(few, replicas=1)[GateMetric.COST] == (Verdict.FAIL, True)
