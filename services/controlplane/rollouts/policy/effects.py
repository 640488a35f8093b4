"""What follows from a rollout's state: the route of its deployment, and the deployment's version. Pure.

Only the state changes in steps. Route and deployment are functions of it and are written in the same
transaction, so that no instant has a state without its split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from services.controlplane.policy.assign import KeptVersion
from services.controlplane.rollouts.records import (
    FULL,
    STABLE,
    Rollout,
    RolloutPhase,
    RolloutStrategy,
)
from services.core.records import Deployment
from services.core.rollouts.routes import WHOLE_BP, ModelRoute, RouteArm

# Traffic on a replica of a candidate over that on a stable one, up to which their latencies are compared.
MOST_LOAD_RATIO = 1.25
_STABLE_KV_BP = 2_500


def weights_of(rollout: Rollout) -> dict[str, int]:
    """Return the weights of the candidates, by name; absent: none."""
    if rollout.phase is RolloutPhase.SOAKING:
        return {rollout.final_arm.name: WHOLE_BP}
    if rollout.phase is not RolloutPhase.RUNNING:
        return {}
    if rollout.strategy is RolloutStrategy.AB:
        return {arm.name: arm.weight_bp for arm in rollout.arms}
    if rollout.strategy is RolloutStrategy.CANARY:
        return {rollout.final_arm.name: rollout.weight_bp}
    return {}


def replicas_of_arm(rollout: Rollout, name: str, replicas: int) -> int:
    """Return on how many workers an arm runs while ``replicas`` stable ones serve.

    The next step's replicas are loaded once the gate has passed: before, they would make the load of the
    arms' replicas unequal. Worker by worker, they replace some of the ``replicas``, and the last stays
    stable.
    """
    if rollout.by_worker:
        at_end = rollout.phase is RolloutPhase.SOAKING
        weight_bp = WHOLE_BP if at_end else weight_of_step(rollout, rollout.step + rollout.preparing)
        return replicas_by_worker(weight_bp, replicas)
    everything = rollout.phase is RolloutPhase.SOAKING or rollout.strategy in FULL
    if everything:
        return max(1, replicas) if name == rollout.final_arm.name else 1
    if rollout.strategy is RolloutStrategy.AB:
        arm, stable_bp = rollout.arm(name), WHOLE_BP - sum(one.weight_bp for one in rollout.arms)
        weight_bp = 0 if arm is None else arm.weight_bp
        return (
            max(1, replicas)
            if rollout.target == name
            else replicas_for_weight(weight_bp, replicas, stable_bp)
        )
    if rollout.strategy is RolloutStrategy.SHADOW:
        return replicas_for(0 if rollout.shadow is None else rollout.shadow.fraction_bp, replicas)
    return replicas_for_weight(_largest_weight(rollout), replicas)


def kv_bp_of(rollout: Rollout, name: str) -> int:
    """Return the share of traffic, in basis points, that sets an arm's part of the KV memory.

    It is the share of the present step, or of the next once that is prepared. Where all traffic changes at
    once, it is half; the stable version has a quarter until the rollout is final, so that a rollback finds
    room.
    """
    match rollout.strategy:
        case RolloutStrategy.AB:
            arm = rollout.arm(name)
            found = 0 if arm is None else arm.weight_bp
        case RolloutStrategy.SHADOW:
            found = 0 if rollout.shadow is None else rollout.shadow.fraction_bp // 2
        case RolloutStrategy.CANARY:
            found = _largest_weight(rollout)
        case _:
            found = WHOLE_BP // 2
    if rollout.phase is RolloutPhase.SOAKING or (rollout.target and name == rollout.target):
        found = WHOLE_BP if name == rollout.final_arm.name else 0
    return min(found, WHOLE_BP - _STABLE_KV_BP)


def replicas_for(weight_bp: int, replicas: int) -> int:
    """Return the replicas that serve a share of what ``replicas`` serve."""
    return max(1, math.ceil(replicas * weight_bp / WHOLE_BP))


def replicas_for_weight(weight_bp: int, replicas: int, stable_bp: int | None = None) -> int:
    """Return the replicas that serve a weight while ``replicas`` stable ones keep ``stable_bp``.

    A replica has at most ``MOST_LOAD_RATIO`` times the traffic of a stable one, as long as no more replicas
    than stable ones are needed for it. ``stable_bp`` None means the rest of the traffic.
    """
    rest_bp = WHOLE_BP - weight_bp if stable_bp is None else stable_bp
    if rest_bp <= 0:
        return max(1, replicas)
    return max(1, min(replicas, math.ceil(replicas * weight_bp / (rest_bp * MOST_LOAD_RATIO))))


def replicas_by_worker(weight_bp: int, replicas: int) -> int:
    """Return how many of ``replicas`` workers serve a share, where the stable version keeps one until the
    end.
    """
    return max(1, min(replicas - 1, replicas_for(weight_bp, replicas)))


def _largest_weight(rollout: Rollout) -> int:
    """Return the largest weight up to the present step, or to the next once that is prepared."""
    step = max(rollout.step + rollout.preparing, rollout.promote_to)
    return max((one.weight_bp for one in rollout.steps[: step + 1]), default=0)


def next_step_of(rollout: Rollout) -> int:
    """Return the step after the present one. Worker by worker, an operator skips no step."""
    return rollout.step + 1 if rollout.by_worker else max(rollout.step + 1, rollout.promote_to)


def weight_of_step(rollout: Rollout, step: int) -> int:
    """Return the candidate's traffic in a step, all of it after the last one, in basis points."""
    return rollout.steps[step].weight_bp if step < len(rollout.steps) else WHOLE_BP


def _weight_while_moving(rollout: Rollout, replicas: int) -> int:
    """Return the candidate's weight while a worker passes from the stable version to it. It follows the
    replicas of both that serve meanwhile, so that all of them have the same load. ``fit.by_worker`` gives the
    next step no smaller weight: sessions would go to the candidate and back.
    """
    serving = replicas_by_worker(rollout.weight_bp, replicas)
    return max(rollout.weight_bp, serving * WHOLE_BP // max(1, replicas - 1))


def route_of(rollout: Rollout, replicas: int) -> ModelRoute | None:
    """Return the route while the rollout is in its state, None for none. ``replicas``: the deployment's.

    A version is restored as by an update, which needs memory for both versions on no worker.
    """
    if rollout.ended or rollout.phase is RolloutPhase.RESTORING:
        return None
    salt = rollout.salt
    final = rollout.final_arm
    if rollout.phase is RolloutPhase.FINISHING:
        arms: tuple[RouteArm, ...] = (
            RouteArm(final.name, final.version_digest, WHOLE_BP, replicas),
            RouteArm(STABLE, rollout.stable_digest, closed=True),
            *(RouteArm(arm.name, arm.version_digest, closed=True) for arm in rollout.arms if arm != final),
        )
        return ModelRoute(rollout.deployment, salt, arms, rollout.rules)
    weights = weights_of(rollout)
    closed = rollout.phase in (RolloutPhase.ROLLING_BACK, RolloutPhase.WITHDRAWING)
    by_worker = rollout.by_worker and not closed
    stable_replicas = replicas
    if by_worker:
        moving = replicas_of_arm(rollout, final.name, replicas)
        stable_replicas = max(1, replicas - moving)
        if rollout.phase is RolloutPhase.RUNNING and moving > replicas_by_worker(rollout.weight_bp, replicas):
            weights = {final.name: _weight_while_moving(rollout, replicas)}
    kv = {arm.name: 0 if closed else kv_bp_of(rollout, arm.name) for arm in rollout.arms}
    stable_kv_bp = max(_STABLE_KV_BP, WHOLE_BP - sum(kv.values()))
    stable_bp = WHOLE_BP - sum(weights.values())
    arms = (
        RouteArm(STABLE, rollout.stable_digest, stable_bp, stable_replicas, kv_bp=stable_kv_bp),
        *(
            RouteArm(
                arm.name,
                arm.version_digest,
                weights.get(arm.name, 0),
                replicas_of_arm(rollout, arm.name, replicas),
                closed,
                kv[arm.name],
            )
            for arm in rollout.arms
        ),
    )
    running = rollout.phase is RolloutPhase.RUNNING
    rules = rollout.rules
    if rollout.phase is RolloutPhase.SOAKING:  # capped classes change while a rollback is still possible
        rules = replace(rules, class_caps_bp={})
    return ModelRoute(
        rollout.deployment,
        salt,
        arms,
        rules,
        shadow=rollout.shadow if running and rollout.strategy is RolloutStrategy.SHADOW else None,
        step="" if closed else step_name(rollout),
        by_worker=by_worker,
    )


def load_ratio(route: ModelRoute, name: str) -> float:
    """Return the traffic on a replica of an arm over that on a replica of the stable one; 0 without traffic.

    A replica with less traffic computes smaller batches, so its tokens take more device time each.
    """
    arm, stable = route.arm(name), route.stable
    if arm is None or not stable.weight_bp:
        return 0.0
    return arm.weight_bp * stable.replicas / (stable.weight_bp * arm.replicas)


def measured_ratio(route: ModelRoute, name: str, stable: float, candidate: float) -> float:
    """Return the traffic on a replica of an arm over that on a replica of the stable one, as measured.

    It is measured for a shadow, since a gateway leaves copies out when it has no capacity for them, and for a
    soak, whose baseline served at another time. ``stable`` and ``candidate`` are their requests in the same
    time.
    """
    arm = route.arm(name)
    if arm is None or not stable:
        return 0.0
    return candidate * route.stable.replicas / (stable * arm.replicas)


def step_name(rollout: Rollout) -> str:
    """Return the name under which the requests of the present phase and step are counted."""
    running = rollout.phase is RolloutPhase.RUNNING
    return f"{rollout.salt}/{rollout.step if running else rollout.phase}"


def kept_versions(rollouts: Iterable[Rollout], deployments: Iterable[Deployment]) -> dict[str, KeptVersion]:
    """Return the version before the newest final rollout of each deployment, while it has the candidate."""
    serving = {one.meta.name: one.version_digest for one in deployments}
    final = [
        one
        for one in rollouts
        if one.phase in (RolloutPhase.FINISHING, RolloutPhase.COMPLETED)
        and serving.get(one.deployment) == one.final_arm.version_digest
    ]
    return {
        one.deployment: KeptVersion(one.stable_digest, one.phase_unix_s + one.keep_warm_s)
        for one in sorted(final, key=lambda each: each.phase_unix_s)
    }


def deployment_of(rollout: Rollout, deployment: Deployment) -> Deployment:
    """Return the deployment: with the candidate once the rollout is final, as before while it is reverted."""
    match rollout.phase:
        case RolloutPhase.FINISHING:
            final = rollout.final_arm
            return replace(deployment, version=final.version, version_digest=final.version_digest)
        case RolloutPhase.RESTORING | RolloutPhase.WITHDRAWING:
            return replace(deployment, version=rollout.stable_version, version_digest=rollout.stable_digest)
        case _:
            return deployment
