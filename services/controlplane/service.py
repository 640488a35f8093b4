"""The operations of operators, in one object."""

from __future__ import annotations

from collections.abc import Callable

from services.controlplane.resources.accounts import Keys, Sealer, Tenants
from services.controlplane.resources.aliases import Aliases
from services.controlplane.resources.budgets import Budgets
from services.controlplane.resources.deployments import Deployments
from services.controlplane.resources.nodes import Nodes
from services.controlplane.resources.objectives import Objectives
from services.controlplane.resources.quarantine import QuarantinedInputs
from services.controlplane.rollouts.resource import Rollouts
from services.ports.clock import Clock
from services.ports.store import Store
from services.ports.usage import Spending
from services.runtime import secrets


class ControlPlaneService:
    """Stateless: every answer comes from the store, every write is conditional on what was read."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        sealer: Sealer,
        spending: Spending,
        *,
        new_secret: Callable[[], bytes] = secrets.new_secret,
    ) -> None:
        self.tenants = Tenants(store, clock)
        self.keys = Keys(store, clock, sealer, new_secret=new_secret)
        self.budgets = Budgets(store, clock, spending)
        self.aliases = Aliases(store, clock)
        self.deployments = Deployments(store, clock)
        self.nodes = Nodes(store, clock)
        self.rollouts = Rollouts(store, clock)
        self.objectives = Objectives(store, clock)
        self.quarantine = QuarantinedInputs(store, clock)
