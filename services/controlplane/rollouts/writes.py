"""The one transaction that stores a rollout's state with everything that follows from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.controlplane.resources.deployments import kept, states_in
from services.controlplane.rollouts.policy.effects import deployment_of, route_of
from services.controlplane.rollouts.records import Rollout, RolloutPhase
from services.core.records import DEPLOYMENTS, SCALED, Deployment, dump
from services.core.rollouts.routes import ROUTES, ModelRoute
from services.core.scaling import Scaled
from services.ports.store import Condition, Delete, ModRevisionIs, Operation, Put
from services.runtime.fleet_state.informer import Versioned
from services.runtime.idempotent_writes import WriteSet


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The stored deployment and route of a rollout, with their revisions; 0: no route.

    ``states``: the keys of the deployment's history, the oldest first.
    """

    deployment: Deployment
    deployment_revision: int
    route: ModelRoute | None = None
    route_revision: int = 0
    scaled: Scaled | None = None
    states: tuple[str, ...] = ()

    @property
    def wanted(self) -> Deployment:
        """The deployment with the replicas that it is to have now."""
        return self.deployment.scaled_by(self.scaled)


def context_in(view: Mapping[str, Versioned[Any]], deployment: str) -> RolloutContext | None:
    """Return the context from a view of the fleet, None without the deployment."""
    held, routed = view.get(DEPLOYMENTS + deployment), view.get(ROUTES + deployment)
    if held is None:
        return None
    decided = view.get(SCALED + deployment)
    scaled, states = None if decided is None else decided.record, states_in(view, deployment)
    if routed is None:
        return RolloutContext(held.record, held.mod_revision, scaled=scaled, states=states)
    route = routed.record.route
    return RolloutContext(held.record, held.mod_revision, route, routed.mod_revision, scaled, states)


def effects(rollout: Rollout, context: RolloutContext) -> WriteSet:
    """Return the writes of route and deployment that follow from the rollout's state.

    They hold for the revisions in ``context``: whoever changed one of them makes the transaction fail.
    """
    deployment = deployment_of(rollout, context.deployment)
    route = route_of(rollout, context.wanted.replicas)
    conditions: list[Condition] = [ModRevisionIs(ROUTES + rollout.deployment, context.route_revision)]
    operations: list[Operation] = []
    if route is None and context.route_revision:
        operations.append(Delete(ROUTES + rollout.deployment))
    elif route is not None and route != context.route:
        route.check_integrity()
        operations.append(Put(ROUTES + rollout.deployment, dump(route)))
    if deployment != context.deployment:
        key = DEPLOYMENTS + rollout.deployment
        conditions.append(ModRevisionIs(key, context.deployment_revision))
        undone = rollout.phase is RolloutPhase.RESTORING
        cause = f"revert of rollout {rollout.meta.name}" if undone else f"rollout {rollout.meta.name}"
        operations.append(Put(key, dump(deployment)))
        operations += kept(deployment, rollout.phase_unix_s, cause, states=context.states)
    return WriteSet(conditions, operations)
