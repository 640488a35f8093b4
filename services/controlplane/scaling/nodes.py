"""Orders and releases nodes while leading: each order is stored under its id before the provider is called.

So a leader that dies between the two is followed by one that places the same order again, and a provider that
fails, is slow or forgets gets the same id until the order has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import structlog

from services.controlplane.fleet import Fleet, FleetRecord, fleet_of, readable
from services.controlplane.leading import repeat_while_leading
from services.controlplane.resources.status import unplaced_in
from services.controlplane.scaling.policy.nodes import (
    MissingReplicas,
    NodeLimits,
    NodePlan,
    NodeSituation,
    plan_nodes,
    warm_nodes,
)
from services.controlplane.telemetry import NodeTelemetry
from services.core.backoff import Backoff
from services.core.errors import Unavailable
from services.core.records import NODE_ORDERS, NODES, Node, dump
from services.core.scaling import NodeOrder, OrderState
from services.ports.clock import Clock
from services.ports.nodes import NodeProvider
from services.ports.store import Committed, Condition, Delete, ModRevisionIs, Put, Store
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Leadership

log = structlog.get_logger()
PERIOD_S: Final = 2.0
NODE_TYPE_LABEL: Final = "node-type"  # key of a deployment's selector that an order is made with
ZONE_LABEL: Final = "zone"


class NodeController:
    """Runs in every control plane; acts only while it leads, after ``NodeLimits.settle_s``."""

    def __init__(
        self,
        store: Store,
        informer: Informer[FleetRecord | None],
        leadership: Leadership,
        clock: Clock,
        *,
        provider: NodeProvider,
        limits: NodeLimits,
        new_id: Callable[[], str],
        telemetry: NodeTelemetry,
        growth_variance: Callable[[], float],
        leaving: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """``growth_variance``: of the nodes that are needed more while a replica starts; ``leaving`` returns
        the idle deployments that leave full workers, the first to leave first."""
        self._leaving = leaving
        self._store = store
        self._informer = informer
        self._leadership = leadership
        self._clock = clock
        self._provider = provider
        self._limits = limits
        self._new_id = new_id
        self._telemetry = telemetry
        self._growth_variance = growth_variance
        self._idle_since_s: dict[str, float] = {}
        self._backoff = Backoff(PERIOD_S, 300.0)
        self._failures, self._next_s = 0, 0.0
        self._settled_epoch: int | None = None  # epoch in which the provider had taken everything back
        self._term: tuple[int, float] | None = None  # epoch, and when this leader first observed the fleet

    async def run(self) -> None:
        """Make a round every ``PERIOD_S`` while leading, until cancelled; survives a store outage."""
        await repeat_while_leading(
            self._leadership, self._clock, self.round, each_s=PERIOD_S, failed="nodes.store_lost"
        )

    async def round(self, epoch: int) -> None:
        """Follow the orders and make or end some. A provider that fails is called again later."""
        now_s = self._clock.monotonic_s()
        if not self._informer.synced:
            return
        if self._term is None or self._term[0] != epoch:
            self._term, self._idle_since_s = (epoch, now_s), {}
        if now_s < max(self._next_s, self._term[1] + self._limits.settle_s):
            return
        fence = self._leadership.fence(epoch)
        try:
            await self._round(fence, now_s, epoch)
            self._failures = 0
        except Unavailable as error:
            self._failures += 1
            self._next_s = self._clock.monotonic_s() + self._backoff.longest_s(self._failures - 1)
            log.warning("nodes.provider_failed", error=error.message, failures=self._failures)
        self._telemetry.provider_failing(self._failures)

    async def _round(self, fence: Condition, now_s: float, epoch: int) -> None:
        listing = await self._store.list(NODE_ORDERS)
        revisions = {entry.key.removeprefix(NODE_ORDERS): entry.mod_revision for entry in listing.entries}
        orders = [one for entry in listing.entries if (one := readable(entry, NodeOrder)) is not None]
        fleet = fleet_of(held.record for held in self._informer.view.values())
        self._observe_idle(fleet, now_s)
        needs, idle = _needs(fleet, self._leaving()), len(self._idle_since_s)
        warm = warm_nodes(len(fleet.workers) - idle, self._growth_variance(), self._limits)
        done = not needs and idle >= warm and all(one.ended for one in orders)
        if done and self._settled_epoch == epoch:
            self._telemetry.orders(orders)
            return  # a provider without an order need not be called
        plan = plan_nodes(
            NodeSituation(
                orders,
                await self._provider.list(),
                {worker.worker_id for worker in fleet.workers},
                self._idle_since_s,
                needs,
                warm,
                self._clock.unix_s(),
                now_s,
            ),
            self._limits,
            self._new_id(),
        )
        stored = [one for one in plan.stored if await self._store_order(one, revisions, fence)]
        for name in plan.forgotten:
            await self._store.commit(
                [Delete(NODE_ORDERS + name)], [fence, ModRevisionIs(NODE_ORDERS + name, revisions[name])]
            )
        await self._drain(orders, stored, fence)
        if len(stored) == len(plan.stored):  # otherwise deposed, and the successor calls
            self._settled_epoch = None
            if await self._call(plan, fence):
                self._settled_epoch = epoch
        changed = {one.order_id: one for one in stored}
        self._telemetry.orders([*(changed.pop(one.order_id, one) for one in orders), *changed.values()])

    async def _call(self, plan: NodePlan, fence: Condition) -> bool:
        """Return whether the provider took back all that was released. Raises Unavailable."""
        failed, kept = None, False
        for order in plan.placed:
            log.info("nodes.ordered", order=order.order_id, type=order.node_type, zone=order.zone)
            try:
                await self._provider.order(order.order_id, order.node_type, order.zone)
            except Unavailable as error:  # a type that cannot be had does not keep the nodes that leave
                failed = error
        for order in plan.released:
            if order.node and not await self._provider.release(order.node):
                kept = True
                continue
            log.info("nodes.released", order=order.order_id, node=order.node)
            if order.state is OrderState.FAILED:
                continue
            ended = replace(order, state=OrderState.RELEASED, ended_unix_s=self._clock.unix_s())
            await self._store.commit(
                [Put(NODE_ORDERS + order.order_id, dump(ended)), Delete(NODES + order.node)], [fence]
            )
        if failed is not None:
            raise failed
        return not kept

    async def _store_order(self, order: NodeOrder, revisions: dict[str, int], fence: Condition) -> bool:
        key = NODE_ORDERS + order.order_id
        unchanged = ModRevisionIs(key, revisions.get(order.order_id, 0))
        return isinstance(await self._store.commit([Put(key, dump(order))], [fence, unchanged]), Committed)

    async def _drain(self, before: list[NodeOrder], stored: list[NodeOrder], fence: Condition) -> None:
        """Drain the nodes that leave from now on, and let those work that stay after all."""
        was = {one.order_id: (one.state is OrderState.LEAVING, one.ends_unix_s) for one in before}
        for order in stored:
            leaves = order.state is OrderState.LEAVING
            changes = (leaves, order.ends_unix_s) != was.get(order.order_id, (False, 0.0))
            if order.node and changes and order.state in (OrderState.LEAVING, OrderState.RUNNING):
                entry = await self._store.get(NODES + order.node)
                node = (readable(entry, Node) if entry is not None else None) or Node(order.node)
                changed = replace(node, cordoned=leaves, draining=leaves, ends_unix_s=order.ends_unix_s)
                unchanged = ModRevisionIs(NODES + order.node, 0 if entry is None else entry.mod_revision)
                await self._store.commit([Put(NODES + order.node, dump(changed))], [fence, unchanged])

    def _observe_idle(self, fleet: Fleet, now_s: float) -> None:
        """Keep since when each live worker has had neither an assignment nor a version."""
        busy = {one.worker_id for one in fleet.assignments if one.versions}
        idle = {one.worker_id for one in fleet.workers if not one.versions and one.worker_id not in busy}
        self._idle_since_s = {name: self._idle_since_s.get(name, now_s) for name in sorted(idle)}


def _needs(fleet: Fleet, leaving: Sequence[str]) -> list[MissingReplicas]:
    """Return what has no node, and needs one. A deployment of a tenant's own nodes waits for its operator."""
    unplaced = unplaced_in(fleet, leaving)
    return [
        MissingReplicas(
            one.meta.name,
            unplaced[one.meta.name].missing,
            one.node_selector.get(NODE_TYPE_LABEL, ""),
            one.node_selector.get(ZONE_LABEL, ""),
        )
        for one in fleet.deployments
        if one.meta.name in unplaced and not one.tenant
    ]
