"""Whether a rollout's versions fit together with what serves, worked out before it starts. Pure.

The placement planner plans the rollout's largest route. A version that no worker has loaded yet is taken to
need its files' size, and as much working memory and KV as the stable version at least. One that computes the
same as the stable version needs no more memory than that.

Where a canary does not fit together with the stable version, it may still fit in its place: then the rollout
goes worker by worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.controlplane.fleet import Fleet
from services.controlplane.policy.assign import PutAssignment, Unplaced, plan
from services.controlplane.policy.host import arm_deployment
from services.controlplane.policy.memory import MemoryView, needs_of, no_memory
from services.controlplane.rollouts.policy.effects import replicas_by_worker, route_of
from services.controlplane.rollouts.records import Rollout, RolloutPhase, RolloutStep, RolloutStrategy
from services.core.records import AssignedVersion, Deployment
from services.core.rollouts.routes import WHOLE_BP, RevisedRoute, RouteArm


@dataclass(frozen=True, slots=True)
class ArmFit:
    """How an arm fits together with what serves."""

    name: str
    version_digest: str
    # The most that it runs in any step.
    replicas: int
    # On each worker: as measured, otherwise from the size of its files; 0 where it joins an engine.
    needed_bytes: int
    measured: bool
    workers: tuple[str, ...]
    # Replicas without a worker, and (worker, reason) of each that rejects one.
    missing: int = 0
    rejected: tuple[tuple[str, str], ...] = ()


def fit_of(
    rollout: Rollout, deployment: Deployment, fleet: Fleet, sizes: Mapping[str, int]
) -> tuple[ArmFit, ...]:
    """Return how the candidates fit together with the stable version. ``sizes`` are their files', by
    digest."""
    estimates = _estimates(deployment, fleet, sizes)
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
        estimates=estimates,
        engines=fleet.engines,
        groups=fleet.groups,
        beside=fleet.in_rollout,
    )
    workers = {worker.worker_id: worker for worker in fleet.workers}
    missing = {one.deployment: one for one in actions if isinstance(one, Unplaced)}
    puts = [one.assignment for one in actions if isinstance(one, PutAssignment)]
    fits: list[ArmFit] = []
    for arm in arms[1:]:
        digest = arm.version_digest
        short = missing.get(arm_deployment(deployment, arm).meta.name)
        mine = [put for put in puts if any(one.version_digest == digest for one in put.versions)]
        joins = bool(mine) and all(
            MemoryView(workers[put.worker_id], put.versions, measured, fleet.engines).joins(one)
            for put in mine
            for one in put.versions
            if one.version_digest == digest
        )
        fits.append(
            ArmFit(
                arm.name,
                digest,
                arm.replicas,
                0 if null or joins else measured.get(digest, estimates.get(digest, 0)),
                digest in measured or null or joins,
                tuple(put.worker_id for put in mine),
                0 if short is None else short.missing,
                () if short is None else short.rejected,
            )
        )
    return tuple(fits)


def fit_by_worker(
    rollout: Rollout, deployment: Deployment, fleet: Fleet, sizes: Mapping[str, int]
) -> tuple[ArmFit, ...]:
    """Return how the one candidate fits in the place of the stable version, on each of its workers."""
    arm, measured = rollout.final_arm, needs_of(fleet.workers)
    needs = {**_estimates(deployment, fleet, sizes), **measured}
    name, digest = deployment.meta.name, arm.version_digest
    version = AssignedVersion(
        name, deployment.model, digest, deployment.executor, priority=deployment.priority
    )
    workers = {worker.worker_id: worker for worker in fleet.workers}
    taken: list[str] = []
    rejected: list[tuple[str, str]] = []
    for assignment in fleet.assignments:
        worker = workers.get(assignment.worker_id)
        if worker is None or not any(one.deployment == name for one in assignment.versions):
            continue
        others = [one for one in assignment.versions if one.deployment != name]
        if why := no_memory(MemoryView(worker, [*others, version], needs, fleet.engines), version):
            rejected.append((worker.worker_id, why))
        else:
            taken.append(worker.worker_id)
    replicas = replicas_by_worker(WHOLE_BP, deployment.replicas)
    fit = ArmFit(
        arm.name,
        digest,
        replicas,
        0 if deployment.executor == "null" else needs.get(digest, 0),
        digest in measured or deployment.executor == "null",
        tuple(taken),
        min(replicas, len(rejected)),
        tuple(rejected),
    )
    return (fit,)


def by_worker(rollout: Rollout, replicas: int) -> Rollout:
    """Return it going worker by worker: with a step for each worker, of its share of the traffic.

    A step has at least the weight that applies while its last worker passes to the candidate.
    """
    steps: list[RolloutStep] = []
    serving = 0
    for step in rollout.steps:
        needed = replicas_by_worker(step.weight_bp, replicas)
        steps += [replace(step, weight_bp=n * WHOLE_BP // replicas) for n in range(serving + 1, needed)]
        least_bp = (needed - 1) * WHOLE_BP // max(1, replicas - 1) if needed > serving else 0
        steps.append(replace(step, weight_bp=max(step.weight_bp, least_bp)))
        serving = max(serving, needed)
    return replace(rollout, by_worker=True, steps=tuple(steps))


def _estimates(deployment: Deployment, fleet: Fleet, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return what versions that nobody has measured need, by digest."""
    if deployment.executor == "null":
        return {}
    beside = [
        loaded.needed_bytes - loaded.weight_bytes
        for worker in fleet.workers
        for loaded in worker.versions
        if loaded.version_digest == deployment.version_digest and loaded.weight_bytes
    ]
    return {digest: size + max(0, *beside, 0) for digest, size in sizes.items()}


def _most(rollout: Rollout, arm: RouteArm, replicas: int) -> int:
    """Return the most replicas of an arm in any step."""
    in_no_step = rollout.strategy in (RolloutStrategy.AB, RolloutStrategy.SHADOW)
    return arm.replicas if in_no_step else max(1, replicas)
