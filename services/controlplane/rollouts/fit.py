"""Whether a rollout's versions fit beside what serves, worked out before it starts. Pure.

The placement planner plans the rollout's largest route. A version that no worker has loaded yet is taken to
need its files' size; its KV and working memory come on top, from what the versions beside it can spare. One
that computes the same as the stable version needs nothing beside that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.controlplane.fleet import Fleet
from services.controlplane.policy.assign import PutAssignment, Unplaced, plan
from services.controlplane.policy.host import arm_deployment
from services.controlplane.policy.memory import needs_of
from services.controlplane.rollouts.policy.effects import replicas_for, route_of
from services.controlplane.rollouts.records import Rollout, RolloutPhase, RolloutStrategy
from services.core.records import Assignment, Deployment
from services.core.rollouts.routes import WHOLE_BP, RevisedRoute, RouteArm


@dataclass(frozen=True, slots=True)
class ArmFit:
    """How an arm fits beside what serves."""

    name: str
    version_digest: str
    # The most that it runs in any step.
    replicas: int
    # On each worker: as a worker measured it, otherwise the size of its files; 0 where it joins an engine.
    needed_bytes: int
    measured: bool
    workers: tuple[str, ...]
    # Replicas without a worker, and (worker, reason) of each that rejects one.
    missing: int = 0
    rejected: tuple[tuple[str, str], ...] = ()


def fit_of(
    rollout: Rollout, deployment: Deployment, fleet: Fleet, sizes: Mapping[str, int]
) -> tuple[ArmFit, ...]:
    """Return how the candidates fit. ``sizes``: of the versions' files, by digest."""
    route = route_of(replace(rollout, phase=RolloutPhase.LOADING), deployment.replicas)
    assert route is not None, "a rollout that loads has a route"
    arms = tuple(
        replace(arm, replicas=_most(rollout, arm, deployment.replicas)) if number else arm
        for number, arm in enumerate(route.arms)
    )
    measured = needs_of(fleet.workers)
    null = deployment.executor == "null"
    actions = plan(
        fleet.deployments,
        fleet.workers,
        fleet.nodes,
        fleet.assignments,
        [*fleet.routes, RevisedRoute(replace(route, arms=arms), 1)],
        estimates={} if null else sizes,
        engines=fleet.engines,
    )
    missing = {one.deployment: one for one in actions if isinstance(one, Unplaced)}
    puts = [one.assignment for one in actions if isinstance(one, PutAssignment)]
    fits: list[ArmFit] = []
    for arm in arms[1:]:
        digest = arm.version_digest
        short = missing.get(arm_deployment(deployment, arm).meta.name)
        mine = [put for put in puts if any(one.version_digest == digest for one in put.versions)]
        joins = bool(mine) and all(_joins(put, digest, fleet.engines) for put in mine)
        fits.append(
            ArmFit(
                arm.name,
                digest,
                arm.replicas,
                0 if null or joins else measured.get(digest, sizes.get(digest, 0)),
                digest in measured or null or joins,
                tuple(put.worker_id for put in mine),
                0 if short is None else short.missing,
                () if short is None else short.rejected,
            )
        )
    return tuple(fits)


def _joins(planned: Assignment, digest: str, engines: Mapping[str, str]) -> bool:
    """Whether the worker gets another version whose engine serves this one too."""
    return any(
        one.version_digest != digest and engines.get(one.version_digest, "") == engines.get(digest)
        for one in planned.versions
    )


def _most(rollout: Rollout, arm: RouteArm, replicas: int) -> int:
    """Return the most replicas of an arm in any step."""
    if rollout.strategy is RolloutStrategy.SHADOW:
        return arm.replicas
    found = rollout.arm(arm.name)
    if rollout.strategy is RolloutStrategy.AB and found is not None:
        return replicas_for(found.weight_bp, replicas)
    return replicas_for(WHOLE_BP, replicas)
