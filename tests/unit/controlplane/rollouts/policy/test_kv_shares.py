"""The KV that each arm gets beside the stable version, by strategy and phase."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.controlplane.rollouts.policy.effects import route_of
from services.controlplane.rollouts.records import (
    Rollout,
    RolloutArm,
    RolloutPhase,
    RolloutStep,
    RolloutStrategy,
)
from services.core.records import Meta
from services.core.rollouts.routes import Shadow

RUNNING, SOAKING = RolloutPhase.RUNNING, RolloutPhase.SOAKING
ARM = RolloutArm("canary", "v2", "sha256:2", 3000)
STEPS = (RolloutStep(500), RolloutStep(5000), RolloutStep(10_000))
CANARY = Rollout(
    Meta("r"), "d", RolloutStrategy.CANARY, (ARM,), STEPS, stable_digest="sha256:1", phase=RUNNING
)
GREEN = replace(CANARY, strategy=RolloutStrategy.BLUE_GREEN, steps=(), phase=RolloutPhase.LOADING)
SHADOW = replace(GREEN, strategy=RolloutStrategy.SHADOW, shadow=Shadow("canary", 4000), phase=RUNNING)


@pytest.mark.parametrize(
    ("rollout", "stable_bp", "arm_bp"),
    [
        (CANARY, 9500, 500),
        (replace(CANARY, preparing_unix_s=1.0), 5000, 5000),
        (replace(CANARY, step=2), 2500, 7500),
        (replace(CANARY, phase=SOAKING, step=2), 2500, 7500),
        (replace(CANARY, phase=RolloutPhase.ROLLING_BACK), 10_000, 0),
        (replace(CANARY, strategy=RolloutStrategy.AB), 7000, 3000),
        (GREEN, 5000, 5000),
        (replace(GREEN, phase=SOAKING), 2500, 7500),
        (SHADOW, 8000, 2000),
    ],
)
def test_kv_follows_the_traffic_that_comes(rollout: Rollout, stable_bp: int, arm_bp: int) -> None:
    route = route_of(rollout, 2)
    assert route is not None
    assert [arm.kv_bp for arm in route.arms] == [stable_bp, arm_bp]
