"""Whether a rollout's terms make sense, and its defaults. Pure."""

from __future__ import annotations

from dataclasses import replace

from services.controlplane.rollouts.records import (
    DEFAULT_STEPS,
    STABLE,
    Rollout,
    RolloutStrategy,
)
from services.core.errors import InvalidInput
from services.core.rollouts.routes import WHOLE_BP

MAX_STEPS = 32
MAX_ARMS = 4


def with_defaults(rollout: Rollout) -> Rollout:
    """Return it with the steps of its strategy, and the last one at all traffic."""
    if rollout.strategy is RolloutStrategy.CANARY:
        return replace(rollout, steps=rollout.steps or DEFAULT_STEPS)
    return rollout


def check_by_worker(rollout: Rollout, replicas: int) -> str:
    """Return why a rollout cannot go worker by worker, empty if it can."""
    if rollout.strategy is not RolloutStrategy.CANARY:
        return "only a canary goes worker by worker: the workers follow its steps"
    if replicas < 2:
        return "worker by worker needs two replicas: the only one would stop to serve"
    if len(rollout.steps) > MAX_STEPS:
        return f"worker by worker, {replicas} replicas need more than {MAX_STEPS} steps"
    return ""


def check_rollout(rollout: Rollout) -> None:
    """Return for terms that can be carried out. Raises InvalidInput that names the field."""
    names = [arm.name for arm in rollout.arms]
    if not names or len(names) > MAX_ARMS:
        raise InvalidInput(f"a rollout has 1 to {MAX_ARMS} arms beside the stable one", field="rollout.arms")
    if STABLE in names or len(set(names)) != len(names):
        raise InvalidInput(f"arms have names of their own, other than {STABLE}", field="rollout.arms")
    if rollout.strategy is not RolloutStrategy.AB and len(names) != 1:
        raise InvalidInput(f"a {rollout.strategy} rollout has one arm", field="rollout.arms")
    _check_weights(rollout)
    _check_rules(rollout, names)
    if (rollout.strategy is RolloutStrategy.SHADOW) != (rollout.shadow is not None):
        raise InvalidInput("a shadow rollout has a shadow, and no other has one", field="rollout.shadow")
    if rollout.shadow is not None and rollout.shadow.arm not in names:
        raise InvalidInput("the shadow names no arm", field="rollout.shadow.arm")
    for metric, reason in rollout.gate.accepted.items():
        if not reason.strip():
            raise InvalidInput(
                "an accepted metric needs a reason", field="rollout.gate.accepted", metric=metric
            )


def _check_weights(rollout: Rollout) -> None:
    if rollout.strategy is RolloutStrategy.AB:
        total = sum(arm.weight_bp for arm in rollout.arms)
        if any(arm.weight_bp <= 0 for arm in rollout.arms) or total >= WHOLE_BP:
            raise InvalidInput(
                "the arms of an A/B test have weights above 0 that leave something to the stable one",
                field="rollout.arms",
            )
    elif any(arm.weight_bp for arm in rollout.arms):
        raise InvalidInput("only arms of an A/B test have weights", field="rollout.arms")
    weights = [step.weight_bp for step in rollout.steps]
    if rollout.strategy is not RolloutStrategy.CANARY and weights not in ([], [WHOLE_BP]):
        raise InvalidInput(f"a {rollout.strategy} rollout has one step, of 100 %", field="rollout.steps")
    if len(weights) > MAX_STEPS or weights != sorted(set(weights)) or any(bp <= 0 for bp in weights):
        raise InvalidInput(f"at most {MAX_STEPS} steps have growing weights above 0", field="rollout.steps")


def _check_rules(rollout: Rollout, names: list[str]) -> None:
    for tenant, arm in rollout.rules.overrides.items():
        if arm not in (STABLE, *names):
            raise InvalidInput(f"the override of {tenant} names no arm", field="rollout.rules.overrides")
